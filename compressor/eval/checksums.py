"""Files of a model: whole by their own headers, and by the checksums in an artifact's manifest."""

from __future__ import annotations

from pathlib import Path

from compressor.checkpoint.files import file_sha256, parse_json
from compressor.checkpoint.integrity import scan_gguf, scan_safetensors
from compressor.checkpoint.safetensors import MANIFEST
from compressor.errors import CompressorError


def check_files(path: Path) -> list[str]:
    """Problems of a model's files, one sentence each; empty when whole (or there is no such path)."""
    problems = check_manifest(path)
    return problems or [problem for file in _weight_files(path) if (problem := _scan(file))]


def _weight_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    return [path] if path.is_file() else []


def _scan(file: Path) -> str | None:
    """What a weight file's header contradicts, if anything."""
    try:
        if file.suffix == ".safetensors":
            scan_safetensors(file)
        elif file.suffix == ".gguf":
            scan_gguf(file)
    except CompressorError as error:
        return str(error).replace("\n ", ";")
    return None


def check_manifest(path: Path) -> list[str]:
    """Files of an artifact directory that are not what its manifest recorded; empty without a manifest."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        return []
    try:
        recorded = parse_json(manifest.read_bytes(), manifest, MANIFEST)["sha256"]
        items = [(str(name), str(digest)) for name, digest in recorded.items()]
    except CompressorError as error:
        return [str(error).replace("\n ", ";")]
    except (KeyError, AttributeError):
        return [f"{MANIFEST}: holds no checksums"]
    problems = [sentence for name, digest in items if (sentence := _difference(path, name, digest))]
    extra = {file.name for file in path.glob("*.safetensors")} - dict(items).keys()
    return problems + [f"{name}: not in the manifest" for name in sorted(extra)]


def _difference(path: Path, name: str, digest: str) -> str | None:
    file = path / name
    if ".." in Path(name).parts or Path(name).is_absolute():
        return f"{name}: the manifest names a file outside the directory"
    if not file.is_file():
        return f"{name}: missing"
    return None if file_sha256(file) == digest else f"{name}: its content changed since it was written"
