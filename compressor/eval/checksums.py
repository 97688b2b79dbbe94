"""Files of an artifact against the checksums in its manifest."""

from __future__ import annotations

import json
from pathlib import Path

from compressor.checkpoint.files import file_sha256
from compressor.errors import CompressorError

MANIFEST = "compress_manifest.json"


def check_files(path: Path) -> list[str]:
    """Problems of an artifact directory's files, one sentence each; empty when whole or without manifest.

    Raises:
        CompressorError: the manifest itself cannot be read.
    """
    manifest_path = path / MANIFEST
    if not path.is_dir() or not manifest_path.is_file():
        return []
    try:
        recorded = json.loads(manifest_path.read_bytes())["sha256"]
        items = [(str(name), str(digest)) for name, digest in recorded.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CompressorError(f"{manifest_path}: not a manifest of this tool", got=repr(error)) from error
    problems = []
    for name, digest in items:
        file = path / name
        if ".." in Path(name).parts or Path(name).is_absolute():
            problems.append(f"{name}: the manifest names a file outside the directory")
        elif not file.is_file():
            problems.append(f"{name}: missing")
        elif file_sha256(file) != digest:
            problems.append(f"{name}: its content changed since it was written")
    return problems
