"""Files and the bytes in them: strict JSON, mapped spans, samples to hash, values to distrust."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.errors import CompressorError

SAMPLE_STEP, SAMPLE = 1 << 20, 4096
_DAMAGED = "the file is damaged or not what it claims to be: download or convert it again"


def bad_file(path: Path, what: str, got: object = None, expected: object = None) -> CompressorError:
    """The error every scan raises: file, what is wrong, got, expected."""
    return CompressorError(f"{path}: {what}", got=got, expected=expected, hint=_DAMAGED)


def parse_json(text: bytes, path: Path, what: str) -> dict[str, Any]:
    """A JSON object without duplicate keys.

    Args:
        text: UTF-8 JSON.
        path: For the message.
        what: What the text is, for the message (``header``, ``config.json``).

    Raises:
        CompressorError: not JSON, not an object, nested too deeply, or a key occurs twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise bad_file(path, f"{what} has the key {twice[:80]!r} twice")
        return found

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise bad_file(path, f"{what} is not valid JSON", got=str(error)[:200]) from error
    if not isinstance(value, dict):
        raise bad_file(path, f"{what} is not a JSON object", got=type(value).__name__, expected="{...}")
    return value


def file_size(path: Path) -> int:
    """Size of a regular file.

    Raises:
        CompressorError: there is none, or it cannot be read.
    """
    if not path.is_file():
        raise CompressorError(f"{path}: no such file")
    return path.stat().st_size


def mapped(path: Path, start: int, nbytes: int) -> NDArray[np.uint8]:
    """uint8 [nbytes] of a file, memory-mapped read-only.

    Each call maps its own span, so its pages leave memory with the array.
    """
    if nbytes == 0:
        return np.zeros(0, np.uint8)
    return np.asarray(np.memmap(path, np.uint8, "r", offset=start, shape=(nbytes,)))


def check_finite(values: NDArray[np.float32], name: str, path: Path) -> None:
    """Refuse NaN and infinity.

    Args:
        values: float32 [...].
        name: The tensor, for the message.
        path: Its file, for the message.

    Raises:
        CompressorError: naming the tensor, how many values are bad and where the first is.
    """
    if not values.size or (np.isfinite(values.min()) and np.isfinite(values.max())):
        return
    bad = ~np.isfinite(values)
    first = np.unravel_index(int(np.argmax(bad)), values.shape)
    labels = ("row", "column") if values.ndim == 2 else tuple("index" for _ in first)
    where = ", ".join(f"{label} {index}" for label, index in zip(labels, first, strict=True))
    count = int(bad.sum())
    verb = "value is" if count == 1 else "values are"
    raise CompressorError(
        f"{name}: {count} {verb} NaN or infinite (first at {where})",
        got=f"in {path}",
        expected="finite weights",
        hint="the checkpoint is damaged or its training diverged: use another copy or an earlier step",
    )


def sample_hash(config: Mapping[str, Any], tensors: Iterable[tuple[str, Path, int, int]]) -> str:
    """sha256 (hex) over a config and content samples of tensors.

    Args:
        config: JSON-ready.
        tensors: (label with name, dtype and shape; file; first byte; bytes) each. Up to 1 MiB is
            hashed whole, more by the first 4 KiB of every MiB.
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for label, path, start, nbytes in tensors:
        digest.update(label.encode() + b"\0")
        with path.open("rb", buffering=0) as file:
            step = nbytes if nbytes <= SAMPLE_STEP else SAMPLE_STEP
            width = nbytes if nbytes <= SAMPLE_STEP else SAMPLE
            for offset in range(0, nbytes, max(1, step)):
                file.seek(start + offset)
                digest.update(file.read(min(width, nbytes - offset)))
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Sha256 (hex) of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
