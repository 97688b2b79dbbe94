"""The GPTQ column loop (Frantar et al., arXiv 2210.17323): round a column, let the rest make up for it.

With H the Hessian of the inputs and U upper triangular, H^-1 = U^T U, column i of a row w is rounded
to q_i, its error e_i = (w_i - q_i) / U_ii is spread as w_j -= e_i U_ij over the columns j > i, and the
sum of e_i^2 is what the row lost: (w - q) H (w - q)^T.

Columns come in the order they shall be rounded. Codes are clamp(rint(w / scale) + zero), ties to even.
Weight, upper and scales share one dtype, float32 or float64, and all arithmetic is done in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

Floats = NDArray[Any]
Result = tuple[NDArray[np.int8], NDArray[np.float64]]


def quantize_columns(
    weight: Floats,
    upper: Floats,
    scales: Floats,
    zeros: NDArray[np.int8] | None,
    group_of_column: NDArray[np.int32],
    qmin: int,
    qmax: int,
    block: int = 128,
) -> Result:
    """Codes int8 [out, in] and the loss float64 [out] of every row. The weight is left as it is.

    Errors are spread inside a block of columns at once, and into the next block by one matrix product
    with all columns before it; rows are independent. Twins: quantize_columns_numpy (equal bit for bit),
    definition (equal in float64 but for the order of its sums).

    Args:
        weight: [out, in], columns in the order of rounding.
        upper: [in, in], U above.
        scales: [out or 1, groups].
        zeros: int8 like scales, or None for zero 0.
        group_of_column: int32 [in], the group of each column, in the order of rounding.
        qmin, qmax: Range of codes.
        block: Columns per block.
    """
    return _by_blocks(_block, weight, upper, scales, zeros, group_of_column, (qmin, qmax), block)


def quantize_columns_numpy(
    weight: Floats,
    upper: Floats,
    scales: Floats,
    zeros: NDArray[np.int8] | None,
    group_of_column: NDArray[np.int32],
    qmin: int,
    qmax: int,
    block: int = 128,
) -> Result:
    """The same blocks, each by _block_numpy."""
    return _by_blocks(_block_numpy, weight, upper, scales, zeros, group_of_column, (qmin, qmax), block)


def definition(
    weight: Floats,
    hessian: Floats,
    scales: Floats,
    zeros: NDArray[np.int8] | None,
    group_of_column: NDArray[np.int32],
    qmin: int,
    qmax: int,
) -> NDArray[np.int8]:
    """The paper's algorithm 1 without blocks, in float64, from the damped Hessian [in, in] itself."""
    upper = np.linalg.cholesky(np.linalg.inv(hessian.astype(np.float64))).T
    work = weight.astype(np.float64)
    codes = np.empty(weight.shape, dtype=np.int8)
    for i, group in enumerate(group_of_column):
        scale = scales[:, group].astype(np.float64)
        zero = 0 if zeros is None else zeros[:, group].astype(np.float64)
        code = np.clip(np.rint(work[:, i] / scale) + zero, qmin, qmax)
        codes[:, i] = code
        error = (work[:, i] - (code - zero) * scale) / upper[i, i]
        work[:, i:] -= np.outer(error, upper[i, i:])
    return codes


def _by_blocks(
    round_block: Any,
    weight: Floats,
    upper: Floats,
    scales: Floats,
    zeros: NDArray[np.int8] | None,
    group_of_column: NDArray[np.int32],
    limits: tuple[int, int],
    block: int,
) -> Result:
    """Both fast paths: what is left of each block of columns after all before it, then round it."""
    rows, columns = weight.shape
    dtype = weight.dtype
    scale = scales.astype(dtype)
    zero = np.zeros_like(scale) if zeros is None else zeros.astype(dtype)
    if scale.shape[0] != rows:
        scale, zero = (np.repeat(grid, rows, axis=0) for grid in (scale, zero))
    low, high = dtype.type(limits[0]), dtype.type(limits[1])
    codes, loss = np.empty((rows, columns), dtype=np.int8), np.zeros(rows, dtype=np.float64)
    errors = np.empty((rows, columns), dtype=dtype)
    for start in range(0, columns, block):
        part = slice(start, min(start + block, columns))
        work = np.ascontiguousarray(weight[:, part] - errors[:, :start] @ upper[:start, part])
        corner = np.ascontiguousarray(upper[part, part])
        groups = np.ascontiguousarray(group_of_column[part])
        round_block(work, corner, scale, zero, groups, low, high, start, codes, errors, loss)
    return codes, loss


def _block_numpy(work, upper, scales, zeros, groups, low, high, start, codes, errors, loss):  # type: ignore[no-untyped-def]
    """The definition of _block, all rows at a time."""
    for i, group in enumerate(groups):
        scale, zero = scales[:, group], zeros[:, group]
        code = np.clip(np.rint(work[:, i] / scale) + zero, low, high)
        error = (work[:, i] - (code - zero) * scale) / upper[i, i]
        work[:, i + 1 :] -= error[:, None] * upper[i, i + 1 :]
        codes[:, start + i], errors[:, start + i] = code.astype(np.int8), error
        loss += error.astype(np.float64) * error.astype(np.float64)


@njit(parallel=True, cache=True, error_model="numpy")
def _block(work, upper, scales, zeros, groups, low, high, start, codes, errors, loss):  # type: ignore[no-untyped-def]
    """Round work [out, n], which is used up, into columns start.. of codes and errors; add to loss."""
    rows, count = work.shape
    for r in prange(rows):
        left = work[r]
        for i in range(count):
            scale, zero = scales[r, groups[i]], zeros[r, groups[i]]
            code = np.rint(left[i] / scale) + zero
            code = low if code < low else (high if code > high else code)
            error = (left[i] - (code - zero) * scale) / upper[i, i]
            rest, factors = left[i + 1 :], upper[i, i + 1 :]
            for j in range(rest.size):
                rest[j] -= error * factors[j]
            codes[r, start + i] = np.int8(code)
            errors[r, start + i] = error
            loss[r] += np.float64(error) * np.float64(error)
