"""FP8 E4M3 (finite, ``e4m3fn``) and its scales: w = value(code) * scale.

A code is one byte: sign, 4 exponent bits (bias 7), 3 mantissa bits (arXiv 2209.05433). No infinity; 0x7F and
0xFF are NaN and never written. Largest value 448, smallest normal 2^-6, smallest subnormal 2^-9.

Rounding is to nearest, ties to the even code, and saturates at 448: code = e4m3(w / scale) in float32.
Scales are positive and rounded to the dtype they are stored in before any weight is rounded or any error is
judged. A scale serves a tile of the matrix: a row (channel), everything (tensor), or a block; tiles at the
right and lower edges may be smaller.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from compressor.kernels.affine import LARGEST, SMALLEST_NORMAL
from compressor.kernels.floats import round_to_dtype
from compressor.kernels.tiles import Tile

Search = Literal["absmax", "mse"]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

LARGEST_VALUE = 448.0
NAN_CODES = (0x7F, 0xFF)
CANDIDATES = 32
REFITS = 2
WIDEST, NARROWEST = 2.0, 0.7
"""Scales tried, as parts of the absmax scale: a whole octave up moves every weight in its binade (values
repeat from octave to octave), a little down clips the largest weights."""

_CHUNK = 1 << 20


def _values() -> Floats:
    """float32 [256]: what every code means; NaN for the two that mean nothing."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float64)
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    values = np.where(codes & 128, -magnitude, magnitude)
    values[list(NAN_CODES)] = np.nan
    return values.astype(np.float32)


VALUES: Floats = _values()


def decode(codes: NDArray[np.uint8]) -> Floats:
    """Codes uint8 [...] -> float32 [...], exact."""
    return VALUES[codes]


def encode(x: Floats) -> NDArray[np.uint8]:
    """Float32 [...] -> codes uint8 [...]: nearest, ties to even, saturating at 448; NaN is refused.

    -0 and what rounds to it keep their sign (0x80). Twin: encode_numpy.

    Raises:
        ValueError: a value is NaN.
    """
    flat = np.ascontiguousarray(x, dtype=np.float32).reshape(-1)
    if np.isnan(flat).any():
        raise ValueError("NaN has no FP8 code")
    codes = np.empty(flat.shape, np.uint8)
    _encode(flat.view(np.uint32), flat, codes)
    return codes.reshape(np.shape(x))


def encode_numpy(x: Floats) -> NDArray[np.uint8]:
    """The definition of encode: by search among the 127 values that are not negative."""
    magnitude = np.abs(np.asarray(x, dtype=np.float32)).astype(np.float64)
    table = VALUES[:0x7F].astype(np.float64)
    middles = (table[1:] + table[:-1]) / 2
    below, above = (np.searchsorted(middles, magnitude, side=side) for side in ("left", "right"))
    codes = np.where(below == above, below, below + below % 2)  # on a middle: the even one of below, above
    return (codes | np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def spread(scales: Floats, tile: Tile, rows: int, columns: int) -> Floats:
    """Scales float32 [tile rows, tile columns] -> float32 broadcastable to [rows, columns]."""
    wide = scales if tile.columns >= columns else np.repeat(scales, tile.columns, axis=1)[:, :columns]
    return wide if tile.rows >= rows or tile.rows == 1 else np.repeat(wide, tile.rows, axis=0)[:rows]


def round_codes(weight: Floats, scales: Floats, tile: Tile) -> NDArray[np.uint8]:
    """Codes uint8 [out, in] of weight float32 [out, in] on these scales, in pieces of whole tiles."""
    codes = np.empty(weight.shape, np.uint8)
    for rows, own in _pieces(weight, scales, tile):
        with np.errstate(over="ignore"):
            codes[rows] = encode(weight[rows] / spread(own, tile, *weight[rows].shape))
    return codes


def dequantize(codes: NDArray[np.uint8], scales: Floats, tile: Tile) -> Floats:
    """Float32 [out, in]: value times scale, one float32 multiplication each."""
    values = decode(codes)
    for rows, own in _pieces(codes, scales, tile):
        values[rows] *= spread(own, tile, *values[rows].shape)
    return values


def _pieces(matrix: NDArray[Any], scales: Floats, tile: Tile) -> Iterator[tuple[slice, Floats]]:
    """(slice of rows, their scales): whole tiles, about _CHUNK elements each."""
    rows, columns = matrix.shape
    pooled = tile.rows >= rows
    step = max(1, _CHUNK // max(1, columns) // tile.rows) * tile.rows if not pooled else max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        yield part, scales if pooled else scales[start // tile.rows : -(-part.stop // tile.rows)]


def choose_scales(
    weight: Floats,
    tile: Tile,
    *,
    scale_dtype: str = "BF16",
    search: Search = "absmax",
    importance: Floats | None = None,
) -> Floats:
    """Scales float32 [tile rows, tile columns] for weight float32 [out, in].

    ``absmax`` puts the largest weight of a tile at 448. ``mse`` tries 32 scales around it, takes the one of
    least error sum(importance * (w - w_q)^2) and refits it by least squares; never worse than ``absmax``.
    All-zero tiles get scale 1; a scale that would underflow becomes the smallest normal number of
    scale_dtype, one that would overflow the largest.

    Args:
        weight: Finite values.
        importance: float32 [in], not negative; None counts every column the same.
    """
    peaks = _peaks(weight, tile)
    first = np.where(peaks > 0, _storable(peaks.astype(np.float64) / LARGEST_VALUE, scale_dtype), np.float32(1))
    if search == "absmax":
        return first
    weights = np.ones(weight.shape[1], np.float32) if importance is None else importance
    factors = np.append(1.0, np.geomspace(WIDEST, NARROWEST, CANDIDATES - 1))
    tried = _storable(first.astype(np.float64)[:, :, None] * factors, scale_dtype)
    tried = np.where(peaks[:, :, None] > 0, tried, first[:, :, None])
    pick = grid_errors(weight, weights, tried, tile).argmin(axis=2)[:, :, None]
    best_scales = np.take_along_axis(tried, pick, axis=2)[:, :, 0]
    best = moments(weight, weights, best_scales, tile)
    for _ in range(REFITS):
        usable = (best[1] > 0) & (best[2] > 0)
        ratio = np.divide(best[1], best[2], out=np.ones_like(best[1]), where=usable)
        again = np.where(usable, _storable(ratio, scale_dtype), best_scales)
        best_scales, best = _better(weight, weights, tile, (best_scales, best), again)
    return best_scales


def _better(
    weight: Floats, importance: Floats, tile: Tile, held: tuple[Floats, Doubles], tried: Floats
) -> tuple[Floats, Doubles]:
    """Scale by scale the one that errs less, with its moments."""
    found = moments(weight, importance, tried, tile)
    less = found[0] < held[1][0]
    return np.where(less, tried, held[0]), np.where(less, found, held[1])


def _peaks(weight: Floats, tile: Tile) -> Floats:
    """max|w| of every tile."""
    rows, columns = weight.shape
    across = np.arange(0, columns, tile.columns)
    by_row = np.maximum(np.maximum.reduceat(weight, across, axis=1), -np.minimum.reduceat(weight, across, axis=1))
    return np.maximum.reduceat(by_row, np.arange(0, rows, tile.rows), axis=0)


def _storable(scales: Doubles, dtype: str) -> Floats:
    """The nearest scales that dtype holds; never zero, never infinite."""
    stored = round_to_dtype(np.minimum(scales, LARGEST[dtype]).astype(np.float32), dtype)
    return np.where(stored >= SMALLEST_NORMAL[dtype], stored, np.float32(SMALLEST_NORMAL[dtype]))


def moments(weight: Floats, importance: Floats, scales: Floats, tile: Tile) -> Doubles:
    """Error, cross and power of every tile when its weights are rounded: float64 [3, tile rows, tile columns].

    With v the rounded value (without its scale) and h the importance: sum h (w - v s)^2, sum h w v, sum h v^2.
    Row by row, left to right; rows are then added in order. Twin: moments_numpy.
    """
    rows = weight.shape[0]
    out = np.zeros((3, rows, scales.shape[1]), dtype=np.float64)
    _moments(np.ascontiguousarray(weight), np.ascontiguousarray(importance), scales, tile.rows, tile.columns, out)
    summed: Doubles = np.add.reduceat(out, np.arange(0, rows, tile.rows), axis=1)
    return summed


def grid_errors(weight: Floats, importance: Floats, scales: Floats, tile: Tile) -> Doubles:
    """``moments``' error for many scales at once: float32 [tile rows, tile columns, n] -> float64 alike.

    Every sum keeps moments' order, so it equals it bit for bit. Works through whole tiles, bounded in memory.
    """
    rows, across, count = weight.shape[0], scales.shape[1], scales.shape[2]
    out = np.empty(scales.shape, np.float64)
    step = max(1, _CHUNK // (across * count) // tile.rows) * tile.rows
    for start in range(0, rows, step):
        part = weight[start : start + step]
        own = slice(start // tile.rows, -(-(start + len(part)) // tile.rows))
        errors = np.zeros((len(part), across, count), np.float64)
        _grid_errors(np.ascontiguousarray(part), importance, scales[own], tile.rows, tile.columns, errors)
        out[own] = np.add.reduceat(errors, np.arange(0, len(part), tile.rows), axis=0)
    return out


def moments_numpy(weight: Floats, importance: Floats, scales: Floats, tile: Tile) -> Doubles:
    """The definition of moments."""
    rows, columns = weight.shape
    scale = np.broadcast_to(spread(scales, tile, rows, columns), weight.shape)
    with np.errstate(over="ignore"):
        values = decode(encode_numpy(weight / scale))
    difference = (weight - values * scale).astype(np.float64)
    h, w, v = importance.astype(np.float64), weight.astype(np.float64), values.astype(np.float64)
    terms = np.stack([h * difference * difference, h * w * v, h * v * v])
    by_row = np.zeros((3, rows, scales.shape[1]))
    for column in range(columns):
        by_row[:, :, column // tile.columns] += terms[:, :, column]
    summed: Doubles = np.add.reduceat(by_row, np.arange(0, rows, tile.rows), axis=1)
    return summed


@njit(parallel=True, cache=True)
def _encode(bits, values, codes):  # type: ignore[no-untyped-def]
    """On the float's bits: add half a step (and the last kept bit, for ties), drop 20 of 23 mantissa bits."""
    for i in prange(bits.size):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        if magnitude < np.uint32(0x3C800000):  # under 2^-6: a step is 2^-9
            code = np.uint32(np.rint(abs(values[i]) * np.float32(512)))
        else:
            kept = magnitude + np.uint32(0x7FFFF) + ((magnitude >> np.uint32(20)) & np.uint32(1))
            code = min((kept >> np.uint32(20)) - np.uint32(960), np.uint32(0x7E))
        codes[i] = np.uint8(code | ((bits[i] >> np.uint32(24)) & np.uint32(128)))


@njit(inline="always")
def _nearest(x):  # type: ignore[no-untyped-def]
    """The E4M3 value nearest to x, both float32: as _encode on its bits, without the code."""
    bits = np.float32(x).view(np.uint32)
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    odd = np.uint32((magnitude >> np.uint32(20)) & np.uint32(1))
    kept = np.uint32(np.uint32(magnitude + np.uint32(0x7FFFF) + odd) & np.uint32(0xFFF00000))
    kept = min(kept, np.uint32(0x43E00000))  # 448
    value = np.uint32(kept | np.uint32(bits & np.uint32(0x80000000))).view(np.float32)
    small = np.float32(np.float32(x + np.float32(24576)) - np.float32(24576))  # a step of 24576 is 2^-9
    return small if magnitude < np.uint32(0x3C800000) else value  # under 2^-6


@njit(parallel=True, cache=True, error_model="numpy")
def _moments(weight, importance, scales, tile_rows, tile_columns, out):  # type: ignore[no-untyped-def]
    """Rounded first, then summed: the first loop runs on vectors, each sum keeps its order."""
    rows, columns = weight.shape
    for r in prange(rows):
        values = np.empty(columns, np.float32)
        for t in range(scales.shape[1]):
            start, end = t * tile_columns, min(columns, (t + 1) * tile_columns)
            scale = scales[r // tile_rows, t]
            for j in range(start, end):
                values[j] = _nearest(weight[r, j] / scale)
            error, cross, power = 0.0, 0.0, 0.0
            for j in range(start, end):
                height, value = np.float64(importance[j]), np.float64(values[j])
                difference = np.float64(weight[r, j] - values[j] * scale)
                error += height * difference * difference
                cross += height * np.float64(weight[r, j]) * value
                power += height * value * value
            out[0, r, t], out[1, r, t], out[2, r, t] = error, cross, power


@njit(parallel=True, cache=True, error_model="numpy")
def _grid_errors(weight, importance, scales, tile_rows, tile_columns, out):  # type: ignore[no-untyped-def]
    """The innermost loop runs over candidates, so it vectorizes and each sum keeps its order."""
    rows, columns = weight.shape
    count = scales.shape[2]
    for r in prange(rows):
        for t in range(scales.shape[1]):
            scale, error = scales[r // tile_rows, t], out[r, t]
            for j in range(t * tile_columns, min(columns, (t + 1) * tile_columns)):
                w, height = weight[r, j], np.float64(importance[j])
                for k in range(count):
                    difference = np.float64(w - _nearest(w / scale[k]) * scale[k])
                    error[k] += height * difference * difference
