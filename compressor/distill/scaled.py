"""Matrices as frozen codes times trainable scales, with gradients for the scales and the input only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from compressor.calibration.linear import linear, onednn_is_faster
from compressor.core.tensors import QTensor

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LIMIT = 0.5
"""A log factor further from 0 is cut: no sane training leaves a scale by more than exp(0.5) = 1.65."""


class Trained:
    """A stored tensor times exp(u) per element, u trained; read as what its file will hold.

    Attributes:
        name: The stored tensor, e.g. ``model.layers.0.mlp.up_proj.weight_scale``.
        base: float32, the values it started from.
        dtype: safetensors dtype it is stored in (``BF16``, ``F16``, ``F32``).
        log_factor: float32 like base, the trained parameter, 0 at the start.
    """

    def __init__(self, name: str, base: torch.Tensor, dtype: str) -> None:
        self.name, self.base, self.dtype = name, base, dtype
        self.log_factor = torch.zeros_like(base).requires_grad_()

    def value(self) -> torch.Tensor:
        """Float32 like base, rounded to dtype; gradients pass the rounding as if it were not there."""
        exact = self.base * self.log_factor.clamp(-LIMIT, LIMIT).exp()
        rounded = exact.detach().to(TORCH_DTYPES[self.dtype]).float()
        if not torch.is_grad_enabled():
            return rounded
        return rounded + (exact - exact.detach())


class _Dequantize(torch.autograd.Function):
    """(codes - zeros) * scales; the backward sums the weight's gradient times its code over each group."""

    @staticmethod
    def forward(ctx: Any, scales: torch.Tensor, codes: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        ctx.codes, ctx.zeros, ctx.shape = codes, zeros, scales.shape
        levels = codes.view(*scales.shape, -1).float()
        if zeros is not None:
            levels.sub_(zeros[..., None])
        return levels.mul_(scales[..., None]).view(codes.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grouped = gradients[0].reshape(*ctx.shape, -1)
        found = torch.linalg.vecdot(grouped, ctx.codes.view(*ctx.shape, -1).float())
        if ctx.zeros is not None:
            found -= grouped.sum(-1) * ctx.zeros
        return found, None, None


class _Product(torch.autograd.Function):
    """``linear`` with gradients, each product through the faster back end."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, weight.shape[0])
        for_x = input_gradient(gradient, weight).view_as(x) if ctx.needs_input_grad[0] else None
        for_weight = None
        if ctx.needs_input_grad[1]:
            for_weight = weight_gradient(gradient, x.reshape(-1, weight.shape[1]))
        return for_x, for_weight, None


def input_gradient(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Float32 [n, out] times [out, in] -> [n, in]."""
    if gradient.device.type == "cpu" and onednn_is_faster():
        return linear(gradient, weight.T.contiguous())
    return gradient @ weight


def weight_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Float32 [n, out] transposed times [n, in] -> [out, in]."""
    if gradient.device.type == "cpu" and onednn_is_faster():
        return linear(gradient.T.contiguous(), x.T.contiguous())
    return gradient.T @ x


def dequantize(scales: torch.Tensor, codes: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """The matrix float32 [out, in] of codes int8 [out, in], with a gradient for the scales alone.

    Args:
        scales: float32 [out, groups], [out, 1] (channel) or [1, 1] (tensor).
        codes: int8 [out, in], contiguous.
        zeros: int8 like scales, or None.
    """
    return _Dequantize.apply(scales, codes, zeros)  # type: ignore[no-untyped-call,no-any-return]


class FrozenLinear(nn.Linear):
    """A linear layer of floats that lets gradients through to its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Product of x float32 [..., in] with the weight, plus bias."""
        return _Product.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call,no-any-return]


class ScaledLinear(nn.Module):
    """A linear layer of frozen codes. ``scales`` is handed in for each call (torch.func.functional_call).

    The codes are no buffer: they stay where they are when a block's weights are dropped.
    """

    scales: torch.Tensor

    def __init__(self, tensor: QTensor, device: str, bias: bool) -> None:
        super().__init__()
        self.codes = torch.from_numpy(tensor.codes).clone().to(device)
        self.zeros = None if tensor.zeros is None else torch.from_numpy(tensor.zeros).clone().to(device)
        self.register_buffer("scales", torch.empty(tensor.scales.shape, device="meta"), persistent=False)
        empty = torch.empty(tensor.codes.shape[0], device="meta")
        self.bias = nn.Parameter(empty, requires_grad=False) if bias else None

    def weight(self, scales: torch.Tensor) -> torch.Tensor:
        """Float32 [out, in]: codes times these scales."""
        return dequantize(scales, self.codes, self.zeros)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Product of x float32 [..., in] with the dequantized matrix, plus bias."""
        weight = self.weight(self.scales)
        return _Product.apply(x, weight, self.bias)  # type: ignore[no-untyped-call,no-any-return]
