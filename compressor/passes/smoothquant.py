"""SmoothQuant (arXiv 2211.10438): move outliers from the inputs into the weights, where inputs are rounded too.

s_j = max|x_j|^a / max|w_j|^(1-a): the paper's equation 4. For formats with ``activations``; weight-only
formats want ``awq``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compressor.calibration.stats import LayerStats
from compressor.passes.base import Consumer, PassOptions, Rescaled

KIND = "rescale"
NEEDS: frozenset[str] = frozenset({"hessian"})
PAIRS = ("norm", "linear")
FLOATS = True

_SMALLEST = 1e-5


class Options(PassOptions):
    """Options of smoothquant."""

    alpha: float = Field(0.5, ge=0, le=1, description="how much of the difficulty moves into the weights")


def run(
    consumers: list[Consumer],
    stats: LayerStats,
    source_of: NDArray[np.int64],
    options: Options,
    device: str = "cpu",
) -> Rescaled:
    """Scales float32 [channels] for the source; arguments as awq.run. Facts: ``alpha`` and the extremes."""
    whole = stats.whole()
    if whole.tokens == 0 or whole.absmax is None:
        return Rescaled(None, {"alpha": options.alpha})
    inputs = whole.absmax.double().cpu().numpy()
    weights = np.max([np.abs(consumer.weight).max(axis=0) for consumer in consumers], axis=0).astype(np.float64)
    channels = int(source_of.max()) + 1
    largest_in, largest_w = np.zeros(channels), np.zeros(channels)
    np.maximum.at(largest_in, source_of, inputs)
    np.maximum.at(largest_w, source_of, weights)
    usable = (largest_in > _SMALLEST) & (largest_w > _SMALLEST) & np.isfinite(largest_in)
    scales = np.ones(channels)
    scales[usable] = largest_in[usable] ** options.alpha / largest_w[usable] ** (1 - options.alpha)
    scales = np.clip(scales, _SMALLEST, 1 / _SMALLEST)
    facts = {"alpha": options.alpha, "largest": float(scales.max()), "smallest": float(scales.min())}
    return Rescaled(scales.astype(np.float32), facts)
