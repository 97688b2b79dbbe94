"""Choosing scales and rounding weights for affine integer formats: w = (code - zero) * scale.

Rounding is to nearest, ties to even (``rint``), everywhere: code = clamp(rint(w / scale) + zero), in
float32. Scales are positive and already rounded to the dtype they are stored in before any error is
judged or any weight is rounded. ``group_size`` counts the columns that share a scale; -1 is one scale
per row, 0 one for the whole matrix.

Conventions for symmetric formats of b bits:

- ``textbook``: codes -qmax..qmax with qmax = 2^(b-1) - 1; absmax scale max|w| / qmax.
- ``full``: codes -2^(b-1)..2^(b-1)-1; absmax scale max|w| / ((2^b - 1) / 2), as compressed-tensors does.

Asymmetric formats use the full range; their absmax scale spans min(w, 0)..max(w, 0).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from compressor.kernels.floats import round_to_dtype

Convention = Literal["full", "textbook"]
Search = Literal["absmax", "mse"]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

CANDIDATES = 64
REFITS = 3
SMALLEST_SHRINK = {2: 0.15, 3: 0.2, 4: 0.25, 5: 0.35, 6: 0.45, 7: 0.5, 8: 0.5}
"""The narrowest clipping tried, as a part of the absmax scale: fewer bits, heavier clipping."""

SMALLEST_NORMAL = {"F16": 2.0**-14, "BF16": 2.0**-126, "F32": 2.0**-126}
LARGEST = {"F16": 65504.0, "BF16": 2.0**127 * (2 - 2.0**-7), "F32": 2.0**127 * (2 - 2.0**-23)}
_CHUNK = 1 << 21


class _Format(NamedTuple):
    """One scale serves ``width`` columns of a row, or of all rows when ``pooled``; codes low..high."""

    bits: int
    width: int
    pooled: bool
    symmetric: bool
    scale_dtype: str
    low: int
    high: int


class _Grid(NamedTuple):
    """Scales and zeros, float32 [rows or 1, groups]; zeros are whole numbers."""

    scales: Floats
    zeros: Floats


def code_range(bits: int, convention: Convention = "full") -> tuple[int, int]:
    """(smallest, largest) code of a format."""
    top = (1 << (bits - 1)) - 1
    return (-top if convention == "textbook" else -top - 1, top)


def choose_scales(
    weight: Floats,
    bits: int,
    group_size: int,
    *,
    symmetric: bool = True,
    scale_dtype: str = "BF16",
    convention: Convention = "full",
    search: Search = "absmax",
    importance: Floats | None = None,
) -> tuple[Floats, NDArray[np.int8] | None]:
    """Scales float32 [out, groups] and zeros int8 alike (None when symmetric) for weight float32 [out, in].

    ``mse`` tries 64 scales per group (asymmetric: 22 scales, each with its zero moved by up to one),
    takes the one of least error sum(importance * (w - w_q)^2) and refits it by least squares; it is
    never worse than ``absmax``, which is among the 64. Shapes are [out, 1] for group_size -1 and [1, 1]
    for 0. All-zero groups get scale 1 and zero 0; a scale that would underflow becomes the smallest
    normal number of scale_dtype, one that would overflow the largest.

    Args:
        weight: Finite values; group_size divides in.
        convention: Ignored when not symmetric.
        importance: float32 [in], not negative; None counts every column the same.
    """
    rows, columns = weight.shape
    low, high = code_range(bits, convention if symmetric else "full")
    width = group_size if group_size > 0 else columns
    form = _Format(bits, width, group_size == 0, symmetric, scale_dtype, low, high)
    weights = np.ones(columns, np.float32) if importance is None else importance
    step = rows if form.pooled else max(1, _CHUNK * width // (CANDIDATES * columns))
    parts = [_choose(weight[r : r + step], weights, form, search) for r in range(0, rows, step)]
    scales = np.concatenate([part.scales for part in parts])
    return scales, None if symmetric else np.concatenate([part.zeros for part in parts]).astype(np.int8)


def _choose(weight: Floats, importance: Floats, form: _Format, search: Search) -> _Grid:
    low, high = _bounds(weight, form)
    first = _spanning(low, high, form, 1.0, 0)
    empty = low == high
    first = _Grid(np.where(empty, np.float32(1), first.scales), np.where(empty, np.float32(0), first.zeros))
    if search == "absmax":
        return first
    tried = [first] + [_spanning(low, high, form, shrink, shift) for shrink, shift in _shrinks(form)]
    return _refit(weight, importance, _least_error(weight, importance, tried, form), form)


def _bounds(weight: Floats, form: _Format) -> tuple[Doubles, Doubles]:
    """Smallest and largest value of every group, zero included: float64 [rows or 1, groups]."""
    grouped = weight.reshape(weight.shape[0], -1, form.width)
    low, high = grouped.min(axis=2).astype(np.float64), grouped.max(axis=2).astype(np.float64)
    if form.pooled:
        low, high = low.min(axis=0, keepdims=True), high.max(axis=0, keepdims=True)
    return np.minimum(low, 0), np.maximum(high, 0)


def _spanning(low: Doubles, high: Doubles, form: _Format, shrink: float, shift: int) -> _Grid:
    """The grid that covers low..high shrunk by a factor, its zero moved by shift codes."""
    if form.symmetric:
        scales = _storable(shrink * np.maximum(-low, high) / _steps_to_absmax(form), form)
        return _Grid(scales, np.zeros_like(scales))
    scales = _storable(shrink * (high - low) / (form.high - form.low), form)
    zeros = np.rint(form.low - shrink * low / scales) + shift
    return _Grid(scales, np.clip(zeros, form.low, form.high).astype(np.float32))


def _steps_to_absmax(form: _Format) -> float:
    """How many scales max|w| is (symmetric): qmax, or half the number of steps when full."""
    return (form.high - form.low) / 2


def _storable(scales: Doubles, form: _Format) -> Floats:
    return storable(scales, form.scale_dtype)


def storable(scales: Doubles | Floats, scale_dtype: str) -> Floats:
    """The nearest scales that scale_dtype holds, float32; never zero, never infinite."""
    stored = round_to_dtype(np.minimum(scales, LARGEST[scale_dtype]).astype(np.float32), scale_dtype)
    return np.where(stored > 0, stored, np.float32(SMALLEST_NORMAL[scale_dtype]))


def _shrinks(form: _Format) -> list[tuple[float, int]]:
    """(shrink, shift) of the candidates after the first, widest range first."""
    narrow = SMALLEST_SHRINK[form.bits]
    if form.symmetric:
        wide = _steps_to_absmax(form) / form.high
        return [(float(s), 0) for s in np.geomspace(wide, narrow, CANDIDATES - 1)]
    shrinks = np.geomspace(1.0, narrow, CANDIDATES // 3)
    return [(float(s), shift) for s in shrinks for shift in (0, -1, 1)]


def _least_error(weight: Floats, importance: Floats, tried: list[_Grid], form: _Format) -> _Grid:
    scales = np.stack([grid.scales for grid in tried], axis=2)
    zeros = np.stack([grid.zeros for grid in tried], axis=2)
    errors = grid_errors(weight, importance, scales, zeros, form.low, form.high)
    if form.pooled:
        errors = errors.sum(axis=0, keepdims=True)
    best = errors.argmin(axis=2)[:, :, None]
    return _Grid(
        np.take_along_axis(scales, best, axis=2)[:, :, 0],
        np.take_along_axis(zeros, best, axis=2)[:, :, 0],
    )


def _refit(weight: Floats, importance: Floats, grid: _Grid, form: _Format) -> _Grid:
    """Least squares for the scales with the codes held, kept where rounding anew errs less; repeated."""
    best = _pooled_moments(weight, importance, grid, form)
    for _ in range(REFITS):
        usable = (best[1] > 0) & (best[2] > 0)
        ratio = np.divide(best[1], best[2], out=np.ones_like(best[1]), where=usable)
        scales = np.where(usable, _storable(ratio, form), grid.scales)
        again = _pooled_moments(weight, importance, _Grid(scales, grid.zeros), form)
        better = again[0] < best[0]
        if not better.any():
            break
        best = np.where(better, again, best)
        grid = _Grid(np.where(better, scales, grid.scales), grid.zeros)
    return grid


def _pooled_moments(weight: Floats, importance: Floats, grid: _Grid, form: _Format) -> Doubles:
    """Error, cross and power of every scale: float64 [3, rows or 1, groups]."""
    parts = np.stack(moments(weight, importance, grid.scales, grid.zeros, form.low, form.high))
    return parts.sum(axis=1, keepdims=True) if form.pooled else parts


def round_codes(
    weight: Floats, scales: Floats, zeros: NDArray[np.int8] | None, low: int, high: int
) -> NDArray[np.int8]:
    """Codes int8 [out, in] of weight float32 [out, in]; scales, zeros [out or 1, groups].

    Twin: round_codes_numpy.
    """
    codes = np.empty(weight.shape, dtype=np.int8)
    scale, zero = _per_row(weight, scales, _float_zeros(scales, zeros))
    _round_codes(np.ascontiguousarray(weight), scale, zero, np.float32(low), np.float32(high), codes)
    return codes


def round_codes_numpy(
    weight: Floats, scales: Floats, zeros: NDArray[np.int8] | None, low: int, high: int
) -> NDArray[np.int8]:
    """The definition of round_codes."""
    grouped = weight.reshape(weight.shape[0], scales.shape[1], -1)
    with np.errstate(over="ignore"):
        nearest = np.rint(grouped / scales[:, :, None]) + _float_zeros(scales, zeros)[:, :, None]
    codes: NDArray[np.int8] = np.clip(nearest, low, high).astype(np.int8).reshape(weight.shape)
    return codes


def grid_errors(weight: Floats, importance: Floats, scales: Floats, zeros: Floats, low: int, high: int) -> Doubles:
    """What rounding would cost on each candidate grid: float64 [out, groups, k].

    The sum over a group's columns, left to right in float64, of importance * (w - (code - zero) *
    scale)^2, where the difference is float32. Twin: grid_errors_numpy.

    Args:
        weight: float32 [out, in].
        importance: float32 [in].
        scales, zeros: float32 [out or 1, groups, k], k candidates for each group.
        low, high: Range of codes.
    """
    scales, zeros = _per_row(weight, scales, zeros)
    errors = np.zeros(scales.shape, dtype=np.float64)
    weight, importance = np.ascontiguousarray(weight), np.ascontiguousarray(importance)
    _grid_errors(weight, importance, scales, zeros, np.float32(low), np.float32(high), errors)
    return errors


def grid_errors_numpy(
    weight: Floats, importance: Floats, scales: Floats, zeros: Floats, low: int, high: int
) -> Doubles:
    """The definition of grid_errors."""
    rows, groups = weight.shape[0], scales.shape[1]
    grouped = weight.reshape(rows, groups, -1)
    heights = importance.astype(np.float64).reshape(groups, -1)
    errors = np.zeros((rows, *scales.shape[1:]), dtype=np.float64)
    for j in range(grouped.shape[2]):
        w = grouped[:, :, j, None]
        with np.errstate(over="ignore"):
            steps = np.clip(np.rint(w / scales) + zeros, low, high) - zeros
        difference = (w - steps * scales).astype(np.float64)
        errors += heights[None, :, j, None] * difference * difference
    return errors


def moments(
    weight: Floats, importance: Floats, scales: Floats, zeros: Floats, low: int, high: int
) -> tuple[Doubles, Doubles, Doubles]:
    """Per row and group float64 [out, groups]: error, cross = sum(h w z) and power = sum(h z^2).

    h is the importance and z = code - zero; cross / power is the least squares scale for these codes.
    Shapes as in grid_errors, with k left out. Twin: moments_numpy.
    """
    scales, zeros = _per_row(weight, scales, zeros)
    out = np.zeros((3, *scales.shape), dtype=np.float64)
    weight, importance = np.ascontiguousarray(weight), np.ascontiguousarray(importance)
    _moments(weight, importance, scales, zeros, np.float32(low), np.float32(high), out)
    return out[0], out[1], out[2]


def moments_numpy(
    weight: Floats, importance: Floats, scales: Floats, zeros: Floats, low: int, high: int
) -> tuple[Doubles, Doubles, Doubles]:
    """The definition of moments."""
    rows, groups = weight.shape[0], scales.shape[1]
    grouped = weight.reshape(rows, groups, -1)
    heights = importance.astype(np.float64).reshape(groups, -1)
    error, cross, power = np.zeros((3, rows, groups), dtype=np.float64)
    for j in range(grouped.shape[2]):
        w, h = grouped[:, :, j], heights[:, j]
        with np.errstate(over="ignore"):
            steps = np.clip(np.rint(w / scales) + zeros, low, high) - zeros
        difference = (w - steps * scales).astype(np.float64)
        error += h * difference * difference
        cross += h * w.astype(np.float64) * steps.astype(np.float64)
        power += h * steps.astype(np.float64) * steps.astype(np.float64)
    return error, cross, power


def _float_zeros(scales: Floats, zeros: NDArray[np.int8] | None) -> Floats:
    return np.zeros_like(scales) if zeros is None else zeros.astype(np.float32)


def _per_row(weight: Floats, scales: Floats, zeros: Floats) -> tuple[Floats, Floats]:
    """Scales and zeros with one row for every row of the weight, contiguous."""
    if scales.shape[0] != weight.shape[0]:
        scales, zeros = (np.repeat(a, weight.shape[0], axis=0) for a in (scales, zeros))
    return np.ascontiguousarray(scales), np.ascontiguousarray(zeros)


@njit(parallel=True, cache=True, error_model="numpy")
def _round_codes(weight, scales, zeros, low, high, codes):  # type: ignore[no-untyped-def]
    rows, columns = weight.shape
    width = columns // scales.shape[1]
    for r in prange(rows):
        for g in range(scales.shape[1]):
            scale, zero = scales[r, g], zeros[r, g]
            line, rounded = weight[r, g * width : (g + 1) * width], codes[r, g * width : (g + 1) * width]
            for j in range(width):
                code = np.rint(line[j] / scale) + zero
                code = low if code < low else (high if code > high else code)
                rounded[j] = np.int8(code)


@njit(parallel=True, cache=True, error_model="numpy")
def _grid_errors(weight, importance, scales, zeros, low, high, errors):  # type: ignore[no-untyped-def]
    """The innermost loop runs over candidates, so it vectorizes and each sum keeps its order."""
    rows, columns = weight.shape
    groups, count = scales.shape[1], scales.shape[2]
    width = columns // groups
    for r in prange(rows):
        for g in range(groups):
            scale, zero, error = scales[r, g], zeros[r, g], errors[r, g]
            for j in range(g * width, (g + 1) * width):
                w, height = weight[r, j], np.float64(importance[j])
                for k in range(count):
                    code = np.rint(w / scale[k]) + zero[k]
                    code = low if code < low else (high if code > high else code)
                    difference = np.float64(w - (code - zero[k]) * scale[k])
                    error[k] += height * difference * difference


@njit(parallel=True, cache=True, error_model="numpy")
def _moments(weight, importance, scales, zeros, low, high, out):  # type: ignore[no-untyped-def]
    rows, columns = weight.shape
    width = columns // scales.shape[1]
    for r in prange(rows):
        for g in range(scales.shape[1]):
            scale, zero = scales[r, g], zeros[r, g]
            error, cross, power = 0.0, 0.0, 0.0
            line, heights = weight[r, g * width : (g + 1) * width], importance[g * width : (g + 1) * width]
            for j in range(width):
                w, height = line[j], np.float64(heights[j])
                code = np.rint(w / scale) + zero
                code = low if code < low else (high if code > high else code)
                step = code - zero
                difference = np.float64(w - step * scale)
                error += height * difference * difference
                cross += height * np.float64(w) * np.float64(step)
                power += height * np.float64(step) * np.float64(step)
            out[0, r, g], out[1, r, g], out[2, r, g] = error, cross, power
