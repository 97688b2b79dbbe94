"""After rounding: codes moved one at a time, and all scales of a row refitted together.

Both lower tr((W - Q) H (W - Q)^T), with the codes (then the scales) of a matrix held. H is symmetric
and positive definite, so neither ever raises it but by the rounding of a scale to its stored dtype.
Integer coordinate descent as in CDQuant (arXiv 2406.17542); the refit is linear least squares.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def descend(
    left: Floats, hessian: Floats, codes: NDArray[np.int8], scales: Floats, low: int, high: int, sweeps: int = 1
) -> NDArray[np.int8]:
    """Codes int8 [out, in] after ``sweeps`` passes over the columns; each column goes to its best code.

    Twin: descend_numpy.

    Args:
        left: float32 [out, in], the weight to be approached less what the codes stand for.
        hessian: float32 [in, in], positive diagonal.
        codes: int8 [out, in] to start from; left as they are.
        scales: float32 [out, groups].
        low, high: Range of codes.
        sweeps: Passes over the columns.
    """
    found, gradient = codes.copy(), left @ hessian
    limits = np.float32(low), np.float32(high)
    _descend(np.ascontiguousarray(hessian), gradient, found, np.ascontiguousarray(scales), *limits, sweeps)
    return found


def descend_numpy(
    left: Floats, hessian: Floats, codes: NDArray[np.int8], scales: Floats, low: int, high: int, sweeps: int = 1
) -> NDArray[np.int8]:
    """The definition of descend, all rows at a time."""
    found, gradient, width = codes.copy(), left @ hessian, left.shape[1] // scales.shape[1]
    for _ in range(sweeps):
        for j in range(left.shape[1]):
            s, old = scales[:, j // width], found[:, j].astype(np.float32)
            new = np.clip(np.rint(old + gradient[:, j] / hessian[j, j] / s), low, high)
            gradient -= ((new - old) * s)[:, None] * hessian[j]
            found[:, j] = new.astype(np.int8)
    return found


def refit(
    weight: Floats, hessian: Floats, codes: NDArray[np.int8], zeros: NDArray[np.int8] | None, scales: Floats
) -> Floats:
    """Least squares scales float32 [out, groups] of every row, jointly over its groups, codes held.

    Rows whose normal equations are singular, or whose scales would not all be positive and finite, keep
    theirs. ``weight`` is float32 [out, in], zeros are like scales or None; other shapes as in ``descend``.
    """
    rows, groups = scales.shape
    width = codes.shape[1] // groups
    steps = codes.astype(np.float32)
    if zeros is not None:
        steps -= np.repeat(zeros.astype(np.float32), width, axis=1)
    normal = np.empty((rows, groups, groups))
    for g in range(groups):
        part = slice(g * width, (g + 1) * width)
        reach = (steps[:, part] @ hessian[part]) * steps
        normal[:, g] = reach.reshape(rows, groups, width).sum(axis=2, dtype=np.float64)
    wanted = ((weight @ hessian) * steps).reshape(rows, groups, width).sum(axis=2, dtype=np.float64)
    diagonal = np.einsum("rgg->rg", normal)
    usable = (diagonal > 0).all(axis=1)
    diagonal *= 1 + 1e-7
    fitted = scales.astype(np.float64)
    if usable.any():
        fitted[usable] = np.linalg.solve(normal[usable], wanted[usable][:, :, None])[:, :, 0]
    good = usable & np.isfinite(fitted).all(axis=1) & (fitted > 0).all(axis=1)
    return np.where(good[:, None], fitted, scales).astype(np.float32)


@njit(parallel=True, cache=True, error_model="numpy")
def _descend(hessian, gradient, codes, scales, low, high, sweeps):  # type: ignore[no-untyped-def]
    rows, columns = codes.shape
    width = columns // scales.shape[1]
    for r in prange(rows):
        pull, line = gradient[r], codes[r]
        for _ in range(sweeps):
            moved = False
            for j in range(columns):
                scale, old = scales[r, j // width], np.float32(line[j])
                code = np.rint(old + pull[j] / hessian[j, j] / scale)
                code = low if code < low else (high if code > high else code)
                if code != old:
                    moved = True
                    step, row = (code - old) * scale, hessian[j]
                    for k in range(columns):
                        pull[k] -= step * row[k]
                    line[j] = np.int8(code)
            if not moved:
                break
