"""16-bit floats for numpy: bfloat16 as its bit pattern, and rounding to a storage dtype.

Storage dtypes carry their safetensors names: ``F32``, ``F16``, ``BF16``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 20
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def bf16_to_f32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Bit patterns uint16 [...] of bfloat16 -> float32 [...], exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Float32 [...] -> bfloat16 bit patterns uint16 [...], round to nearest even; NaN stays NaN.

    Works through the array in pieces, so that its temporaries stay small.
    """
    flat = np.ascontiguousarray(x, dtype=np.float32).reshape(-1)
    out = np.empty(flat.shape, np.uint16)
    for start in range(0, flat.size, CHUNK):
        piece = flat[start : start + CHUNK]
        bits = piece.view(np.uint32)
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += bits
        rounded >>= np.uint32(16)
        target = out[start : start + CHUNK]
        target[:] = rounded
        nan = np.isnan(piece)
        if nan.any():
            target[nan] = (bits[nan] >> np.uint32(16)) | np.uint32(0x40)
    return out.reshape(np.shape(x))


def all_finite(raw: NDArray[np.uint8], dtype: str) -> bool:
    """Whether little-endian bytes of dtype F64/F32/F16/BF16 hold no NaN or infinity (exponent not all ones)."""
    kind, exponent = {
        "F64": ("<u8", 0x7FF0 << 48),
        "F32": ("<u4", 0x7F80 << 16),
        "F16": ("<u2", 0x7C00),
        "BF16": ("<u2", 0x7F80),
    }[dtype]
    bits = raw.view(kind)
    mask = bits.dtype.type(exponent)
    pieces = (bits[start : start + CHUNK] for start in range(0, bits.size, CHUNK))
    return not any(((piece & mask) == mask).any() for piece in pieces)


def decode_float(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """Little-endian bytes uint8 [n * itemsize] of dtype F64/F32/F16/BF16 -> float32 [n]."""
    if dtype == "BF16":
        return bf16_to_f32(raw.view("<u2"))
    return raw.view({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)


def encode_float(x: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    """Float32 [...] -> little-endian bytes uint8 [x.size * itemsize] of dtype F32/F16/BF16 (RNE)."""
    flat = np.ascontiguousarray(x, dtype=np.float32).reshape(-1)
    if dtype == "BF16":
        return f32_to_bf16(flat).view(np.uint8)
    with np.errstate(over="ignore"):
        return flat.astype({"F32": "<f4", "F16": "<f2"}[dtype]).view(np.uint8)


def round_to_dtype(x: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """Float32 [...] -> float32 [...] whose every value is representable in dtype (F32/F16/BF16)."""
    return decode_float(encode_float(x, dtype), dtype).reshape(np.shape(x))
