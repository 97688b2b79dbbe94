"""AWQ (arXiv 2306.00978): widen the columns whose errors cost most, before anything is rounded.

A rounding error in column j costs d_j (what the inputs say) over s_j^2 (the fold divides it again), while
a larger s_j widens the steps of its whole group. AWQ tries powers of the inputs' magnitude and keeps the
one of least loss. Here the loss is taken from the Hessian, not from forward passes:

- rounded to nearest, errors are as good as independent, and d_j is the Hessian's diagonal;
- with error feedback (gptq), the loss is exactly sum_j d_j e_j^2 with the pivots d_j of the Hessian's LDL^T
  factorization in the order of rounding (arXiv 2507.18553), and a diagonal scaling by s divides the pivots
  by s_j^2 too.

Clipping, AWQ's second half, is what the scale search of every rounding pass does (``scales: mse``).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from compressor.calibration.factor import factor
from compressor.calibration.stats import LayerStats
from compressor.kernels import affine
from compressor.passes.base import Consumer, PassOptions, Rescaled

KIND = "rescale"
NEEDS: frozenset[str] = frozenset({"hessian"})
PAIRS = ("norm", "linear")

_ROWS = 192
_LARGEST = 100.0


class Options(PassOptions):
    """Options of awq."""

    strongest: float = Field(0.7, gt=0, le=2, description="the largest power of the inputs' magnitude tried")
    steps: int = Field(7, ge=1, le=40, description="how many powers are tried")
    damp: float = Field(0.01, ge=0, le=1, description="added to the Hessian's diagonal, times its mean")
    least_gain: float = Field(0.01, ge=0, lt=1, description="a pair is left alone unless its loss falls by more")


def run(
    consumers: list[Consumer],
    stats: LayerStats,
    source_of: NDArray[np.int64],
    options: Options,
    device: str = "cpu",
) -> Rescaled:
    """Scales float32 [channels] for the source of these linears, None where none helps.

    Args:
        consumers: Linears [out_i, in] that read the same input.
        stats: Of that input.
        source_of: int64 [in]: the source channel of every input channel; channels that share one share
            their scale (grouped-query attention).

    Facts: ``power`` and ``weight_power`` chosen, ``loss_ratio`` = estimated loss over that without scaling.
    """
    costs = _costs(consumers, stats, options.damp, device)
    if costs is None:
        return Rescaled(None, {"power": 0.0, "weight_power": 0.0, "loss_ratio": 1.0})
    sampled = [_sample(consumer, len(consumers)) for consumer in consumers]
    weights = np.concatenate([c.weight for c in sampled]).astype(np.float64)
    magnitudes = np.maximum(np.square(weights).mean(axis=0), 1e-20)
    plain = _loss(sampled, costs, np.ones(len(costs), np.float32))
    best = (plain, 0.0, 0.0, np.ones(len(costs), np.float32))
    for power in np.linspace(0, options.strongest, options.steps + 1)[1:]:
        for weight_power in (0.0, power / 2, power):
            scales = _candidate(costs, magnitudes, float(power), float(weight_power), source_of)
            loss = _loss(sampled, costs, scales)
            if loss < best[0]:
                best = (loss, float(power), float(weight_power), scales)
    loss, power, weight_power, scales = best
    ratio = loss / plain if plain > 0 else 1.0
    facts = {"power": round(power, 4), "weight_power": round(weight_power, 4), "loss_ratio": ratio}
    if ratio > 1 - options.least_gain:
        return Rescaled(None, facts)
    by_source = np.ones(int(source_of.max()) + 1, np.float32)
    by_source[source_of] = scales
    return Rescaled(by_source, facts)


def _costs(consumers: list[Consumer], stats: LayerStats, damp: float, device: str) -> NDArray[np.float64] | None:
    """float64 [in]: what a unit error in each column costs; None without usable statistics."""
    stats = stats.whole()
    diagonal = stats.hessian.diagonal()
    if stats.tokens == 0 or not bool(torch.isfinite(diagonal).all()) or not bool((diagonal > 0).any()):
        return None
    mean = diagonal[diagonal > 0].mean()
    plain = (diagonal + damp * mean).double().cpu().numpy()
    if not any(consumer.feedback for consumer in consumers):
        return plain
    found = factor(stats, damp, act_order=True, device=device)
    if found.upper is None:
        return plain
    pivots = torch.empty_like(diagonal, dtype=torch.float64)
    pivots[found.order] = found.upper.diagonal().double() ** -2
    return pivots.cpu().numpy()


def _sample(consumer: Consumer, count: int) -> Consumer:
    """At most _ROWS rows of all consumers together, evenly spread."""
    step = max(1, len(consumer.weight) * count // _ROWS)
    return Consumer(np.ascontiguousarray(consumer.weight[::step]), consumer.spec, consumer.feedback)


def _candidate(
    costs: NDArray[np.float64],
    magnitudes: NDArray[np.float64],
    power: float,
    weight_power: float,
    source_of: NDArray[np.int64],
) -> NDArray[np.float32]:
    """Scales float32 [in]: (cost / mean)^(power/2) / (w^2 / mean)^(weight_power/2), geometric mean 1."""
    logs = power / 2 * np.log(costs / costs.mean()) - weight_power / 2 * np.log(magnitudes / magnitudes.mean())
    counts = np.bincount(source_of)
    logs = (np.bincount(source_of, weights=logs) / np.maximum(counts, 1))[source_of]
    logs = np.clip(logs - logs.mean(), -np.log(_LARGEST), np.log(_LARGEST))
    scales: NDArray[np.float32] = np.exp(logs).astype(np.float32)
    return scales


def _loss(consumers: list[Consumer], costs: NDArray[np.float64], scales: NDArray[np.float32]) -> float:
    """Estimated loss of rounding these linears with columns scaled."""
    importance = costs / scales.astype(np.float64) ** 2
    importance = (importance / importance.mean()).astype(np.float32)
    total = 0.0
    for consumer in consumers:
        spec, scaled = consumer.spec, consumer.weight * scales
        grid, zeros = affine.choose_scales(
            scaled,
            spec.bits,
            spec.group_size,
            symmetric=spec.symmetric,
            scale_dtype=spec.scale_dtype,
            search="mse",
            importance=importance,
        )
        low, high = affine.code_range(spec.bits)
        floats = np.zeros_like(grid) if zeros is None else zeros.astype(np.float32)
        errors, _, _ = affine.moments(scaled, importance, grid, floats, low, high)
        mean = float((costs / scales.astype(np.float64) ** 2).mean())
        total += float(errors.sum()) * mean
    return total
