"""Bounded header scans: nothing else touches a weight file before its header is proved sane.

Both formats are parsed with Python integers (no overflow), every length is compared with the file
before anything is allocated, and every failure names the file, what was found and what was expected.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from compressor.checkpoint.files import bad_file, file_size, parse_json
from compressor.checkpoint.gguf_header import GgufHeader, GgufTensor, scan_gguf

__all__ = ["DTYPE_BYTES", "GgufHeader", "GgufTensor", "HeaderTensor", "scan_gguf", "scan_safetensors"]

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "C64": 8, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
"""safetensors dtypes in the order the format ranks them, with bytes per element."""

MAX_JSON_HEADER = 100_000_000
MAX_RANK = 16


@dataclass(frozen=True)
class HeaderTensor:
    """One tensor of a safetensors header; ``start`` and ``end`` are offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes between its offsets."""
        return self.end - self.start


def scan_safetensors(path: Path) -> dict[str, HeaderTensor]:
    """Every tensor of a safetensors file by name, in file order of the header.

    Raises:
        CompressorError: truncated, too long, or a header that contradicts itself or the file.
    """
    size = file_size(path)
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise bad_file(path, "truncated safetensors file", f"{size} bytes", "at least 8 bytes")
        length = struct.unpack("<Q", prefix)[0]
        if length > MAX_JSON_HEADER:
            raise bad_file(path, "safetensors header too long", length, f"at most {MAX_JSON_HEADER} bytes")
        if 8 + length > size:
            raise bad_file(path, "truncated inside the header", f"{size} bytes", f"over {8 + length} bytes")
        header = parse_json(file.read(length), path, "safetensors header")
    _check_metadata(path, header.pop("__metadata__", {}))
    tensors = {name: _header_tensor(path, name, entry, 8 + length) for name, entry in header.items()}
    _check_spans(path, tensors.values(), 8 + length, size)
    return tensors


def _check_metadata(path: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise bad_file(path, "__metadata__ must map strings to strings", str(metadata)[:80])


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _header_tensor(path: Path, name: str, entry: object, base: int) -> HeaderTensor:
    """Check one header entry on its own: keys, dtype, shape, offsets, span."""
    where = f"tensor {name[:200]!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise bad_file(path, f"{where}: malformed entry", str(entry)[:120], "dtype, shape, data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise bad_file(path, f"{where}: unknown dtype", str(dtype)[:80], ", ".join(DTYPE_BYTES))
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_size, shape)):
        raise bad_file(path, f"{where}: bad shape", str(shape)[:120], f"at most {MAX_RANK} sizes >= 0")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise bad_file(path, f"{where}: bad data_offsets", str(offsets)[:120], "[begin, end]")
    nbytes = DTYPE_BYTES[dtype]
    for dim in shape:
        nbytes *= dim
    begin, end = offsets
    if end - begin != nbytes:
        raise bad_file(
            path,
            f"{where}: data_offsets do not fit its shape",
            f"{end - begin} bytes",
            f"{nbytes} bytes for {dtype} {shape}",
        )
    return HeaderTensor(name, dtype, tuple(shape), base + begin, base + end)


def _check_spans(path: Path, tensors: Iterable[HeaderTensor], base: int, size: int) -> None:
    """The spans must tile the file from the header's end to the last byte."""
    position = base
    for tensor in sorted(tensors, key=lambda t: (t.start, t.end)):
        if tensor.start != position:
            what = "overlaps another tensor" if tensor.start < position else "leaves a hole before it"
            raise bad_file(path, f"tensor {tensor.name[:200]!r} {what}", tensor.start - base, position - base)
        position = tensor.end
    if position > size:
        raise bad_file(path, "truncated safetensors file", f"{size} bytes", f"{position} bytes")
    if position < size:
        raise bad_file(path, "bytes after the last tensor", f"{size} bytes", f"{position} bytes")
