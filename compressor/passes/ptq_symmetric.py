"""Round to nearest with symmetric scales: every weight to the nearest code.

No calibration is needed; where statistics are at hand (``weighted``, or another pass of the list wants
them), the scale search counts each column by its inputs' second moment.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compressor.calibration.stats import LayerStats
from compressor.core.grid import choose_grid
from compressor.core.spec import Spec
from compressor.errors import CompressorError
from compressor.passes.base import PassOptions, Rounded

NEEDS: frozenset[str] = frozenset({"hessian"})
KIND = "round"
SYMMETRIC_ONLY = True
FLOATS = True

_DAMP = 0.01


class Options(PassOptions):
    """Options of ptq_symmetric."""

    scales: Literal["absmax", "mse"] = Field(
        "mse", description="absmax covers every weight; mse clips where that lowers the squared error"
    )
    range: Literal["full", "textbook"] = Field(
        "full", description="full uses codes -2^(b-1)..2^(b-1)-1; textbook leaves out the lowest one (integers)"
    )
    weighted: bool = Field(False, description="collect statistics, to weight columns in the scale search")


def needs(options: Options) -> frozenset[str]:
    """The statistics wanted with these options."""
    return NEEDS if options.weighted else frozenset()


def run(
    weight: NDArray[np.float32],
    spec: Spec,
    stats: LayerStats | None,
    options: Options,
    device: str = "cpu",
) -> Rounded:
    """Round weight float32 [out, in]; stats are welcome, device is not used.

    Facts: ``weight_error`` = sum of squared differences, ``relative_weight_error`` = that over the
    sum of squared weights.

    Raises:
        CompressorError: the format is asymmetric.
    """
    if not spec.symmetric:
        raise CompressorError(
            "ptq_symmetric: the format has zero points",
            got=spec.label(),
            expected="a symmetric format",
            hint="use the pass gptq, or set symmetric: true",
        )
    importance = _importance(stats, weight.shape[1])
    grid = choose_grid(weight, spec, search=options.scales, convention=options.range, importance=importance)
    total = float(np.einsum("ij,ij->", weight, weight, dtype=np.float64))
    error = grid.weight_error()
    facts = {"weight_error": error, "relative_weight_error": error / total if total else 0.0}
    return Rounded(grid.nearest(), facts)


def _importance(stats: LayerStats | None, columns: int) -> NDArray[np.float32] | None:
    """float32 [in]: the Hessian's diagonal, slightly damped, with mean about one; None without statistics."""
    if stats is None:
        return None
    whole = stats.whole()
    diagonal = whole.hessian.diagonal().cpu().numpy()
    if whole.tokens == 0 or len(diagonal) != columns or not np.isfinite(diagonal).all() or not diagonal.any():
        return None
    importance: NDArray[np.float32] = (diagonal / diagonal.mean() + _DAMP).astype(np.float32)
    return importance
