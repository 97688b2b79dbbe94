"""Statistics of what flows into a linear layer, mergeable in any order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from compressor.calibration.linear import bf16_is_faster, bf16_products, linear, onednn_is_faster

_PANEL = 1024
"""Rows of the Hessian made symmetric at a time: what that needs beside it."""


@dataclass
class LayerStats:
    """Moments of a linear's input over calibration tokens.

    x is the input as it arrives behind blocks that are already rounded, x_float the one of the float model.

    Attributes:
        hessian: float32 [in, in], the sum of x x^T over tokens (GPTQ's H up to a factor), symmetric.
        tokens: How many tokens went in.
        cross: float32 [in, in], the sum of (x_float - x) x^T, or None when the float model was not run beside.
        absmax: float32 [in], the largest |x|.
        held_out: The same over calibration tokens that are in none of the sums above, or None.
        memo: What passes derived from these statistics and may share (the factors of the Hessian).
    """

    hessian: torch.Tensor
    tokens: int = 0
    cross: torch.Tensor | None = None
    absmax: torch.Tensor | None = None
    held_out: LayerStats | None = None
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def empty(cls, in_features: int, device: str = "cpu", *, cross: bool = False) -> LayerStats:
        """Statistics of no tokens yet."""

        def zeros() -> torch.Tensor:
            return torch.zeros(in_features, in_features, dtype=torch.float32, device=device)

        absmax = torch.zeros(in_features, dtype=torch.float32, device=device)
        return cls(zeros(), cross=zeros() if cross else None, absmax=absmax)

    def add(
        self, inputs: torch.Tensor, exact: torch.Tensor | None = None, *, bf16: bool = False, settle: bool = True
    ) -> None:
        """Add inputs float32 [..., in]: every leading position is one token.

        ``exact`` is the float model's input at the same positions; wanted when ``cross`` is kept. With
        ``bf16``, cross may be summed from factors rounded to bfloat16; the Hessian never is. Without
        ``settle`` the Hessian is whole only after ``settle()``: cheaper where many batches come.
        """
        flat = inputs.reshape(-1, inputs.shape[-1]).float()
        _add_square(self.hessian, flat)
        if self.absmax is not None:
            low, high = torch.aminmax(flat, dim=0)
            torch.maximum(self.absmax, torch.maximum(high, -low), out=self.absmax)
        if self.cross is not None:
            assert exact is not None
            with bf16_products(bf16):
                _add_product(self.cross, exact.reshape(flat.shape).float() - flat, flat)
        self.tokens += flat.shape[0]
        self.memo.clear()
        if settle:
            self.settle()

    def settle(self) -> None:
        """Make the Hessian symmetric, panel by panel in place: the mean of the sum so far and its transpose."""
        for first in range(0, len(self.hessian), _PANEL):
            rows = self.hessian[first : first + _PANEL, first:]
            columns = self.hessian[first:, first : first + _PANEL]
            mean = (rows + columns.T) / 2
            rows.copy_(mean)
            columns.copy_(mean.T)
        if self.held_out is not None:
            self.held_out.settle()

    def merge(self, other: LayerStats) -> LayerStats:
        """The statistics of both token sets together; what only one of them has is left out."""
        cross = None if self.cross is None or other.cross is None else self.cross + other.cross
        absmax = None
        if self.absmax is not None and other.absmax is not None:
            absmax = torch.maximum(self.absmax, other.absmax)
        held = None
        if self.held_out is not None and other.held_out is not None:
            held = self.held_out.merge(other.held_out)
        return LayerStats(self.hessian + other.hessian, self.tokens + other.tokens, cross, absmax, held)

    def divided(self, scales: torch.Tensor) -> LayerStats:
        """The statistics of inputs divided by scales float32 [in], as after a fold."""
        by = scales[:, None] * scales
        return LayerStats(
            self.hessian / by,
            self.tokens,
            None if self.cross is None else self.cross / by,
            None if self.absmax is None else self.absmax / scales,
            None if self.held_out is None else self.held_out.divided(scales),
        )

    def whole(self) -> LayerStats:
        """These tokens and the held-out ones in one sum, made once."""
        if self.held_out is None:
            return self
        if "whole" not in self.memo:
            alone = LayerStats(self.hessian, self.tokens, self.cross, self.absmax)
            self.memo["whole"] = alone.merge(self.held_out)
        found: LayerStats = self.memo["whole"]
        return found


def _add_square(total: torch.Tensor, x: torch.Tensor) -> None:
    """Total float32 [in, in] += x^T x for float32 [tokens, in], to about 2^-17 of the factors.

    Where bfloat16 is faster: x = high + low, both exact in it but for 2^-17 of x, and two products do. What is
    added, high^T (high + 2 low), is x^T x only in its symmetric part. A Hessian of inputs rounded to 2^-9 is of
    no use to rounding.
    """
    if x.device.type != "cpu" or not bf16_is_faster():
        _add_product(total, x, x)
        return
    high = x.bfloat16().float()
    with bf16_products():
        total.addmm_(high.T, high)
        total.addmm_(high.T, x - high, alpha=2)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Total float32 [a, b] += left^T right for float32 [tokens, a] and [tokens, b]."""
    if right.device.type == "cpu" and onednn_is_faster():
        total += linear(left.T.contiguous(), right.T.contiguous())
    else:
        total.addmm_(left.T, right)
