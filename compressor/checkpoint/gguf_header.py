"""Bounded scan of a GGUF file: metadata and tensor table, nothing trusted, nothing executed.

Format: ``GGUF``, u32 version, u64 tensors, u64 keys, key-values, tensor infos, padding, data; all
little endian. Key-value = string key, u32 type, value; string = u64 length, bytes; array = u32 element
type, u64 count, items. Tensor info = name, u32 rank, u64 sizes (fastest first), u32 type, u64 offset.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from compressor.checkpoint.files import bad_file, file_size

MAX_KEYS = 100_000
MAX_TENSORS = 1_000_000
MAX_STRING = 64 << 20
MAX_ARRAY = 10_000_000
MAX_ALIGNMENT = 1 << 20
MAX_NAME = 63
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", BOOL: "<u1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""GGUF value types of fixed size as numpy dtypes."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: shape is row-major (sizes reversed), ``start`` an offset in the file."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """A checked header: ``fields`` holds scalars, strings, lists of strings and numpy arrays."""

    version: int
    alignment: int
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]


@cache
def tensor_types() -> dict[int, tuple[str, int, int]]:
    """Ggml type number -> (name, elements per block, bytes per block)."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): (kind.name, block, size) for kind, (block, size) in GGML_QUANT_SIZES.items()}


def scan_gguf(path: Path) -> GgufHeader:
    """Parse and check the header of a GGUF file.

    Raises:
        CompressorError: not GGUF, truncated, over a limit, or contradicting itself or the file.
    """
    size = file_size(path)
    if size < 24:
        raise bad_file(path, "not a GGUF file, or truncated", f"{size} bytes", "at least 24 bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Scan(path, data, size).header()


class _Scan:
    """A cursor over the mapped file; every step checks the file's end first."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.at = path, data, size, 0

    def take(self, nbytes: int, what: str) -> bytes:
        if nbytes > self.size - self.at:
            left = f"{self.size - self.at} bytes left"
            raise bad_file(self.path, f"truncated inside {what}", left, f"{nbytes} bytes")
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def u32(self, what: str) -> int:
        return int(struct.unpack("<I", self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack("<Q", self.take(8, what))[0])

    def count(self, what: str, limit: int) -> int:
        found = self.u64(what)
        if found > limit:
            raise bad_file(self.path, f"{what} over the limit", found, f"at most {limit}")
        return found

    def bytes_string(self, what: str) -> bytes:
        return self.take(self.count(f"length of {what}", MAX_STRING), what)

    def name(self, what: str) -> str:
        text = self.bytes_string(what)
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise bad_file(self.path, f"{what} is not UTF-8", text[:80]) from error

    def header(self) -> GgufHeader:
        if (magic := self.take(4, "magic")) != b"GGUF":
            raise bad_file(self.path, "not a GGUF file", magic, b"GGUF")
        version = self.u32("version")
        if version in (2 << 24, 3 << 24):
            raise bad_file(self.path, "big-endian GGUF is not supported", "big endian", "little endian")
        if version not in (2, 3):
            raise bad_file(self.path, "unsupported GGUF version", version, "2 or 3")
        tensors = self.count("number of tensors", MAX_TENSORS)
        fields = self.fields(self.count("number of keys", MAX_KEYS))
        alignment = self.alignment(fields)
        infos = [self.tensor_info() for _ in range(tensors)]
        return GgufHeader(version, alignment, fields, self.place(infos, alignment))

    def fields(self, keys: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(keys):
            key = self.name("a key")
            if not key or key in found:
                problem = "occurs twice" if key else "is empty"
                raise bad_file(self.path, f"key {key[:80]!r} {problem}", expected="unique, non-empty keys")
            found[key] = self.value(self.u32(f"type of {key}"), key)
        return found

    def value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self.bytes_string(key).decode("utf-8", errors="replace")
        if kind == ARRAY:
            return self.array(key)
        value = np.frombuffer(self.fixed(kind, 1, key), SCALARS[kind])[0].item()
        if kind == BOOL and value not in (0, 1):
            raise bad_file(self.path, f"key {key}: not a boolean", value, "0 or 1")
        return bool(value) if kind == BOOL else value

    def fixed(self, kind: int, count: int, key: str) -> bytes:
        if kind not in SCALARS:
            raise bad_file(self.path, f"key {key[:80]!r}: unknown value type", kind, "0 to 12")
        return self.take(count * np.dtype(SCALARS[kind]).itemsize, key)

    def array(self, key: str) -> Any:
        kind = self.u32(f"element type of {key}")
        if kind == ARRAY:
            raise bad_file(self.path, f"key {key[:80]!r}: array of arrays", expected="a flat array")
        count = self.count(f"length of array {key[:80]!r}", MAX_ARRAY)
        if kind == STRING:
            return [self.bytes_string(key).decode("utf-8", errors="replace") for _ in range(count)]
        return np.frombuffer(self.fixed(kind, count, key), SCALARS[kind])

    def alignment(self, fields: dict[str, Any]) -> int:
        found = fields.get("general.alignment", 32)
        is_number = isinstance(found, int) and not isinstance(found, bool)
        if not is_number or not 1 <= found <= MAX_ALIGNMENT or found & (found - 1):
            raise bad_file(
                self.path, "bad general.alignment", str(found)[:80], f"a power of two <= {MAX_ALIGNMENT}"
            )
        return int(found)

    def tensor_info(self) -> tuple[GgufTensor, int]:
        """One entry of the table, checked on its own; and its offset inside the data section."""
        name = self.name("a tensor name")
        if not 0 < len(name.encode()) <= MAX_NAME:
            raise bad_file(
                self.path, f"tensor name {name[:80]!r}", f"{len(name.encode())} bytes", f"1 to {MAX_NAME}"
            )
        rank = self.u32(f"rank of {name}")
        if not 1 <= rank <= 4:
            raise bad_file(self.path, f"tensor {name}: bad number of dimensions", rank, "1 to 4")
        sizes = [self.u64(f"shape of {name}") for _ in range(rank)]
        kind = self.u32(f"type of {name}")
        if kind not in tensor_types():
            raise bad_file(self.path, f"tensor {name}: unknown ggml type", kind, sorted(tensor_types()))
        type_name, block, block_bytes = tensor_types()[kind]
        if min(sizes) == 0 or sizes[0] % block:
            expected = f"sizes > 0, the first a multiple of {block} for {type_name}"
            raise bad_file(self.path, f"tensor {name}: bad shape", sizes, expected)
        nbytes = sizes[0] // block * block_bytes
        for dim in sizes[1:]:
            nbytes *= dim
        tensor = GgufTensor(name, type_name, tuple(reversed(sizes)), 0, nbytes)
        return tensor, self.u64(f"offset of {name}")

    def place(self, infos: list[tuple[GgufTensor, int]], alignment: int) -> dict[str, GgufTensor]:
        """Tensors with their place in the file: contiguous in listed order, inside the file."""
        base, position = _pad(self.at, alignment), 0
        placed: dict[str, GgufTensor] = {}
        for tensor, offset in infos:
            if tensor.name in placed:
                raise bad_file(self.path, f"tensor {tensor.name} is listed twice")
            if offset != position:
                raise bad_file(self.path, f"tensor {tensor.name}: data not contiguous", offset, position)
            end = base + offset + tensor.nbytes
            if end > self.size:
                what = f"truncated: tensor {tensor.name} ends after the file"
                raise bad_file(self.path, what, f"{self.size} bytes", f"at least {end} bytes")
            placed[tensor.name] = GgufTensor(
                tensor.name, tensor.type_name, tensor.shape, base + offset, tensor.nbytes
            )
            position = _pad(offset + tensor.nbytes, alignment)
        return placed


def _pad(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
