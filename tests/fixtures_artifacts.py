"""Finished runs on the tiny model for tests that read artifacts, and ways to damage a file."""

import json
import shutil
import struct
from pathlib import Path

from compressor.pipeline import Job, export_artifact, quantize

RECIPE = """
rules:
  - match: {modules: "*.down_proj"}
    format: {preset: int8}
    passes: [ptq_symmetric]
  - match: {role: [attention, ffn]}
    format: {preset: int4, group_size: 32}
    passes: [ptq_symmetric]
"""


def build_artifact(model: Path, out: Path) -> Path:
    """The tiny model with int8 down projections, int4 everywhere else, and a GGUF of it beside: OUT.gguf."""
    recipe = out.with_suffix(".yaml")
    recipe.write_text(RECIPE)
    quantize(Job(str(model), str(recipe), out, samples=2, sequence_length=32))
    export_artifact(str(out), "gguf", out.with_suffix(".gguf"), pretokenizer="gpt-2")
    return out


def copy_without_manifest(artifact: Path, target: Path) -> Path:
    """A copy that no checksum guards: damage must be found by reading."""
    shutil.copytree(artifact, target)
    (target / "compress_manifest.json").unlink()
    return target


def file_of(folder: Path, name: str) -> Path:
    """The safetensors file that holds a tensor."""
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"] if index.exists() else {name: "model.safetensors"}
    return folder / files[name]


def overwrite(folder: Path, name: str, data: bytes, offset: int = 0) -> None:
    """Replace bytes of one tensor in its file."""
    path = file_of(folder, name)
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        start = json.loads(file.read(length))[name]["data_offsets"][0]
        file.seek(8 + length + start + offset)
        file.write(data)
