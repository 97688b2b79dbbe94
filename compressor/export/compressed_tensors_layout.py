"""The bytes of one matrix in compressed-tensors' layouts, both ways.

``pack-quantized``, for a module ``m`` holding a matrix [out, in] in an integer format of b bits:

- ``m.weight_packed``, I32 [out, ceil(in*b/32)]: code + 2^(b-1), dense along in.
- ``m.weight_scale``, the format's scale dtype, [out, groups] (channel [out, 1], tensor [1]).
- ``m.weight_zero_point``, I32 [ceil(out*b/32), groups]: zero + 2^(b-1), dense along out.
- ``m.weight_shape``, I64 [2]: out, in.

Bit order: see kernels.bitpack. Zero points exist only in asymmetric formats; a tensor format keeps its
single one unpacked (I8 [1], no offset), which is how readers of this layout expect it.

``int-quantized`` (integers with quantized activations) and ``float-quantized`` (FP8) keep one byte per weight:

- ``m.weight``, I8 or F8_E4M3 [out, in]: the codes.
- ``m.weight_scale`` as above; block formats [ceil(out/rows), ceil(in/columns)].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.core.spec import FLOAT_QUANTIZED, INT_QUANTIZED, PACK_QUANTIZED, Spec, packed_words
from compressor.core.tensors import QTensor, RawTensor
from compressor.errors import CompressorError
from compressor.kernels.floats import FLOAT_BYTES, decode_float, encode_float

PACKED, SCALE, ZERO, SHAPE = "weight_packed", "weight_scale", "weight_zero_point", "weight_shape"
PLAIN = "weight"
PLAIN_DTYPES = {INT_QUANTIZED: "I8", FLOAT_QUANTIZED: "F8_E4M3"}
PARTS = (PACKED, SCALE, ZERO, SHAPE)
ITEM_BYTES = {"I8": 1, "F8_E4M3": 1, "I32": 4, "I64": 8, **FLOAT_BYTES}


def codes_part(spec: Spec) -> str:
    """The part that holds the codes: ``weight_packed`` or ``weight``."""
    return PACKED if spec.layout == PACK_QUANTIZED else PLAIN


def layout(spec: Spec, out_features: int, in_features: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every part (``weight_packed`` ...) of a matrix [out_features, in_features].

    Raises:
        ValueError: group_size does not divide in_features.
    """
    rows, groups = spec.scales_shape(out_features, in_features)
    single = spec.strategy == "tensor"
    plain = PLAIN_DTYPES.get(spec.layout)
    if plain is not None:
        return {
            PLAIN: (plain, (out_features, in_features)),
            SCALE: (spec.scale_dtype, (1,) if single else (rows, groups)),
        }
    parts: dict[str, tuple[str, tuple[int, ...]]] = {
        PACKED: ("I32", (out_features, packed_words(in_features, spec.bits))),
        SCALE: (spec.scale_dtype, (1,) if single else (rows, groups)),
    }
    if not spec.symmetric:
        parts[ZERO] = ("I8", (1,)) if single else ("I32", (packed_words(out_features, spec.bits), groups))
    parts[SHAPE] = ("I64", (2,))
    return parts


def encoded_nbytes(spec: Spec, out_features: int, in_features: int) -> int:
    """Exact size of what ``encode`` makes of a matrix [out_features, in_features].

    Raises:
        ValueError: group_size does not divide in_features.
    """
    parts = layout(spec, out_features, in_features).values()
    return sum(ITEM_BYTES[dtype] * int(np.prod(shape, dtype=object)) for dtype, shape in parts)


def encode(module: str, tensor: QTensor) -> dict[str, RawTensor]:
    """The parts of one rounded matrix, by full tensor name. Inverse: decode."""
    spec = tensor.spec
    plain = codes_part(spec) == PLAIN
    data = {
        codes_part(spec): _bytes(tensor.codes) if plain else _pack(tensor.codes, spec.bits),
        SCALE: encode_float(tensor.scales, spec.scale_dtype),
        SHAPE: np.array(tensor.shape, dtype="<i8").view(np.uint8),
    }
    if tensor.zeros is not None:
        single = spec.strategy == "tensor"
        zeros = np.ascontiguousarray(tensor.zeros)
        data[ZERO] = _bytes(zeros) if single else _pack(zeros.T, spec.bits, transpose=True)
    return {
        f"{module}.{part}": RawTensor(dtype, shape, data[part])
        for part, (dtype, shape) in layout(spec, *tensor.shape).items()
    }


def decode(module: str, tensors: Mapping[str, RawTensor], spec: Spec) -> QTensor:
    """The rounded matrix whose parts ``tensors`` holds (other tensors in it are ignored). Inverse: encode.

    Raises:
        CompressorError: a part is missing, has another dtype or shape than spec demands, or holds
            values no such matrix has.
    """
    out_features, in_features = read_shape(module, tensors, spec)
    parts = check_parts(
        module, {n: (t.dtype, t.shape) for n, t in tensors.items()}, spec, (out_features, in_features)
    )
    data = {part: tensors[f"{module}.{part}"].data for part in parts}
    rows, groups = spec.scales_shape(out_features, in_features)
    zeros = None
    if ZERO in parts and spec.strategy == "tensor":
        zeros = data[ZERO].view(np.int8).reshape(1, 1).copy()
    elif ZERO in parts:
        words = data[ZERO].view("<u4").reshape(parts[ZERO][1])
        zeros = np.ascontiguousarray(_unpack(words.T, spec.bits, out_features).T)
    scales = decode_float(data[SCALE], spec.scale_dtype).reshape(rows, groups)
    try:
        return QTensor(_codes(data, parts, spec, in_features), scales, zeros, spec)
    except ValueError as error:
        raise CompressorError(
            f"{module}: not a legal {spec.label()} matrix", got=str(error), hint=_DAMAGED
        ) from error


def _codes(
    data: Mapping[str, NDArray[np.uint8]],
    parts: Mapping[str, tuple[str, tuple[int, ...]]],
    spec: Spec,
    in_features: int,
) -> NDArray[Any]:
    """Codes [out, in]: int8, or uint8 of a float format."""
    part = codes_part(spec)
    stored, shape = data[part], parts[part][1]
    if part == PACKED:
        return _unpack(stored.view("<u4").reshape(shape), spec.bits, in_features)
    return stored.view(np.uint8 if spec.kind == "float" else np.int8).reshape(shape).copy()


def read_shape(module: str, tensors: Mapping[str, RawTensor], spec: Spec) -> tuple[int, int]:
    """(out_features, in_features) as ``weight_shape`` records them, or as ``weight`` has them.

    Raises:
        CompressorError: the record is missing or is no shape.
    """
    if codes_part(spec) == PLAIN:
        found = tensors.get(f"{module}.{PLAIN}")
        if found is None or len(found.shape) != 2 or min(found.shape) < 1:
            got = None if found is None else list(found.shape)
            raise CompressorError(f"{module}.{PLAIN}: no matrix", got=got, expected="[out, in]", hint=_DAMAGED)
        return found.shape[0], found.shape[1]
    name = f"{module}.{SHAPE}"
    raw = tensors.get(name)
    if raw is None:
        raise CompressorError(f"{name}: missing", expected=f"an I64 [2] beside {module}.{PACKED}", hint=_DAMAGED)
    if raw.dtype not in ("I64", "I32") or raw.shape != (2,):
        raise CompressorError(f"{name}: not a shape", got=f"{raw.dtype} {list(raw.shape)}", expected="I64 [2]")
    out_features, in_features = (int(n) for n in raw.data.view("<i8" if raw.dtype == "I64" else "<i4"))
    if out_features < 1 or in_features < 1:
        raise CompressorError(
            f"{name}: not a shape", got=f"[{out_features}, {in_features}]", expected="two positive sizes"
        )
    return out_features, in_features


def check_parts(
    module: str,
    found: Mapping[str, tuple[str, tuple[int, ...]]],
    spec: Spec,
    shape: tuple[int, int],
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Compare the (dtype, shape) of a module's parts with what spec demands; returns the layout.

    Raises:
        CompressorError: naming the first part that is missing or differs.
    """
    try:
        expected = layout(spec, *shape)
    except ValueError as error:
        raise CompressorError(f"{module}: {error}", hint=_DAMAGED) from error
    for part, (dtype, part_shape) in expected.items():
        name = f"{module}.{part}"
        wanted = f"{dtype} {list(part_shape)} for {spec.label()} [{shape[0]}, {shape[1]}]"
        if name not in found:
            raise CompressorError(f"{name}: missing", expected=wanted, hint=_DAMAGED)
        if part != SHAPE and found[name] != (dtype, part_shape):
            got_dtype, got_shape = found[name]
            raise CompressorError(
                f"{name}: does not fit its format",
                got=f"{got_dtype} {list(got_shape)}",
                expected=wanted,
                hint=_DAMAGED,
            )
    return expected


_DAMAGED = "the files are damaged or config.json describes another model; write or download them again"


def _bytes(codes: NDArray[Any]) -> NDArray[np.uint8]:
    """One-byte codes [out, in] as they lie in a file."""
    return np.ascontiguousarray(codes).view(np.uint8).reshape(-1)


def _pack(codes: NDArray[np.int8], bits: int, transpose: bool = False) -> NDArray[np.uint8]:
    """Signed codes int8 [rows, n] -> bytes of their words [rows, words], or of [words, rows]."""
    from compressor.kernels.bitpack import pack_rows

    words = pack_rows(np.ascontiguousarray(codes).view(np.uint8) + np.uint8(1 << (bits - 1)), bits)
    return np.ascontiguousarray(words.T if transpose else words, dtype="<u4").view(np.uint8).reshape(-1)


def _unpack(words: NDArray[np.uint32], bits: int, n: int) -> NDArray[np.int8]:
    """Words uint32 [rows, ceil(n*bits/32)] -> signed codes int8 [rows, n]."""
    from compressor.kernels.bitpack import unpack_rows

    unsigned = unpack_rows(np.require(words, np.uint32, ["C", "A"]), bits, n)
    return (unsigned - np.uint8(1 << (bits - 1))).view(np.int8)
