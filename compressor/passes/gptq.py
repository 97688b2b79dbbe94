"""GPTQ (arXiv 2210.17323): round column by column, later columns make up for the error of earlier ones.

Scales are fixed before any column is rounded (static groups), so with ``act_order`` the columns are
visited by falling Hessian diagonal and the result is still stored in the original order.

Dead columns (inputs that were zero throughout calibration) touch no other column: their Hessian rows
are zero. They keep their original weights, rounded; calibration says nothing about them, and an input
that wakes up later should meet the weight it was trained with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from compressor.calibration.stats import LayerStats
from compressor.core.spec import Spec
from compressor.core.tensors import QTensor
from compressor.kernels import affine
from compressor.kernels.gptq import quantize_columns
from compressor.passes.base import PassOptions, Rounded

NEEDS: frozenset[str] = frozenset({"hessian"})
KIND = "round"
SYMMETRIC_ONLY = False

LARGEST_DAMP = 1.0
_FIRST_RAISE = 1e-3
_STRIP = 1024


class Options(PassOptions):
    """Options of gptq."""

    scales: Literal["absmax", "mse"] = Field(
        "mse", description="mse picks the scales of least squared error, columns weighted by the Hessian"
    )
    range: Literal["full", "textbook"] = Field(
        "full", description="full uses codes -2^(b-1)..2^(b-1)-1; textbook leaves out the lowest one"
    )
    act_order: bool = Field(True, description="round the columns with the strongest inputs first")
    damp: float = Field(0.01, ge=0, le=LARGEST_DAMP, description="added to the diagonal, times its mean")
    block_size: int = Field(128, ge=1, description="columns between two matrix products; speed only")


@dataclass(frozen=True)
class _Rounding:
    """A weight on its grid: everything that is needed to round it one way or the other."""

    weight: NDArray[np.float32]
    scales: NDArray[np.float32]
    zeros: NDArray[np.int8] | None
    low: int
    high: int
    spec: Spec

    def nearest(self) -> QTensor:
        """Every weight to its nearest code."""
        codes = affine.round_codes(self.weight, self.scales, self.zeros, self.low, self.high)
        return self.tensor(codes)

    def tensor(self, codes: NDArray[np.int8]) -> QTensor:
        """Codes on this grid."""
        return QTensor(codes, self.scales, self.zeros, self.spec)


def run(
    weight: NDArray[np.float32],
    spec: Spec,
    stats: LayerStats | None,
    options: Options,
    device: str = "cpu",
) -> Rounded:
    """Round weight float32 [out, in] by the Hessian of its inputs.

    Facts (always these keys): ``rounding`` (``gptq``, or ``rtn`` when that was no worse), ``damp`` used,
    ``dead_columns``, ``error`` = tr((W - Q) H (W - Q)^T) / tokens, ``error_rtn`` (the same for round to
    nearest on the same scales), and ``relative_error``, ``relative_error_rtn`` = those over
    tr(W H W^T) / tokens. Without usable statistics everything is rounded to nearest: degraded.
    """
    if stats is None or stats.tokens == 0:
        return _fallback(_grid(weight, spec, options, None), "no calibration tokens reached it")
    if tuple(stats.hessian.shape) != (weight.shape[1],) * 2:
        raise ValueError(f"Hessian {tuple(stats.hessian.shape)} does not fit a weight {weight.shape}")
    hessian = stats.hessian.to(device)
    if not _finite(hessian):
        return _fallback(_grid(weight, spec, options, None), "its Hessian is not finite")
    living = hessian.diagonal() > 0
    if not bool(living.any()):
        return _fallback(_grid(weight, spec, options, None), "all its inputs were zero")
    rounding = _grid(weight, spec, options, _importance(hessian.diagonal(), living, options.damp))
    order = _order(hessian.diagonal(), options.act_order)
    upper, damp = _factor(hessian, living, order, options.damp)
    if upper is None:
        return _fallback(rounding, f"its Hessian has no Cholesky factor even with damp {damp:g}")
    codes = _columns(rounding, upper, order, options.block_size)
    del upper
    facts: dict[str, Any] = {"damp": damp, "dead_columns": int((~living).sum())}
    return _better(rounding, rounding.tensor(codes), hessian, stats.tokens, facts)


def _importance(diagonal: torch.Tensor, living: torch.Tensor, damp: float) -> NDArray[np.float32]:
    """float32 [in]: what a column's error costs, damped as the Hessian is; the mean column costs one."""
    importance: NDArray[np.float32] = (diagonal / diagonal[living].mean() + damp).cpu().numpy()
    return importance


def _grid(
    weight: NDArray[np.float32], spec: Spec, options: Options, importance: NDArray[np.float32] | None
) -> _Rounding:
    """Scales and zeros for the weight, columns weighted by importance."""
    low, high = affine.code_range(spec.bits, options.range if spec.symmetric else "full")
    scales, zeros = affine.choose_scales(
        weight,
        spec.bits,
        spec.group_size,
        symmetric=spec.symmetric,
        scale_dtype=spec.scale_dtype,
        convention=options.range,
        search=options.scales,
        importance=importance,
    )
    return _Rounding(weight, scales, zeros, low, high, spec)


def _fallback(rounding: _Rounding, why: str) -> Rounded:
    facts = dict.fromkeys(("error", "error_rtn", "relative_error", "relative_error_rtn"))
    facts |= {"rounding": "rtn", "damp": None, "dead_columns": None}
    return Rounded(rounding.nearest(), facts, (f"gptq: rounded to nearest, because {why}",))


def _order(diagonal: torch.Tensor, act_order: bool) -> torch.Tensor:
    """int64 [in]: the columns in the order of rounding; equal ones from left to right."""
    if act_order:
        return torch.argsort(diagonal, descending=True, stable=True)
    return torch.arange(diagonal.numel(), device=diagonal.device)


def _ladder(damp: float) -> Iterator[float]:
    """The damp asked for, then tenfold steps up to LARGEST_DAMP."""
    yield damp
    while damp < LARGEST_DAMP:
        damp = min(LARGEST_DAMP, max(10 * damp, _FIRST_RAISE))
        yield damp


def _factor(
    hessian: torch.Tensor, living: torch.Tensor, order: torch.Tensor, damp: float
) -> tuple[torch.Tensor | None, float]:
    """U float32 [in, in] for the columns in this order, and the damp used.

    U is upper with U^T U = (H + damp * mean(diagonal) * I)^-1. Each damp is tried in float32, then in
    float64; (None, last damp) when nothing worked.
    """
    for tried in _ladder(damp):
        for dtype in (torch.float32, torch.float64):
            upper = _inverse_factor(hessian, living, order, tried, dtype)
            if upper is not None:
                return upper.float(), tried
    return None, tried


def _inverse_factor(
    hessian: torch.Tensor, living: torch.Tensor, order: torch.Tensor, damp: float, dtype: torch.dtype
) -> torch.Tensor | None:
    """One try of _factor: one factorization and one triangular solve; the inverse is never formed.

    With the order reversed, H = L L^T and H^-1 = (L^-1)^T L^-1; reversing L^-1 back gives U. Names are
    given up early, for each of these matrices may be gigabytes.
    """
    lower, info = torch.linalg.cholesky_ex(_damped(hessian, living, order.flip(0), damp, dtype))
    if int(info) != 0:
        return None
    inverse = torch.eye(len(order), dtype=dtype, device=hessian.device)
    inverse = torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse)
    del lower
    return inverse.flip(0, 1) if _finite(inverse) else None


def _finite(matrix: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite, without a mask as large as the matrix."""
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(matrix))


def _damped(
    hessian: torch.Tensor, living: torch.Tensor, order: torch.Tensor, damp: float, dtype: torch.dtype
) -> torch.Tensor:
    """The Hessian in this order, damped by damp * the mean living diagonal.

    Dead columns get that mean as their diagonal (any positive number would do).
    """
    diagonal = hessian.diagonal().to(dtype)
    mean = diagonal[living].mean()
    filled = torch.where(living, diagonal, mean) + damp * mean
    damped = hessian[order[:, None], order].to(dtype)
    damped.diagonal().copy_(filled[order])
    return damped


def _columns(rounding: _Rounding, upper: torch.Tensor, order: torch.Tensor, block: int) -> NDArray[np.int8]:
    """Codes in the original order of columns."""
    columns = rounding.weight.shape[1]
    width = rounding.spec.columns_per_scale(columns)
    permutation = order.cpu().numpy()
    groups = (permutation // width).astype(np.int32)
    weight = np.take(rounding.weight, permutation, axis=1)
    limits = rounding.low, rounding.high
    if upper.device.type == "cpu":
        grid = rounding.scales, rounding.zeros
        ordered, _ = quantize_columns(weight, upper.numpy(), *grid, groups, *limits, block)
    else:
        moved = [_to_device(a, upper.device) for a in (weight, rounding.scales, rounding.zeros, groups)]
        on_device, _ = columns_torch(moved[0], upper, moved[1], moved[2], moved[3], *limits, block)
        ordered = on_device.cpu().numpy()
    codes = np.empty_like(ordered)
    codes[:, permutation] = ordered
    return codes


def _to_device(array: NDArray[Any] | None, device: torch.device) -> Any:
    return None if array is None else torch.from_numpy(array).to(device)


def columns_torch(
    weight: torch.Tensor,
    upper: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_of_column: torch.Tensor,
    qmin: int,
    qmax: int,
    block: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:
    """kernels.gptq.quantize_columns for an accelerator: same arguments and results, as tensors.

    Codes equal the kernel's in float64; in float32 the matrix products may round otherwise.
    """
    rows, columns = weight.shape
    groups = group_of_column.long()
    zeros = torch.zeros_like(scales) if zeros is None else zeros
    scale, zero = (grid.to(weight.dtype).expand(rows, -1)[:, groups] for grid in (scales, zeros))
    codes = torch.empty(rows, columns, dtype=torch.int8, device=weight.device)
    errors, loss = torch.empty_like(weight), torch.zeros(rows, dtype=torch.float64, device=weight.device)
    for start in range(0, columns, block):
        end = min(start + block, columns)
        work = weight[:, start:end] - errors[:, :start] @ upper[:start, start:end]
        for i in range(start, end):
            left = work[:, i - start]
            code = ((left / scale[:, i]).round() + zero[:, i]).clamp(qmin, qmax)
            error = (left - (code - zero[:, i]) * scale[:, i]) / upper[i, i]
            work[:, i - start + 1 :].addr_(error, upper[i, i + 1 : end], alpha=-1)
            codes[:, i], errors[:, i] = code.to(torch.int8), error
        loss += errors[:, start:end].double().square().sum(dim=1)
    return codes, loss


def _better(
    rounding: _Rounding, rounded: QTensor, hessian: torch.Tensor, tokens: int, facts: dict[str, Any]
) -> Rounded:
    """GPTQ's codes, or round to nearest where those err no more; with the errors of both."""
    nearest = rounding.nearest()
    weight = rounding.weight
    error, error_rtn = (_cost(weight - q.dequantize(), hessian) / tokens for q in (rounded, nearest))
    total = _cost(weight, hessian) / tokens
    kept, rounding_name = (rounded, "gptq") if error < error_rtn else (nearest, "rtn")
    facts |= {"rounding": rounding_name, "error": min(error, error_rtn), "error_rtn": error_rtn}
    facts["relative_error"] = facts["error"] / total if total else 0.0
    facts["relative_error_rtn"] = error_rtn / total if total else 0.0
    return Rounded(kept, facts)


def _cost(difference: NDArray[np.float32], hessian: torch.Tensor) -> float:
    """tr(D H D^T) for D float32 [out, in], a strip of columns at a time.

    H is symmetric: off the diagonal blocks, its upper half counts twice.
    """
    moved = torch.from_numpy(difference).to(hessian.device)
    total = 0.0
    for start in range(0, moved.shape[1], _STRIP):
        strip = moved[:, start : start + _STRIP]
        before = 2 * (moved[:, :start] @ hessian[:start, start : start + _STRIP])
        product = before + strip @ hessian[start : start + _STRIP, start : start + _STRIP]
        total += float((product * strip).sum(dim=1).double().sum())
    return max(0.0, total)
