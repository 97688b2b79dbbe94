"""Writes safetensors files tensor by tensor, atomically and with the same bytes every time."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from compressor.checkpoint.files import mapped
from compressor.checkpoint.integrity import DTYPE_BYTES, scan_safetensors
from compressor.core.tensors import RawTensor
from compressor.errors import CompressorError

PIECE = 1 << 24
"""Bytes handed to one write."""

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RANK = {dtype: rank for rank, dtype in enumerate(DTYPE_BYTES)}
_NUMPY = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U16": "<u2", "U8": "u1"}
_NAMES = {np.dtype(numpy): name for name, numpy in _NUMPY.items()}


@contextmanager
def atomic_write(path: Path, needed: int) -> Iterator[IO[bytes]]:
    """A file that appears under its name only when all of it is on disk.

    Args:
        path: Its final name.
        needed: Bytes it will take, for the message when the disk is full.

    Raises:
        CompressorError: no space left, quota or file size limit reached; the half-written file is gone.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise disk_full(path, needed, error) from error
        raise


def disk_full(path: Path, needed: int, error: OSError) -> CompressorError:
    """The error for a write that did not fit."""
    free = shutil.disk_usage(path.parent).free
    return CompressorError(
        f"{path}: cannot be written, the disk is full",
        got=f"{os.strerror(error.errno or 0)}; {free:,} bytes free, after removing the half-written file",
        expected=f"{needed:,} bytes",
        hint="free some space (or raise the quota) and run the same command again: "
        "finished blocks are kept beside it and the run goes on from there",
    )


def sync_folder(folder: Path) -> None:
    """Make renames inside a directory survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_safetensors(path: Path, tensors: Mapping[str, RawTensor]) -> None:
    """Write a safetensors file, byte for byte what the safetensors library would write.

    Tensors lie by dtype rank, then name; nothing is copied, so memory-mapped data stays on disk.

    Raises:
        CompressorError: the disk is full.
    """
    order = sorted(tensors, key=lambda name: (-_RANK[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in order:
        tensor, end = tensors[name], position + tensors[name].nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path, 8 + len(text) + position) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            data = np.ascontiguousarray(tensors[name].data)
            for start in range(0, data.nbytes, PIECE):
                file.write(data[start : start + PIECE].data)


def write_arrays(path: Path, arrays: Mapping[str, NDArray[np.generic]]) -> None:
    """Write numpy arrays as a safetensors file."""
    raw = {}
    for name, array in arrays.items():
        flat = np.ascontiguousarray(array).reshape(-1)
        raw[name] = RawTensor(_NAMES[array.dtype], array.shape, flat.view(np.uint8))
    write_safetensors(path, raw)


def read_arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    """The arrays of ``write_arrays``, fresh and writable."""
    return {
        name: mapped(path, tensor.start, tensor.nbytes).view(_NUMPY[tensor.dtype]).reshape(tensor.shape).copy()
        for name, tensor in scan_safetensors(path).items()
    }
