"""Codes and ggml blocks: which block type holds a tensor exactly, packing, and the proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.checkpoint.base import TensorInfo
from compressor.core.spec import Spec
from compressor.core.tensors import QTensor
from compressor.kernels import ggml

FLOAT_TYPES = ("F32", "F16", "BF16")
LARGEST_VALUE = 448.0  # of FP8 E4M3
_LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class Choice:
    """The ggml type of a tensor and, when its codes cannot be carried, why."""

    kind: str
    reason: str | None = None


def choose_type(tensor: QTensor | None, info: TensorInfo, float_type: str | None = None) -> Choice:
    """The ggml type that holds a tensor without loss, or a float type and the reason.

    Args:
        tensor: Its codes, or None when it is kept as floats.
        info: Its header entry.
        float_type: F32, F16 or BF16 for matrices written as floats; None keeps a float's stored dtype.
    """
    if len(info.shape) == 1:
        return Choice("F32")
    if tensor is None:
        return Choice(float_type or (info.dtype if info.dtype in FLOAT_TYPES else "F32"))
    reason = _obstacle(tensor)
    return Choice(float_type or _closest_float(tensor), reason) if reason else Choice(_carrier(tensor))


def _closest_float(tensor: QTensor) -> str:
    """F16, which rounds code * scale less than BF16 does, unless a value might not fit."""
    top = LARGEST_VALUE if tensor.spec.kind == "float" else 2.0**tensor.spec.bits
    largest = float(np.abs(tensor.scales).max()) * top
    return "F16" if largest < _LARGEST_HALF else "BF16"


def grid_obstacle(spec: Spec, columns: int) -> str | None:
    """Why no ggml block can hold codes of this format and width, or None; known before any work."""
    if spec.kind == "float":
        return "no ggml block holds FP8 values"
    if columns % ggml.BLOCK:
        return f"{columns} columns are not a multiple of {ggml.BLOCK}"
    if spec.columns_per_scale(columns) % ggml.BLOCK:
        return f"group size {spec.group_size} is not a multiple of {ggml.BLOCK}"
    return None


def _obstacle(tensor: QTensor) -> str | None:
    """Why no ggml block can hold these codes, or None."""
    if (reason := grid_obstacle(tensor.spec, tensor.shape[1])) is not None:
        return reason
    if not ggml.is_half(tensor.scales):
        return "a scale is not exactly an fp16 number (scale_dtype F16 or BF16 nearly always is)"
    if tensor.zeros is not None and tensor.spec.bits == 8 and not _fits_int8(tensor):
        return "8-bit codes minus zero points do not fit in 8 bits"
    return None


def _carrier(tensor: QTensor) -> str:
    """The smallest ggml type that holds code - zero and the scale exactly."""
    bits, symmetric = tensor.spec.bits, tensor.spec.symmetric
    if bits <= (4 if symmetric else 3):
        return "Q4_0"
    if bits == 4:
        return "Q4_1" if ggml.is_half(_offsets(tensor)) else "Q5_0"
    return "Q5_0" if bits == 5 and symmetric else "Q8_0"


def _offsets(tensor: QTensor) -> NDArray[np.float32]:
    """Q4_1's m = -scale * (zero + 8), float32 like scales (the product is exact)."""
    assert tensor.zeros is not None
    return np.asarray(-tensor.scales * (tensor.zeros.astype(np.float32) + np.float32(8)), dtype=np.float32)


def _fits_int8(tensor: QTensor) -> bool:
    wide = _minus_zeros(tensor)
    return bool(wide.min() >= -128 and wide.max() <= 127)


def _minus_zeros(tensor: QTensor) -> NDArray[np.int16]:
    """int16 [out, in]: code - zero."""
    rows, columns = tensor.shape
    wide = tensor.codes.astype(np.int16)
    if tensor.zeros is not None:
        groups = wide.reshape(rows, -1, tensor.spec.columns_per_scale(columns))
        groups -= tensor.zeros[..., None]
    return wide


def permute(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows [heads * head_dim, ...] from rotary halves to interleaved pairs, head by head."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(shape)


def permuted(tensor: QTensor, heads: int | None) -> QTensor:
    """The tensor with its rows (codes, scales, zeros alike) in llama.cpp's order."""
    if heads is None:
        return tensor

    def moved(values: NDArray[Any]) -> NDArray[Any]:
        return np.ascontiguousarray(permute(values, heads)) if values.shape[0] > 1 else values

    zeros = None if tensor.zeros is None else moved(tensor.zeros)
    return QTensor(moved(tensor.codes), moved(tensor.scales), zeros, tensor.spec)


def pack(tensor: QTensor, kind: str) -> NDArray[np.uint8]:
    """Codes -> ggml blocks uint8 [out, bytes] of a kind that choose_type named."""
    scales = ggml.spread_scales(tensor.scales, *tensor.shape)
    if kind == "Q4_1":
        shifted = (tensor.codes + np.int8(8)).view(np.uint8)
        return ggml.pack_q4_1(shifted, scales, ggml.spread_scales(_offsets(tensor), *tensor.shape))
    packer = {"Q4_0": ggml.pack_q4_0, "Q5_0": ggml.pack_q5_0, "Q8_0": ggml.pack_q8_0}[kind]
    codes = tensor.codes if tensor.zeros is None else _minus_zeros(tensor).astype(np.int8)
    return packer(codes, scales)


def same(tensor: QTensor, kind: str, data: NDArray[np.uint8]) -> bool:
    """Whether ggml blocks uint8 [out, bytes] hold exactly these codes, zeros and scales."""
    scales = ggml.spread_scales(tensor.scales, *tensor.shape)
    if kind == "Q4_1":
        shifted, found, offsets = ggml.unpack_q4_1(data)
        expected = ggml.spread_scales(_offsets(tensor), *tensor.shape)
        codes_equal = np.array_equal(shifted.view(np.int8) - np.int8(8), tensor.codes)
        return codes_equal and np.array_equal(found, scales) and np.array_equal(offsets, expected)
    unpacker = {"Q4_0": ggml.unpack_q4_0, "Q5_0": ggml.unpack_q5_0, "Q8_0": ggml.unpack_q8_0}[kind]
    codes, found = unpacker(data)
    return np.array_equal(codes, _minus_zeros(tensor)) and np.array_equal(found, scales)
