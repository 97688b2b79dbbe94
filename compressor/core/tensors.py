"""Tensors as they travel: QTensor (codes and scales) and RawTensor (bytes for a file)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.core.spec import Spec
from compressor.kernels.floats import round_to_dtype


@dataclass(frozen=True)
class RawTensor:
    """Bytes ready for a safetensors file.

    Attributes:
        dtype: safetensors name (``BF16``, ``I32``, ``I64``, ``U8`` ...).
        shape: Row-major shape.
        data: uint8 [nbytes], little endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Length of the data in bytes."""
        return int(self.data.nbytes)


@dataclass(frozen=True)
class QTensor:
    """A rounded matrix: w = (codes - zeros) * scales, or value(codes) * scales. Checked once, here.

    Attributes:
        codes: int8 [out, in], signed, spec.qmin..spec.qmax; for float formats uint8, FP8 E4M3 bit patterns
            without NaN.
        scales: float32 of spec.scales_shape: [out, groups], [out, 1] for channel, [1, 1] for tensor, [row
            blocks, column blocks] for block; finite, and every value exactly representable in spec.scale_dtype.
        zeros: int8 like scales (same range as codes), or None when spec.symmetric.
        spec: The format.

    Raises:
        ValueError: any of the above does not hold.
    """

    codes: NDArray[Any]
    scales: NDArray[np.float32]
    zeros: NDArray[np.int8] | None
    spec: Spec

    def __post_init__(self) -> None:
        wanted = np.uint8 if self.spec.kind == "float" else np.int8
        if self.codes.dtype != wanted or self.codes.ndim != 2:
            name = np.dtype(wanted).name
            raise ValueError(f"codes must be {name} [out, in], got {self.codes.dtype} {self.codes.shape}")
        shape = self.spec.scales_shape(*self.codes.shape)
        if self.scales.dtype != np.float32 or self.scales.shape != shape:
            raise ValueError(f"scales must be float32 {shape}, got {self.scales.dtype} {self.scales.shape}")
        if not np.isfinite(self.scales).all():
            raise ValueError("scales must be finite")
        if not np.array_equal(round_to_dtype(self.scales, self.spec.scale_dtype), self.scales):
            raise ValueError(f"scales must be rounded to {self.spec.scale_dtype} before rounding weights")
        self._check_codes()
        if self.spec.symmetric != (self.zeros is None):
            raise ValueError("zeros must be None exactly when the format is symmetric")
        if self.zeros is not None:
            if self.zeros.dtype != np.int8 or self.zeros.shape != shape:
                raise ValueError(f"zeros must be int8 {shape}, got {self.zeros.dtype} {self.zeros.shape}")
            self._check_range("zeros", self.zeros)

    def _check_codes(self) -> None:
        if self.spec.kind == "int":
            self._check_range("codes", self.codes)
        elif ((self.codes & 0x7F) == 0x7F).any():
            raise ValueError("codes must not be NaN (0x7F, 0xFF)")

    def _check_range(self, name: str, values: NDArray[np.int8]) -> None:
        low, high = self.spec.qmin, self.spec.qmax
        if values.size and (int(values.min()) < low or int(values.max()) > high):
            raise ValueError(f"{name} must lie in {low}..{high}, got {values.min()}..{values.max()}")

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return (self.codes.shape[0], self.codes.shape[1])

    def dequantize(self) -> NDArray[np.float32]:
        """Float32 [out, in]: (codes - zeros) * scales, one float32 multiplication per element."""
        rows, columns = self.codes.shape
        if self.spec.kind == "float":
            from compressor.kernels import fp8

            return fp8.dequantize(self.codes, self.scales, self.spec.tile(rows, columns))
        width = self.spec.columns_per_scale(columns)
        grouped = self.codes.reshape(rows, columns // width, width).astype(np.float32)
        if self.zeros is not None:
            grouped -= self.zeros[..., None].astype(np.float32)
        grouped *= self.scales[..., None]
        return grouped.reshape(rows, columns)
