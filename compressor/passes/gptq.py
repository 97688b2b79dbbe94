"""GPTQ (arXiv 2210.17323): round column by column, later columns make up for the error of earlier ones.

Scales are fixed before any column is rounded (static groups), so with ``act_order`` the columns are
visited by falling Hessian diagonal and the result is still stored in the original order.

Dead columns (inputs that were zero throughout calibration) touch no other column: their Hessian rows
are zero. They keep their original weights, rounded; calibration says nothing about them, and an input
that wakes up later should meet the weight it was trained with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from compressor.calibration.factor import LARGEST_DAMP, Factor, damped, factor, finite
from compressor.calibration.stats import LayerStats
from compressor.core.grid import Grid, choose_grid
from compressor.core.spec import Spec
from compressor.core.tensors import QTensor
from compressor.kernels import affine, descent
from compressor.passes.base import PassOptions, Rounded

NEEDS: frozenset[str] = frozenset({"hessian", "cross", "held_out"})
KIND = "round"
SYMMETRIC_ONLY = False
FLOATS = True

_STRIP = 1024


class Options(PassOptions):
    """Options of gptq."""

    scales: Literal["absmax", "mse"] = Field(
        "mse", description="mse picks the scales of least error, columns weighted by their pivots"
    )
    range: Literal["full", "textbook"] = Field(
        "full", description="full uses codes -2^(b-1)..2^(b-1)-1; textbook leaves out the lowest one"
    )
    act_order: bool = Field(True, description="round the columns with the strongest inputs first")
    damp: float = Field(0.01, ge=0, le=LARGEST_DAMP, description="added to the diagonal, times its mean")
    propagate: float = Field(
        0.7, ge=0, le=1, description="share of the earlier linears' error that this one makes up for"
    )
    propagate_damp: float = Field(
        0.1, ge=0, le=LARGEST_DAMP, description="like damp, where that share is estimated"
    )
    refits: int = Field(
        0, ge=0, le=20, description="how often all scales of a row are refitted together and it is rounded anew"
    )
    sweeps: int = Field(0, ge=0, le=20, description="rounds of coordinate descent over the codes at the end")
    held_out: bool = Field(
        False,
        description="keep refits and sweeps only where tokens kept apart agree; statistics take twice the memory",
    )
    block_size: int = Field(128, ge=1, description="columns between two matrix products; speed only")


def needs(options: Options) -> frozenset[str]:
    """The statistics wanted with these options."""
    wanted = {"hessian"} | ({"cross"} if options.propagate else set())
    return frozenset(wanted | ({"held_out"} if options.held_out and (options.refits or options.sweeps) else set()))


def run(
    weight: NDArray[np.float32],
    spec: Spec,
    stats: LayerStats | None,
    options: Options,
    device: str = "cpu",
) -> Rounded:
    """Round weight float32 [out, in] by the Hessian of its inputs.

    Facts (always these keys): ``rounding`` (``gptq``, or ``rtn`` when that was no worse), ``damp`` used,
    ``dead_columns``, ``refined`` (whether refits and sweeps were kept), ``moved`` = ||W* - W|| / ||W|| of the
    weight W* that was rounded, ``error`` =
    tr((W* - Q) H (W* - Q)^T) / tokens, ``error_rtn`` (the same for round to nearest on the same scales), and
    ``relative_error``, ``relative_error_rtn`` = those over tr(W* H W*^T) / tokens. Without usable
    statistics everything is rounded to nearest: degraded.
    """
    whole = stats.whole() if stats is not None else None
    if whole is None or whole.tokens == 0:
        return _fallback(_grid(weight, spec, options, None), "no calibration tokens reached it")
    if tuple(whole.hessian.shape) != (weight.shape[1],) * 2:
        raise ValueError(f"Hessian {tuple(whole.hessian.shape)} does not fit a weight {weight.shape}")
    hessian = whole.hessian.to(device)
    if not finite(hessian):
        return _fallback(_grid(weight, spec, options, None), "its Hessian is not finite")
    if not bool((hessian.diagonal() > 0).any()):
        return _fallback(_grid(weight, spec, options, None), "all its inputs were zero")
    found = factor(whole, options.damp, act_order=options.act_order, device=device)
    propagates = bool(options.propagate) and whole.cross is not None and found.upper is not None
    target = _propagated(weight, whole, options, device) if propagates else weight
    importance = _importance(hessian.diagonal(), found, options.damp, pivots=propagates)
    grid = _grid(target, spec, options, importance)
    if found.upper is None:
        return _fallback(grid, f"its Hessian has no Cholesky factor even with damp {found.damp:g}")
    rounded = _columns(grid, found.upper, found.order, options.block_size)
    assert stats is not None
    wanted = bool(options.refits or options.sweeps)
    refined = wanted and _refining_pays(target, spec, stats, options, device, pivots=propagates)
    if refined:
        grid, rounded = _refine(grid, rounded, hessian, found, options)
    facts: dict[str, Any] = {"damp": found.damp, "dead_columns": int((~found.living).sum())}
    facts["refined"] = refined
    facts["moved"] = float(np.linalg.norm(target - weight) / max(float(np.linalg.norm(weight)), 1e-30))
    return _better(grid, rounded, hessian, whole.tokens, facts)


def _propagated(
    weight: NDArray[np.float32], stats: LayerStats, options: Options, device: str = "cpu"
) -> NDArray[np.float32]:
    """W (I + propagate C (H + propagate_damp mean(diagonal) I)^-1): the float model's outputs on these inputs.

    With C = sum (x_float - x) x^T, W C H^-1 is the least squares answer to x having drifted (QEP,
    arXiv 2504.09629; GPTAQ, arXiv 2504.02692); the ridge keeps it from fitting the noise of few tokens.
    C H^-1 serves all linears that share the input. Without a factor the weight stays as it is.
    """
    key = ("propagation", options.propagate_damp, device)
    if key not in stats.memo:
        stats.memo[key] = _drift(stats, options.propagate_damp, device)
    left = torch.from_numpy(weight).to(device)
    target: NDArray[np.float32] = torch.addmm(left, left, stats.memo[key], alpha=options.propagate).cpu().numpy()
    return target


def _drift(stats: LayerStats, damp: float, device: str) -> torch.Tensor:
    """C (H + damp * mean(diagonal) * I)^-1, float32 [in, in]; zeros where nothing can be solved."""
    assert stats.cross is not None
    hessian, cross = stats.hessian.to(device), stats.cross.to(device)
    living = hessian.diagonal() > 0
    for dtype in (torch.float32, torch.float64):
        lower, info = torch.linalg.cholesky_ex(damped(hessian, living, None, damp, dtype))
        if int(info) == 0:
            return torch.cholesky_solve(cross.T.to(dtype), lower).T.float()
    return torch.zeros_like(cross)


def _importance(diagonal: torch.Tensor, found: Factor, damp: float, *, pivots: bool) -> NDArray[np.float32]:
    """float32 [in]: what a unit error in a column costs; the mean column costs one.

    With error feedback the loss is exactly sum_j d_j e_j^2, d_j = U_jj^-2 being the pivots of the damped
    Hessian's LDL^T in the order of rounding (arXiv 2507.18553). Scales chosen by them clip more, and what
    that does to the mean output is only made good where the next linears propagate: without ``pivots``, the
    damped diagonal counts (measured in docs/methods.md).
    """
    if not pivots or found.upper is None:
        importance = diagonal / diagonal[found.living].mean() + damp
    else:
        importance = torch.empty_like(diagonal)
        importance[found.order] = found.upper.diagonal().square().reciprocal()
        importance /= importance.mean()
    weights: NDArray[np.float32] = importance.cpu().numpy()
    return weights


def _grid(
    weight: NDArray[np.float32], spec: Spec, options: Options, importance: NDArray[np.float32] | None
) -> Grid:
    return choose_grid(weight, spec, search=options.scales, convention=options.range, importance=importance)


def _fallback(grid: Grid, why: str) -> Rounded:
    facts = dict.fromkeys(("error", "error_rtn", "relative_error", "relative_error_rtn"))
    facts |= {"rounding": "rtn", "damp": None, "dead_columns": None, "moved": None, "refined": None}
    return Rounded(grid.nearest(), facts, (f"gptq: rounded to nearest, because {why}",))


def _columns(grid: Grid, upper: torch.Tensor, order: torch.Tensor, block: int) -> QTensor:
    """Rounded with error feedback; integers on the device of the factor, FP8 always by the CPU's kernel."""
    permutation = order.cpu().numpy()
    if upper.device.type == "cpu" or grid.spec.kind == "float":
        return grid.by_columns(upper.cpu().numpy(), permutation, block)
    arrays = np.take(grid.weight, permutation, axis=1), grid.scales, grid.zeros, grid.groups(permutation)
    weight, scales, zeros, groups = (_to_device(array, upper.device) for array in arrays)
    codes, _ = columns_torch(weight, upper, scales, zeros, groups, grid.low, grid.high, block)
    return grid.in_place(codes.cpu().numpy(), permutation)


def _refine(
    grid: Grid, rounded: QTensor, hessian: torch.Tensor, found: Factor, options: Options
) -> tuple[Grid, QTensor]:
    """Scales refitted by least squares and everything rounded anew, while that lowers the damped loss."""
    ridged = damped(hessian, found.living, None, found.damp, torch.float32)
    array, best = ridged.cpu().numpy(), _cost(grid.weight - rounded.dequantize(), ridged)
    assert found.upper is not None
    for _ in range(options.refits):
        scales = descent.refit(grid.weight, array, rounded.codes, grid.zeros, grid.scales)
        trial = replace(grid, scales=affine.storable(scales, grid.spec.scale_dtype))
        again = _columns(trial, found.upper, found.order, options.block_size)
        loss = _cost(grid.weight - again.dequantize(), ridged)
        if not loss < best:
            break
        best, grid, rounded = loss, trial, again
    if options.sweeps:
        left, limits = grid.weight - rounded.dequantize(), (grid.low, grid.high)
        codes = descent.descend(left, array, rounded.codes, grid.scales, *limits, sweeps=options.sweeps)
        rounded = grid.tensor(codes)
    return grid, rounded


def _refining_pays(
    target: NDArray[np.float32], spec: Spec, stats: LayerStats, options: Options, device: str, *, pivots: bool
) -> bool:
    """Whether refining on some tokens lowers the error on others; yes where none shall be held out."""
    if spec.kind == "float" or spec.group_size == 0:
        return False
    held_out = stats.held_out
    if not options.held_out or held_out is None or held_out.tokens == 0 or stats.tokens == 0:
        return True
    found = factor(stats, options.damp, act_order=options.act_order, device=device)
    hessian, judge = stats.hessian.to(device), held_out.hessian.to(device)
    if found.upper is None or not bool((hessian.diagonal() > 0).any()):
        return False
    grid = _grid(target, spec, options, _importance(hessian.diagonal(), found, options.damp, pivots=pivots))
    rounded = _columns(grid, found.upper, found.order, options.block_size)
    _, refined = _refine(grid, rounded, hessian, found, options)
    before, after = (_cost(target - q.dequantize(), judge) for q in (rounded, refined))
    return after < before


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


def _better(grid: Grid, rounded: QTensor, hessian: torch.Tensor, tokens: int, facts: dict[str, Any]) -> Rounded:
    """GPTQ's codes, or round to nearest where those err no more; with the errors of both."""
    nearest = grid.nearest()
    weight = grid.weight
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
