"""The GPTQ column loop (kernels.gptq) for FP8 E4M3: the same spread of errors, values instead of steps.

Columns come in the order they shall be rounded. A weight becomes e4m3(w / scale), nearest, ties to even,
saturating at 448. All arithmetic is float32. No code is -0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from compressor.kernels.fp8 import _nearest, decode, encode, encode_numpy

Floats = NDArray[np.float32]
Result = tuple[NDArray[np.uint8], NDArray[np.float64]]


def quantize_columns(
    weight: Floats, upper: Floats, scales: Floats, group_of_column: NDArray[np.int32], block: int = 128
) -> Result:
    """Codes uint8 [out, in] and the loss float64 [out] of every row. The weight is left as it is.

    As kernels.gptq.quantize_columns. Twin: quantize_columns_numpy, equal bit for bit.

    Args:
        weight: float32 [out, in], columns in the order of rounding.
        upper: float32 [in, in], U above the diagonal, H^-1 = U^T U.
        scales: float32 [out or 1, groups].
        group_of_column: int32 [in], the scale of each column, in the order of rounding.
        block: Columns per block.
    """
    return _by_blocks(_block, weight, upper, scales, group_of_column, block)


def quantize_columns_numpy(
    weight: Floats, upper: Floats, scales: Floats, group_of_column: NDArray[np.int32], block: int = 128
) -> Result:
    """The same blocks, each by _block_numpy."""
    return _by_blocks(_block_numpy, weight, upper, scales, group_of_column, block)


def _by_blocks(
    round_block: Any, weight: Floats, upper: Floats, scales: Floats, groups: NDArray[np.int32], block: int
) -> Result:
    """What is left of each block of columns after all before it, then round it."""
    rows, columns = weight.shape
    own = scales if scales.shape[0] == rows else np.repeat(scales, rows, axis=0)
    values, loss = np.empty((rows, columns), dtype=np.float32), np.zeros(rows, dtype=np.float64)
    errors = np.empty((rows, columns), dtype=np.float32)
    for start in range(0, columns, block):
        part = slice(start, min(start + block, columns))
        work = np.ascontiguousarray(weight[:, part] - errors[:, :start] @ upper[:start, part])
        corner, group = np.ascontiguousarray(upper[part, part]), np.ascontiguousarray(groups[part])
        round_block(work, corner, np.ascontiguousarray(own), group, start, values, errors, loss)
    return encode(values), loss


def _block_numpy(work, upper, scales, groups, start, values, errors, loss):  # type: ignore[no-untyped-def]
    """The definition of _block, all rows at a time."""
    for i, group in enumerate(groups):
        scale = scales[:, group]
        with np.errstate(over="ignore"):
            value = decode(encode_numpy(work[:, i] / scale)) + np.float32(0)  # -0 becomes 0
        error = (work[:, i] - value * scale) / upper[i, i]
        work[:, i + 1 :] -= error[:, None] * upper[i, i + 1 :]
        values[:, start + i], errors[:, start + i] = value, error
        loss += error.astype(np.float64) * error.astype(np.float64)


@njit(parallel=True, cache=True, error_model="numpy")
def _block(work, upper, scales, groups, start, values, errors, loss):  # type: ignore[no-untyped-def]
    """Round work [out, n], which is used up, into columns start.. of values and errors; add to loss."""
    rows, count = work.shape
    for r in prange(rows):
        left = work[r]
        for i in range(count):
            scale = scales[r, groups[i]]
            value = _nearest(left[i] / scale) + np.float32(0)
            error = (left[i] - value * scale) / upper[i, i]
            rest, factors = left[i + 1 :], upper[i, i + 1 :]
            for j in range(rest.size):
                rest[j] -= error * factors[j]
            values[r, start + i] = value
            errors[r, start + i] = error
            loss[r] += np.float64(error) * np.float64(error)
