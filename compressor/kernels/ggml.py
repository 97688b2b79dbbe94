"""Integer codes carried into ggml blocks of 32 and back, without rounding.

A row of a matrix [rows, columns] becomes columns/32 blocks; every block has one fp16 scale d (and for
Q4_1 one fp16 offset m). Layouts, little endian (source: ggml-common.h of llama.cpp):

======  =====  ==============================================================  ==================
type    bytes  layout of one block                                             value of element j
======  =====  ==============================================================  ==================
Q4_0    18     d fp16; qs u8[16]: low nibble = element j, high = j + 16        d * (q - 8)
Q4_1    20     d fp16; m fp16; qs as Q4_0                                      d * q + m
Q5_0    22     d fp16; qh u32: bit j = bit 4 of element j; qs = low 4 bits     d * (q - 16)
Q8_0    34     d fp16; i8[32]                                                  d * q
======  =====  ==============================================================  ==================

``pack_x`` and ``unpack_x`` are exact inverses; the block-by-block twins live in the tests.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q8_0": 34}

_T = TypeVar("_T", np.int8, np.uint8)
Codes = NDArray[np.int8]
Bytes = NDArray[np.uint8]
Halfs = NDArray[np.float16]


def spread_scales(values: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
    """One value per block: float32 [rows | 1, groups] -> float32 [rows, columns / 32].

    Raises:
        ValueError: a group is not a whole number of blocks.
    """
    groups = values.shape[1]
    if columns % (groups * BLOCK):
        raise ValueError(f"{columns} columns in {groups} groups are not whole blocks of {BLOCK}")
    repeated = np.repeat(values, columns // groups // BLOCK, axis=1)
    return np.ascontiguousarray(np.broadcast_to(repeated, (rows, columns // BLOCK)))


def is_half(values: NDArray[np.float32]) -> bool:
    """Whether every float32 value [...] is exactly an fp16 number (finite)."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))


def pack_q4_0(codes: Codes, scales: NDArray[np.float32]) -> Bytes:
    """int8 [rows, columns] in -8..7, scales float32 [rows, blocks] -> uint8 [rows, blocks*18]."""
    blocks = _blocks(codes, scales, -8, 7)
    return _join(_half_bytes(scales), _nibbles((blocks + np.int8(8)).view(np.uint8)))


def unpack_q4_0(data: Bytes) -> tuple[Codes, Halfs]:
    """uint8 [rows, blocks*18] -> codes int8 [rows, blocks*32] in -8..7, scales float16 [rows, blocks]."""
    parts = _split(data, 18)
    codes = _unnibble(parts[..., 2:]).view(np.int8) - np.int8(8)
    return codes.reshape(data.shape[0], -1), _halfs(parts)


def pack_q4_1(codes: Bytes, scales: NDArray[np.float32], offsets: NDArray[np.float32]) -> Bytes:
    """uint8 [rows, columns] in 0..15, scales, offsets float32 [rows, blocks] -> uint8 [rows, blocks*20]."""
    blocks = _blocks(codes, scales, 0, 15)
    return _join(_half_bytes(scales), _half_bytes(offsets), _nibbles(blocks))


def unpack_q4_1(data: Bytes) -> tuple[Bytes, Halfs, Halfs]:
    """uint8 [rows, blocks*20] -> codes uint8 [rows, blocks*32], scales, offsets float16 [rows, blocks]."""
    parts = _split(data, 20)
    return _unnibble(parts[..., 4:]).reshape(data.shape[0], -1), _halfs(parts), _halfs(parts[..., 2:])


def pack_q5_0(codes: Codes, scales: NDArray[np.float32]) -> Bytes:
    """int8 [rows, columns] in -16..15, scales float32 [rows, blocks] -> uint8 [rows, blocks*22]."""
    blocks = (_blocks(codes, scales, -16, 15) + np.int8(16)).view(np.uint8)
    high = np.packbits(blocks >> np.uint8(4), axis=-1, bitorder="little")
    return _join(_half_bytes(scales), high, _nibbles(blocks & np.uint8(15)))


def unpack_q5_0(data: Bytes) -> tuple[Codes, Halfs]:
    """uint8 [rows, blocks*22] -> codes int8 [rows, blocks*32] in -16..15, scales float16 [rows, blocks]."""
    parts = _split(data, 22)
    high = np.unpackbits(parts[..., 2:6], axis=-1, bitorder="little")
    codes = (_unnibble(parts[..., 6:]) | (high << np.uint8(4))).view(np.int8) - np.int8(16)
    return codes.reshape(data.shape[0], -1), _halfs(parts)


def pack_q8_0(codes: Codes, scales: NDArray[np.float32]) -> Bytes:
    """int8 [rows, columns], scales float32 [rows, blocks] -> uint8 [rows, blocks*34]."""
    return _join(_half_bytes(scales), _blocks(codes, scales, -128, 127).view(np.uint8))


def unpack_q8_0(data: Bytes) -> tuple[Codes, Halfs]:
    """uint8 [rows, blocks*34] -> codes int8 [rows, blocks*32], scales float16 [rows, blocks]."""
    parts = _split(data, 34)
    return np.ascontiguousarray(parts[..., 2:]).view(np.int8).reshape(data.shape[0], -1), _halfs(parts)


def _blocks(codes: NDArray[_T], scales: NDArray[np.float32], low: int, high: int) -> NDArray[_T]:
    """Codes [rows, columns] -> [rows, blocks, 32], checked against the range and the scales' shape."""
    rows, columns = codes.shape
    if columns % BLOCK or scales.shape != (rows, columns // BLOCK):
        raise ValueError(f"codes {codes.shape} and scales {scales.shape} are not blocks of {BLOCK}")
    if codes.size and (int(codes.min()) < low or int(codes.max()) > high):
        raise ValueError(f"codes must lie in {low}..{high}, got {codes.min()}..{codes.max()}")
    return codes.reshape(rows, columns // BLOCK, BLOCK)


def _half_bytes(values: NDArray[np.float32]) -> Bytes:
    """float32 [rows, blocks] -> little-endian fp16 bytes uint8 [rows, blocks, 2]; refuses to round."""
    if not is_half(values):
        raise ValueError("a scale is not exactly representable in fp16")
    return np.ascontiguousarray(values.astype("<f2")[..., None]).view(np.uint8)


def _halfs(parts: Bytes) -> Halfs:
    """The fp16 at the start of each block: uint8 [rows, blocks, >=2] -> float16 [rows, blocks]."""
    return np.ascontiguousarray(parts[..., :2]).view("<f2")[..., 0].astype(np.float16)


def _nibbles(blocks: Bytes) -> Bytes:
    """uint8 [rows, blocks, 32] in 0..15 -> uint8 [rows, blocks, 16]: element j low, j + 16 high."""
    return blocks[..., :16] | (blocks[..., 16:] << np.uint8(4))


def _unnibble(packed: Bytes) -> Bytes:
    """uint8 [rows, blocks, 16] -> uint8 [rows, blocks, 32], the inverse of _nibbles."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)


def _join(*parts: Bytes) -> Bytes:
    """Pieces uint8 [rows, blocks, n_i] -> uint8 [rows, blocks * sum(n_i)]."""
    return np.concatenate(parts, axis=-1).reshape(parts[0].shape[0], -1)


def _split(data: Bytes, size: int) -> Bytes:
    """uint8 [rows, blocks * size] -> uint8 [rows, blocks, size]."""
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] % size:
        raise ValueError(f"expected uint8 [rows, blocks * {size}], got {data.dtype} {data.shape}")
    return data.reshape(data.shape[0], -1, size)
