"""A weight on the values its format has: scales chosen, ready to be rounded one way or the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compressor.core.spec import Spec
from compressor.core.tensors import QTensor
from compressor.kernels import affine, fp8, fp8_columns, gptq

Codes = NDArray[np.int8] | NDArray[np.uint8]


@dataclass(frozen=True)
class Grid:
    """A weight and the scales (and zeros) it will be rounded on.

    Attributes:
        weight: float32 [out, in].
        scales: float32, as in QTensor.
        zeros: int8 like scales, or None.
        spec: The format.
        low, high: Range of integer codes.
    """

    weight: NDArray[np.float32]
    scales: NDArray[np.float32]
    zeros: NDArray[np.int8] | None
    spec: Spec
    low: int
    high: int

    def tensor(self, codes: Codes) -> QTensor:
        """Codes [out, in] on this grid."""
        return QTensor(codes, self.scales, self.zeros, self.spec)

    def nearest(self) -> QTensor:
        """Every weight to its nearest code."""
        if self.spec.kind == "float":
            tile = self.spec.tile(*self.weight.shape)
            return self.tensor(fp8.round_codes(self.weight, self.scales, tile))
        return self.tensor(affine.round_codes(self.weight, self.scales, self.zeros, self.low, self.high))

    def by_columns(self, upper: NDArray[np.float32], order: NDArray[np.int64], block: int) -> QTensor:
        """Column by column with error feedback (kernels.gptq).

        Args:
            upper: float32 [in, in], U above the diagonal, columns in ``order``, H^-1 = U^T U.
            order: int64 [in], the columns in the order of rounding.
            block: Columns between two matrix products.
        """
        weight, groups = np.take(self.weight, order, axis=1), self.groups(order)
        ordered: Codes
        if self.spec.kind == "float":
            ordered, _ = fp8_columns.quantize_columns(weight, upper, self._row_scales(), groups, block)
        else:
            limits = self.low, self.high
            ordered, _ = gptq.quantize_columns(weight, upper, self.scales, self.zeros, groups, *limits, block)
        return self.in_place(ordered, order)

    def groups(self, order: NDArray[np.int64]) -> NDArray[np.int32]:
        """int32 [in]: the scale of each column, columns in ``order``."""
        return (order // self.spec.tile(*self.weight.shape).columns).astype(np.int32)

    def in_place(self, ordered: Codes, order: NDArray[np.int64]) -> QTensor:
        """Codes whose columns are in ``order``, put back."""
        codes = np.empty_like(ordered)
        codes[:, order] = ordered
        return self.tensor(codes)

    def _row_scales(self) -> NDArray[np.float32]:
        """Scales with one row for all rows, or one for each."""
        rows = self.weight.shape[0]
        tall = self.spec.tile(*self.weight.shape).rows
        return self.scales if tall in (1, rows) else np.repeat(self.scales, tall, axis=0)[:rows]

    def weight_error(self) -> float:
        """Sum of squared differences when every weight goes to its nearest code."""
        even = np.ones(self.weight.shape[1], dtype=np.float32)
        if self.spec.kind == "float":
            return float(fp8.moments(self.weight, even, self.scales, self.spec.tile(*self.weight.shape))[0].sum())
        zeros = np.zeros_like(self.scales) if self.zeros is None else self.zeros.astype(np.float32)
        return float(affine.moments(self.weight, even, self.scales, zeros, self.low, self.high)[0].sum())


def choose_grid(
    weight: NDArray[np.float32],
    spec: Spec,
    *,
    search: affine.Search = "mse",
    convention: affine.Convention = "full",
    importance: NDArray[np.float32] | None = None,
) -> Grid:
    """Scales for weight float32 [out, in] in this format (kernels.affine, kernels.fp8: choose_scales).

    Args:
        search: ``absmax`` or ``mse``.
        convention: Range of symmetric integer codes.
        importance: float32 [in], what a squared error in a column counts; None counts all alike.
    """
    if spec.kind == "float":
        tile = spec.tile(*weight.shape)
        scales = fp8.choose_scales(weight, tile, scale_dtype=spec.scale_dtype, search=search, importance=importance)
        return Grid(weight, scales, None, spec, 0, 0)
    low, high = affine.code_range(spec.bits, convention if spec.symmetric else "full")
    scales, zeros = affine.choose_scales(
        weight,
        spec.bits,
        spec.group_size,
        symmetric=spec.symmetric,
        scale_dtype=spec.scale_dtype,
        convention=convention,
        search=search,
        importance=importance,
    )
    return Grid(weight, scales, zeros, spec, low, high)
