"""The dense bit stream behind compressed-tensors, GPTQ and MLX files.

Per row, element i of b bits occupies bits [i*b, (i+1)*b) of a little-endian stream of uint32 words,
least significant bit first; a field may straddle two words, and the last word is padded with zeros.
The fast paths for 4 and 8 bits view bytes as words, so they hold for little-endian machines.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray


def words_per_row(n: int, bits: int) -> int:
    """How many uint32 words hold n codes: ceil(n * bits / 32)."""
    return -(-n * bits // 32)


def pack_rows(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Codes uint8 [rows, n], each below 2^bits -> words uint32 [rows, ceil(n*bits/32)].

    Bit order: see the module. Twin: pack_rows_numpy.

    Raises:
        ValueError: bits is not 1..8, codes is not such an array, or a code needs more bits.
    """
    _check_codes(codes, bits)
    codes = np.ascontiguousarray(codes)
    rows, n = codes.shape
    if bits == 8 and n % 4 == 0:
        return codes.view(np.uint32).copy()
    words = np.empty((rows, words_per_row(n, bits)), dtype=np.uint32)
    if bits == 4 and n % 8 == 0:
        _pack4(codes.view(np.uint64), words)
    else:
        _pack(codes, np.uint64(bits), words)
    return words


def unpack_rows(words: NDArray[np.uint32], bits: int, n: int) -> NDArray[np.uint8]:
    """Words uint32 [rows, ceil(n*bits/32)] -> codes uint8 [rows, n]. Twin: unpack_rows_numpy.

    Raises:
        ValueError: bits is not 1..8, or words has another shape or dtype.
    """
    _check_words(words, bits, n)
    words = np.ascontiguousarray(words)
    if bits == 8:
        return words.view(np.uint8)[:, :n].copy()
    codes = np.empty((words.shape[0], n), dtype=np.uint8)
    if bits == 4 and n % 8 == 0:
        _unpack4(words, codes.view(np.uint64))
    else:
        _unpack(words, np.uint64(bits), codes)
    return codes


def pack_rows_numpy(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """The definition of pack_rows: spell every code as bits, join, read as words."""
    _check_codes(codes, bits)
    rows, n = codes.shape
    spelled = np.zeros((rows, 32 * words_per_row(n, bits)), dtype=np.uint8)
    fields = np.unpackbits(codes[:, :, None], axis=2, bitorder="little")[:, :, :bits]
    spelled[:, : n * bits] = fields.reshape(rows, n * bits)
    return np.packbits(spelled, axis=1, bitorder="little").view("<u4").astype(np.uint32)


def unpack_rows_numpy(words: NDArray[np.uint32], bits: int, n: int) -> NDArray[np.uint8]:
    """The definition of unpack_rows: spell the words as bits, cut into fields, weigh."""
    _check_words(words, bits, n)
    rows = words.shape[0]
    spelled = np.unpackbits(words.astype("<u4").view(np.uint8), axis=1, bitorder="little")
    fields = spelled[:, : n * bits].reshape(rows, n, bits)
    codes: NDArray[np.uint8] = (fields << np.arange(bits, dtype=np.uint8)).sum(axis=2, dtype=np.uint8)
    return codes


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be 1..8, got {bits}")


def _check_codes(codes: NDArray[np.uint8], bits: int) -> None:
    _check_bits(bits)
    if codes.dtype != np.uint8 or codes.ndim != 2:
        raise ValueError(f"codes must be uint8 [rows, n], got {codes.dtype} {codes.shape}")
    if codes.size and bits < 8 and int(codes.max()) >> bits:
        raise ValueError(f"code {codes.max()} does not fit into {bits} bits")


def _check_words(words: NDArray[np.uint32], bits: int, n: int) -> None:
    _check_bits(bits)
    if words.dtype != np.uint32 or words.ndim != 2 or words.shape[1] != words_per_row(n, bits):
        expected = f"uint32 [rows, {words_per_row(n, bits)}]"
        raise ValueError(f"words must be {expected} for {n} codes, got {words.dtype} {words.shape}")


@njit(parallel=True, cache=True)
def _pack(codes, bits, words):  # type: ignore[no-untyped-def]
    """Four codes (at most 32 bits) enter a 64-bit buffer at a time; full words leave it."""
    rows, n = codes.shape
    whole = n - n % 4
    for r in prange(rows):
        held, fill, at = np.uint64(0), np.uint64(0), 0
        for i in range(0, whole, 4):
            low = np.uint64(codes[r, i]) | np.uint64(codes[r, i + 1]) << bits
            high = np.uint64(codes[r, i + 2]) | np.uint64(codes[r, i + 3]) << bits
            held |= (low | high << (bits + bits)) << fill
            fill += bits << np.uint64(2)
            if fill >= np.uint64(32):
                words[r, at] = np.uint32(held & np.uint64(0xFFFFFFFF))
                held, fill, at = held >> np.uint64(32), fill - np.uint64(32), at + 1
        for i in range(whole, n):
            held |= np.uint64(codes[r, i]) << fill
            fill += bits
        while at < words.shape[1]:
            words[r, at] = np.uint32(held & np.uint64(0xFFFFFFFF))
            held, at = held >> np.uint64(32), at + 1


@njit(parallel=True, cache=True)
def _unpack(words, bits, codes):  # type: ignore[no-untyped-def]
    """A 64-bit buffer is refilled by a word whenever it holds fewer than bits bits."""
    rows, n = codes.shape
    mask = (np.uint64(1) << bits) - np.uint64(1)
    for r in prange(rows):
        held, fill, at = np.uint64(0), np.uint64(0), 0
        for i in range(n):
            if fill < bits:
                held |= np.uint64(words[r, at]) << fill
                fill, at = fill + np.uint64(32), at + 1
            codes[r, i] = np.uint8(held & mask)
            held, fill = held >> bits, fill - bits


@njit(parallel=True, cache=True)
def _pack4(eights, words):  # type: ignore[no-untyped-def]
    """Eight 4-bit codes, read as one uint64 [rows, n/8], fold into one word in three steps."""
    for r in prange(words.shape[0]):
        for i in range(words.shape[1]):
            x = eights[r, i]
            x = (x | x >> np.uint64(4)) & np.uint64(0x00FF00FF00FF00FF)
            x = (x | x >> np.uint64(8)) & np.uint64(0x0000FFFF0000FFFF)
            words[r, i] = np.uint32((x | x >> np.uint64(16)) & np.uint64(0xFFFFFFFF))


@njit(parallel=True, cache=True)
def _unpack4(words, eights):  # type: ignore[no-untyped-def]
    """The three steps of _pack4 backwards."""
    for r in prange(words.shape[0]):
        for i in range(words.shape[1]):
            x = np.uint64(words[r, i])
            x = (x | x << np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
            x = (x | x << np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
            eights[r, i] = (x | x << np.uint64(4)) & np.uint64(0x0F0F0F0F0F0F0F0F)
