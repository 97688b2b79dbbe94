"""Round to nearest with symmetric scales: no calibration, every weight to the nearest code."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compressor.calibration.stats import LayerStats
from compressor.core.spec import Spec
from compressor.core.tensors import QTensor
from compressor.errors import CompressorError
from compressor.kernels import affine
from compressor.passes.base import PassOptions, Rounded

NEEDS: frozenset[str] = frozenset()
KIND = "round"
SYMMETRIC_ONLY = True


class Options(PassOptions):
    """Options of ptq_symmetric."""

    scales: Literal["absmax", "mse"] = Field(
        "mse", description="absmax covers every weight; mse clips where that lowers the squared error"
    )
    range: Literal["full", "textbook"] = Field(
        "full", description="full uses codes -2^(b-1)..2^(b-1)-1; textbook leaves out the lowest one"
    )


def run(
    weight: NDArray[np.float32],
    spec: Spec,
    stats: LayerStats | None,
    options: Options,
    device: str = "cpu",
) -> Rounded:
    """Round weight float32 [out, in]; stats and device are not used.

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
    low, high = affine.code_range(spec.bits, options.range)
    scales, _ = affine.choose_scales(
        weight,
        spec.bits,
        spec.group_size,
        scale_dtype=spec.scale_dtype,
        convention=options.range,
        search=options.scales,
    )
    codes = affine.round_codes(weight, scales, None, low, high)
    return Rounded(QTensor(codes, scales, None, spec), _facts(weight, scales, low, high))


def _facts(weight: NDArray[np.float32], scales: NDArray[np.float32], low: int, high: int) -> dict[str, float]:
    even = np.ones(weight.shape[1], dtype=np.float32)
    error, _, _ = affine.moments(weight, even, scales, np.zeros_like(scales), low, high)
    total = float(np.einsum("ij,ij->", weight, weight, dtype=np.float64))
    cost = float(error.sum())
    return {"weight_error": cost, "relative_weight_error": cost / total if total else 0.0}
