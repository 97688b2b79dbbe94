"""compressed-tensors directories: the artifact's own format, read and written.

One matrix's bytes: compressed_tensors_layout. The section in config.json: compressed_tensors_config.
What the format cannot hold: compressed_tensors_checks.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.checkpoint.base import Checkpoint, TensorInfo
from compressor.checkpoint.safetensors import CONFIG, INDEX, SINGLE, SafetensorsCheckpoint
from compressor.checkpoint.shard import write_safetensors
from compressor.checkpoint.writer import check_free_space
from compressor.core.report import Progress, no_progress
from compressor.core.spec import SCALE_DTYPES, Spec
from compressor.core.tensors import QTensor, RawTensor
from compressor.errors import CompressorError, GateFailed, Problems
from compressor.export.compressed_tensors_checks import check_plan, engine_warnings
from compressor.export.compressed_tensors_config import quantization_config, specs_from_config
from compressor.export.compressed_tensors_layout import (
    PACKED,
    PARTS,
    PLAIN,
    PLAIN_DTYPES,
    SCALE,
    SHAPE,
    check_parts,
    codes_part,
    decode,
    encode,
    encoded_nbytes,
    layout,
    read_shape,
)
from compressor.kernels.floats import FLOAT_BYTES, encode_float

__all__ = [
    "ArtifactCheckpoint",
    "check_plan",
    "decode",
    "encode",
    "encoded_nbytes",
    "engine_warnings",
    "export",
    "quantization_config",
    "specs_from_config",
]


class ArtifactCheckpoint(Checkpoint):
    """A compressed-tensors directory as a float model that also tells its codes.

    Presents ``<module>.weight`` in place of its stored parts; every other tensor is the source's own.

    Attributes:
        source: The checkpoint as stored.
        specs: Format by module, of every quantized module.
        quantization_config: The section taken out of config.json.

    Raises:
        CompressorError: the config is not readable, or files and config do not fit together (all
            that is wrong at once, as Problems).
    """

    def __init__(self, source: Checkpoint) -> None:
        self.source, self.label, self.path = source, source.label, source.path
        self.config = {k: v for k, v in source.config.items() if k != "quantization_config"}
        self.quantization_config: dict[str, Any] = source.config["quantization_config"]
        self.notes = [*source.notes, *_config_notes(self.quantization_config)]
        self.specs = _stored_specs(source, self.quantization_config)
        self.tensors = dict(self._present(_checked_shapes(source, self.specs)))

    @property
    def pretokenizer(self) -> str | None:
        """GGUF's name of the tokenizer's splitting, where the source recorded it."""
        return getattr(self.source, "pretokenizer", None)

    def _present(self, shapes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, TensorInfo]]:
        for name, info in self.source.tensors.items():
            module, _, part = name.rpartition(".")
            if module not in self.specs or part not in (*PARTS, PLAIN):
                yield name, info
            elif part == codes_part(self.specs[module]):
                spec, shape, weight = self.specs[module], shapes[module], f"{module}.weight"
                nbytes = shape[0] * shape[1] * FLOAT_BYTES[spec.scale_dtype]
                yield weight, TensorInfo(weight, spec.scale_dtype, shape, nbytes, info.file, spec.label())

    def module_of(self, name: str) -> str | None:
        """The quantized module whose weight ``name`` is, or None."""
        module = name.removesuffix(".weight")
        return module if module != name and module in self.specs else None

    def qtensor(self, name: str) -> QTensor | None:
        """The codes behind a weight, or None for a tensor that is stored as it is.

        Raises:
            CompressorError: the stored parts are no legal matrix of their format.
        """
        module = self.module_of(name)
        if module is None:
            return None
        stored = {part: self.source.raw(part) for part in self.stored_names(name)}
        return decode(module, stored, self.specs[module])

    def activations(self, module: str) -> str | None:
        """How an engine quantizes a module's input as it runs (``int8``, ``fp8``), or None."""
        spec = self.specs.get(module)
        return spec.activations if spec else None

    def stored_names(self, name: str) -> list[str]:
        """The tensors in the files behind one presented tensor: itself, or the parts of its codes."""
        module = self.module_of(name)
        if module is None:
            return [name]
        return [f"{module}.{part}" for part in layout(self.specs[module], *self.tensors[name].shape)]

    def raw(self, name: str) -> RawTensor:
        """Stored bytes; a quantized weight is dequantized and rounded to the dtype of its scales."""
        info = self.tensors[name]
        if self.module_of(name) is None:
            return self.source.raw(name)
        return RawTensor(info.dtype, info.shape, encode_float(self.read(name), info.dtype))

    def read(self, name: str) -> NDArray[np.float32]:
        """Float32; a quantized weight is (code - zero) * scale, not rounded any further."""
        tensor = self.qtensor(name)
        if tensor is None:
            return self.source.read(name)
        with np.errstate(over="ignore"):
            weight = tensor.dequantize()
        if not np.isfinite(weight).all():
            raise CompressorError(f"{name}: codes times scales overflow float32", hint="the scales are damaged")
        return weight

    def side_files(self) -> dict[str, Path | bytes]:
        """The source's."""
        return self.source.side_files()

    def fingerprint(self) -> str:
        """The source's, over the tensors as stored."""
        return self.source.fingerprint()


def _config_notes(section: Mapping[str, Any]) -> list[str]:
    if section.get("kv_cache_scheme") is None:
        return []
    return ["config.json asks engines for a quantized KV cache; only weights are read from it"]


def _stored_specs(source: Checkpoint, section: Mapping[str, Any]) -> dict[str, Spec]:
    """Format of every module that has codes, with the scale dtype its file tells."""
    modules = list(_coded_modules(source))
    specs: dict[str, Spec] = {}
    problems: list[CompressorError] = []
    for module, spec in specs_from_config(section, modules, source.label).items():
        scale = source.tensors.get(f"{module}.{SCALE}")
        if spec is None:
            problems.append(CompressorError(f"{module}: has codes, but quantization_config names no format"))
        elif f"{module}.{codes_part(spec)}" not in source.tensors:
            got = f"no {codes_part(spec)}"
            problems.append(CompressorError(f"{module}: not stored as quantization_config says", got=got))
        elif f"{module}.weight_g_idx" in source.tensors:
            problems.append(CompressorError(f"{module}: reordered columns (weight_g_idx) are not read"))
        elif scale is None or scale.dtype not in SCALE_DTYPES:
            got, expected = scale.dtype if scale else "missing", ", ".join(SCALE_DTYPES)
            problems.append(CompressorError(f"{module}.{SCALE}: no scales", got=got, expected=expected))
        else:
            specs[module] = replace(spec, scale_dtype=scale.dtype)
    if not modules:
        problems.append(CompressorError("no tensor holds codes", hint="use the unquantized model"))
    _raise_all(source, problems)
    return specs


def _coded_modules(source: Checkpoint) -> Iterator[str]:
    """Modules with packed codes, or with a weight of one-byte codes."""
    for name, info in source.tensors.items():
        module, _, part = name.rpartition(".")
        if part == PACKED or (part == PLAIN and info.dtype in PLAIN_DTYPES.values()):
            yield module


def _checked_shapes(source: Checkpoint, specs: Mapping[str, Spec]) -> dict[str, tuple[int, int]]:
    """[out, in] of every quantized module, after comparing each part's header with its format."""
    shapes: dict[str, tuple[int, int]] = {}
    problems: list[CompressorError] = []
    for module, spec in specs.items():
        wanted = [f"{module}.{part}" for part in (*PARTS, codes_part(spec))]
        infos = {name: source.tensors[name] for name in wanted if name in source.tensors}
        records = {name: source.raw(name) for name in infos if name.endswith((f".{SHAPE}", f".{PLAIN}"))}
        try:
            shapes[module] = read_shape(module, records, spec)
            check_parts(module, {n: (i.dtype, i.shape) for n, i in infos.items()}, spec, shapes[module])
        except CompressorError as problem:
            problems.append(problem)
    _raise_all(source, problems)
    return shapes


def _raise_all(source: Checkpoint, problems: list[CompressorError]) -> None:
    if problems:
        raise Problems(f"{source.label}: weights and quantization_config do not fit together", problems)


def export(artifact: ArtifactCheckpoint, out: Path, progress: Progress = no_progress) -> dict[str, Any]:
    """Write a clean directory: weights, config and side files, nothing of a run; read it back as proof.

    The artifact is in this format already: its parts are copied from mapped files, none is rounded again.
    The directory grows as ``OUT.export.partial`` and takes its name when proved.

    An ``out`` that already holds exactly this export (proved the same way) is left as it is.

    Returns:
        Facts: ``tensors``, ``quantized``, ``shards``, ``bytes`` of all tensors.

    Raises:
        CompressorError: ``out`` exists or cannot be written.
        GateFailed: what was read back differs from what was to be written.
    """
    if out.exists() or out.is_symlink():
        return _already_exported(artifact, out, progress)
    needed = sum(info.nbytes for info in artifact.source.tensors.values())
    check_free_space(out, needed)
    partial = out.with_name(f"{out.name}.export.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        shards = _write_shards(artifact, partial, progress)
        _write_files(artifact, partial, shards)
        facts = _prove(artifact, partial, progress)
        partial.rename(out)
    except OSError as error:
        raise CompressorError(
            f"{out}: cannot be written",
            got=error.strerror or str(error),
            expected=f"a writable place with {needed:,} bytes free",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {**facts, "shards": len(shards)}


def _already_exported(artifact: ArtifactCheckpoint, out: Path, progress: Progress) -> dict[str, Any]:
    """Facts of an ``out`` that holds this very export.

    Raises:
        CompressorError: it holds anything else; it is left untouched.
    """
    try:
        facts = _prove(artifact, out, progress)
    except (CompressorError, KeyError) as error:
        raise CompressorError(
            f"{out}: already exists and is not this export",
            got=str(error).splitlines()[0],
            hint="choose another --out, or remove it first",
        ) from error
    return {**facts, "shards": len(list(out.glob("*.safetensors")))}


def _write_shards(artifact: ArtifactCheckpoint, folder: Path, progress: Progress) -> dict[str, list[str]]:
    """Write every shard under its name in the source; returns stored tensor names by shard."""
    shards: dict[str, list[str]] = defaultdict(list)
    for name, info in artifact.tensors.items():
        shards[info.file] += artifact.stored_names(name)
    for done, (file, names) in enumerate(sorted(shards.items()), start=1):
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(path, {name: artifact.source.raw(name) for name in names})
        progress("writing", done, len(shards))
    return dict(sorted(shards.items()))


def _write_files(artifact: ArtifactCheckpoint, folder: Path, shards: Mapping[str, list[str]]) -> None:
    """Side files, config.json, and last the index (none for a single model.safetensors)."""
    for name, content in artifact.side_files().items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            target.write_bytes(content)
        else:
            shutil.copyfile(content, target)
    config = {**artifact.config, "quantization_config": artifact.quantization_config}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    if list(shards) == [SINGLE]:
        return
    weight_map = {name: file for file, names in shards.items() for name in sorted(names)}
    total = sum(artifact.source.tensors[name].nbytes for name in weight_map)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _prove(artifact: ArtifactCheckpoint, folder: Path, progress: Progress) -> dict[str, Any]:
    """Open what was written and compare every code, scale, zero point and untouched byte."""
    written = ArtifactCheckpoint(SafetensorsCheckpoint(folder))
    if written.tensors.keys() != artifact.tensors.keys():
        differing = sorted(written.tensors.keys() ^ artifact.tensors.keys())
        raise GateFailed("the written directory holds other tensors", got=", ".join(differing[:5]))
    for done, name in enumerate(artifact.tensors, start=1):
        if not _same(artifact, written, name):
            raise GateFailed(f"{name}: read back differently from how it was written")
        progress("reading back", done, len(artifact.tensors))
    return {
        "tensors": len(artifact.tensors),
        "quantized": len(artifact.specs),
        "bytes": sum(info.nbytes for info in written.source.tensors.values()),
    }


def _same(ours: ArtifactCheckpoint, theirs: ArtifactCheckpoint, name: str) -> bool:
    a, b = ours.qtensor(name), theirs.qtensor(name)
    if a is None or b is None:
        left, right = ours.source.raw(name), theirs.source.raw(name)
        kinds = (a is None, left.dtype, left.shape) == (b is None, right.dtype, right.shape)
        return kinds and np.array_equal(left.data, right.data)
    if a.spec != b.spec or (a.zeros is not None and b.zeros is not None and (a.zeros != b.zeros).any()):
        return False
    return np.array_equal(a.codes, b.codes) and np.array_equal(a.scales, b.scales)
