"""A model directory in Hugging Face layout: config.json and safetensors, whole or in shards."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.checkpoint.base import Checkpoint, TensorInfo
from compressor.checkpoint.files import bad_file, check_finite, mapped, parse_json, sample_hash
from compressor.checkpoint.integrity import HeaderTensor, scan_safetensors
from compressor.core.tensors import RawTensor
from compressor.errors import CompressorError, Problems
from compressor.kernels.floats import FLOAT_BYTES, decode_float

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MANIFEST, REPORT = "compress_manifest.json", "report.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".ot", ".onnx")
_NOT_CARRIED = (CONFIG, MANIFEST, REPORT)
_SKIPPED_FOLDERS = (".git", ".cache", "__pycache__")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model directory.

    Raises:
        CompressorError: there is none, or it is no JSON object.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise CompressorError(
            f"{folder}: not a model directory",
            got="no config.json",
            expected="config.json, model.safetensors (or shards with an index) and tokenizer files",
            hint="pass a Hugging Face model directory, a .gguf file, or demo",
        )
    return parse_json(path.read_bytes(), path, CONFIG)


class SafetensorsCheckpoint(Checkpoint):
    """A directory's weights, memory-mapped; headers are checked here, values when read."""

    def __init__(self, folder: Path, label: str | None = None) -> None:
        self.label, self.path, self.notes = label or str(folder), folder, []
        self.config = read_config(folder)
        self._headers = _scan_folder(folder)
        self.tensors = {
            name: TensorInfo(name, tensor.dtype, tensor.shape, tensor.nbytes, file)
            for name, (file, tensor) in self._headers.items()
        }

    def raw(self, name: str) -> RawTensor:
        """The stored bytes, mapped read-only."""
        file, tensor = self._headers[name]
        return RawTensor(tensor.dtype, tensor.shape, mapped(self.path / file, tensor.start, tensor.nbytes))

    def read(self, name: str) -> NDArray[np.float32]:
        """Float32 in its shape; refuses NaN, infinity and integer tensors."""
        file, tensor = self._headers[name]
        if tensor.dtype not in FLOAT_BYTES:
            floats = ", ".join(FLOAT_BYTES)
            raise CompressorError(f"{name}: not a float tensor", got=tensor.dtype, expected=floats)
        values = decode_float(self.raw(name).data, tensor.dtype).reshape(tensor.shape)
        check_finite(values, name, self.path / file)
        return values

    def side_files(self) -> dict[str, Path | bytes]:
        """Every file beside weights, indexes and config.json, links resolved."""
        found: dict[str, Path | bytes] = {}
        for root, folders, files in os.walk(self.path):
            folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
            for name in sorted(files):
                path = Path(root) / name
                relative = path.relative_to(self.path).as_posix()
                if path.is_file() and _is_side_file(relative):
                    found[relative] = path.resolve()
        return found

    def fingerprint(self) -> str:
        """sha256 over config, names, dtypes, shapes and samples of every tensor."""
        return sample_hash(
            self.config,
            (
                (f"{name} {tensor.dtype} {tensor.shape}", self.path / file, tensor.start, tensor.nbytes)
                for name, (file, tensor) in sorted(self._headers.items())
            ),
        )

    @cached_property
    def pretokenizer(self) -> str | None:
        """llama.cpp's pre-tokenizer name, when an earlier run of ours recorded it."""
        path = self.path / MANIFEST
        if not path.is_file():
            return None
        name = parse_json(path.read_bytes(), path, MANIFEST).get("pretokenizer")
        return name if isinstance(name, str) else None


def _is_side_file(relative: str) -> bool:
    lower = relative.lower()
    is_weight = lower.endswith((*WEIGHT_SUFFIXES, ".index.json"))
    return not is_weight and relative not in _NOT_CARRIED


def _scan_folder(folder: Path) -> dict[str, tuple[str, HeaderTensor]]:
    """(file, header entry) of every tensor by name, from one file or from the index's shards."""
    if (folder / SINGLE).is_file():
        return {name: (SINGLE, tensor) for name, tensor in scan_safetensors(folder / SINGLE).items()}
    if not (folder / INDEX).is_file():
        raise _no_weights(folder)
    weight_map = _read_index(folder)
    found: dict[str, tuple[str, HeaderTensor]] = {}
    problems = []
    for file in sorted(set(weight_map.values())):
        for name, tensor in scan_safetensors(folder / file).items():
            if name in found:
                problems.append(CompressorError(f"{name} is in two shards", got=f"{found[name][0]}, {file}"))
            found[name] = (file, tensor)
    for name, file in weight_map.items():
        if name not in found or found[name][0] != file:
            got = f"found in {found[name][0]}" if name in found else None
            problems.append(CompressorError(f"{name} is not in {file}", got=got, expected=f"as {INDEX} says"))
    if problems:
        raise Problems(f"{folder}: shards and {INDEX} disagree", problems[:20])
    return found


def _read_index(folder: Path) -> dict[str, str]:
    """weight_map of the index: every file inside the directory, and there."""
    path = folder / INDEX
    weight_map = parse_json(path.read_bytes(), path, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise bad_file(path, "no weight_map", str(weight_map)[:80], "tensor name -> file")
    problems = []
    for file in sorted({str(value) for value in weight_map.values()}):
        parts = PurePosixPath(file)
        if parts.is_absolute() or ".." in parts.parts or "\\" in file or parts.suffix != ".safetensors":
            problems.append(
                CompressorError(f"shard path {file[:200]!r} is not allowed", expected="a name in the directory")
            )
        elif not (folder / file).is_file():
            problems.append(CompressorError(f"shard {file} is missing"))
    if problems:
        hint = "download or copy the missing files again"
        raise Problems(f"{path}: unusable shards", problems[:20], hint=hint)
    return {name: str(file) for name, file in weight_map.items()}


def _no_weights(folder: Path) -> CompressorError:
    """Why a directory with config.json has nothing to read."""
    weights = sorted(p.name for p in folder.iterdir() if p.name.endswith(WEIGHT_SUFFIXES))
    shown = ", ".join(weights[:3]) + (" ..." if len(weights) > 3 else "")
    if any(name.endswith((".bin", ".pt", ".pth")) for name in weights):
        hint = "save it as safetensors: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
    elif any(name.endswith(".gguf") for name in weights):
        hint = "pass the .gguf file itself"
    else:
        hint = "the download may be incomplete; `compress plan` works from config.json alone"
    return CompressorError(
        f"{folder}: no safetensors weights",
        got=shown or "no weight files",
        expected=f"{SINGLE}, or {INDEX} and its shards",
        hint=hint,
    )
