"""The damped Hessian and its triangular factor, computed once for all linears that share an input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from compressor.calibration.stats import LayerStats

LARGEST_DAMP = 1.0
_FIRST_RAISE = 1e-3


class Factor(NamedTuple):
    """What error feedback needs of a Hessian.

    Attributes:
        upper: U float32 [in, in], upper triangular, U^T U = (H + damp * mean(diagonal) * I)^-1 with rows and
            columns in ``order``; None when no damp up to LARGEST_DAMP gave one.
        order: int64 [in]: the columns in the order of rounding.
        living: bool [in]: columns whose inputs were not always zero.
        damp: The damp used.
    """

    upper: torch.Tensor | None
    order: torch.Tensor
    living: torch.Tensor
    damp: float


def factor(stats: LayerStats, damp: float, *, act_order: bool, device: str) -> Factor:
    """The factor of ``stats.hessian``; each damp of the ladder is tried in float32, then in float64."""
    key = ("factor", damp, act_order, device)
    if key not in stats.memo:
        hessian = stats.hessian.to(device)
        living = hessian.diagonal() > 0
        order = _order(hessian.diagonal(), act_order)
        stats.memo[key] = Factor(*_first(hessian, living, order, damp))
    found: Factor = stats.memo[key]
    return found


def finite(matrix: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite, without a mask as large as the matrix."""
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(matrix))


def damped(
    hessian: torch.Tensor, living: torch.Tensor, order: torch.Tensor | None, damp: float, dtype: torch.dtype
) -> torch.Tensor:
    """The Hessian in this order (None: its own), damped by damp * the mean living diagonal.

    Dead columns get that mean as their diagonal (any positive number would do).
    """
    diagonal = hessian.diagonal().to(dtype)
    mean = diagonal[living].mean()
    filled = torch.where(living, diagonal, mean) + damp * mean
    if order is None:
        matrix = hessian.to(dtype, copy=True)
    else:
        matrix, filled = hessian[order[:, None], order].to(dtype), filled[order]
    matrix.diagonal().copy_(filled)
    return matrix


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


def _first(
    hessian: torch.Tensor, living: torch.Tensor, order: torch.Tensor, damp: float
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, float]:
    """The first rung of the ladder that has a factor."""
    for tried in _ladder(damp):
        for dtype in (torch.float32, torch.float64):
            upper = _inverse_factor(hessian, living, order, tried, dtype)
            if upper is not None:
                return upper.float(), order, living, tried
    return None, order, living, tried


def _inverse_factor(
    hessian: torch.Tensor, living: torch.Tensor, order: torch.Tensor, damp: float, dtype: torch.dtype
) -> torch.Tensor | None:
    """One try: one factorization and one triangular solve; the inverse is never formed.

    With the order reversed, H = L L^T and H^-1 = (L^-1)^T L^-1; reversing L^-1 back gives U. Names are
    given up early, for each of these matrices may be gigabytes.
    """
    lower, info = torch.linalg.cholesky_ex(damped(hessian, living, order.flip(0), damp, dtype))
    if int(info) != 0:
        return None
    inverse = torch.eye(len(order), dtype=dtype, device=hessian.device)
    inverse = torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse)
    del lower
    return inverse.flip(0, 1) if finite(inverse) else None
