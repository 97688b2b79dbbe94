"""The story of a distillation: check, train, and write a copy of the artifact with other scales and norms.

The copy grows as ``OUT.distill.partial`` and takes its name when it has been read back. Only the bytes of
trained tensors change, in their places; every other byte of every file stays, but for the manifest and the
report, which tell what was done.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compressor.arch import find_family
from compressor.arch.base import Family
from compressor.calibration.data import TokenSet
from compressor.calibration.walk import check_config
from compressor.checkpoint.base import Checkpoint
from compressor.checkpoint.files import file_sha256, parse_json
from compressor.checkpoint.integrity import scan_safetensors
from compressor.checkpoint.reader import check_against_family
from compressor.checkpoint.safetensors import MANIFEST, REPORT, SafetensorsCheckpoint
from compressor.checkpoint.shard import atomic_write, sync_folder
from compressor.checkpoint.writer import check_free_space
from compressor.core.report import Progress, no_progress
from compressor.distill.scaled import Trained
from compressor.distill.student import Student, Teacher
from compressor.distill.train import History, Options, Trainer, split, teach
from compressor.errors import CompressorError, GateFailed
from compressor.export.compressed_tensors import ArtifactCheckpoint
from compressor.kernels.floats import encode_float

_SKIPPED = shutil.ignore_patterns(".git", ".cache", "__pycache__", ".*.tmp")


def distill_scales(
    artifact: Path,
    reference: Checkpoint,
    tokens: TokenSet,
    out: Path,
    options: Options,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Train the scales and norm weights of an artifact towards a float model; write the result to ``out``.

    Same tokens, options and number of threads give the same bytes, unless a time limit ends training.
    Where nothing beats the artifact on held-out windows, ``out`` holds the artifact's own weights.

    Args:
        artifact: A compressed-tensors directory.
        reference: The float model it was made of.
        tokens: Windows to train on; some are held out to choose by.
        out: Directory to create.
        options: How to train.
        progress: Told of teacher blocks and steps.

    Returns:
        Facts, JSON-ready: ``kld_before`` and ``kld_after`` in nats per token on held-out windows,
        ``improved``, ``steps``, ``ended`` (why), ``checks`` [[step, KLD]...], ``trained`` (how many values),
        ``windows`` and ``held_out`` (how many), ``tokens_sha256``, ``options``, ``seconds``.

    Raises:
        CompressorError: no artifact, another model, an option or ``out`` that cannot be, too little text.
        GateFailed: what was read back is not what was to be written.
    """
    started = time.monotonic()
    source, family = check_before_work(artifact, reference, out, options)
    training, held_out = split(tokens, options.seed)
    student = Student(source, family)
    teacher = Teacher(reference, family, bf16=True)
    taught = teach(teacher, torch.cat([training, held_out]), progress)
    trainer = Trainer(student, teacher, options)
    index = torch.arange(len(taught.tokens))
    history = trainer.run(taught.part(index[: len(training)]), taught.part(index[len(training) :]), progress)
    facts = {
        **_figures(history),
        "trained": sum(t.base.numel() for t in student.trained.values()),
        "windows": len(training),
        "held_out": len(held_out),
        "tokens_sha256": tokens.sha256,
        "options": asdict(options),
    }
    write_copy(source, out, student.trained.values() if history.best else (), facts)
    return {**facts, "seconds": round(time.monotonic() - started, 2)}


def check_before_work(
    artifact: Path, reference: Checkpoint, out: Path, options: Options
) -> tuple[ArtifactCheckpoint, Family]:
    """Everything a user can get wrong but the text; the opened artifact and the family of both models.

    Raises:
        CompressorError: as ``distill_scales``.
    """
    check_options(options)
    source = open_artifact(artifact)
    family = check_pair(source, reference)
    check_place(out, source, reference)
    return source, family


def _figures(history: History) -> dict[str, Any]:
    return {
        "kld_before": history.checks[0][1],
        "kld_after": history.checks[history.best][1],
        "improved": history.best > 0,
        "steps": history.steps,
        "ended": history.ended,
        "checks": [[step, kld if math.isfinite(kld) else None] for step, kld in history.checks],
    }


def check_options(options: Options) -> None:
    """Refuse what cannot train.

    Raises:
        CompressorError: naming the option.
    """
    positive = {"epochs": options.epochs, "batch": options.batch, "checks": options.checks}
    positive |= {"patience": options.patience, "max-seconds": options.max_seconds or 1}
    for name, value in positive.items():
        if not 0 < value < float("inf"):
            raise CompressorError(f"--{name} must be above 0", got=value)
    for name, value in {"lr": options.lr, "norm-lr": options.norm_lr}.items():
        if not 0 <= value <= 1:
            raise CompressorError(f"--{name}: no usable learning rate", got=value, expected="0 to 1, e.g. 0.002")


def open_artifact(path: Path) -> ArtifactCheckpoint:
    """A directory with integer codes.

    Raises:
        CompressorError: it is none.
    """
    source = SafetensorsCheckpoint(path)
    section = source.config.get("quantization_config")
    if not isinstance(section, dict) or section.get("quant_method") != "compressed-tensors":
        raise CompressorError(
            f"{path}: has no integer codes",
            expected="a compressed-tensors directory",
            hint="run `compress quantize` first",
        )
    return ArtifactCheckpoint(source)


def check_pair(artifact: ArtifactCheckpoint, reference: Checkpoint) -> Family:
    """The family both belong to.

    Raises:
        CompressorError: unknown, or two different models, or the reference is the artifact's like.
    """
    if isinstance(reference, ArtifactCheckpoint):
        raise CompressorError(f"{reference.label}: is quantized", expected="the float model as --reference")
    family = find_family(artifact.config, artifact.label)
    for model in (artifact, reference):
        check_against_family(model, family)
        check_config(model)
    ours, theirs = family.dims(artifact.config), family.dims(reference.config)
    if ours != theirs or reference.config.get("model_type") not in family.model_types:
        differing = [f"{name} {ours[name]} and {theirs[name]}" for name in ours if ours[name] != theirs[name]]
        raise CompressorError(
            f"{artifact.label} was not made of {reference.label}",
            got=", ".join(differing) or f"model_type {reference.config.get('model_type')!r}",
            expected="two versions of one model",
        )
    return family


def check_place(out: Path, artifact: ArtifactCheckpoint, reference: Checkpoint) -> None:
    """Refuse an ``out`` that stands already, lies in a model, or does not fit the disk.

    Raises:
        CompressorError: naming it.
    """
    if out.exists() or out.is_symlink() or not out.name:
        raise CompressorError(f"--out {out}: already exists", hint="choose another --out, or remove it first")
    for model in (artifact, reference):
        if model.path.resolve() in out.resolve().parents:
            raise CompressorError(f"--out {out}: lies inside the model {model.label}", hint="another directory")
    check_free_space(out, sum(info.nbytes for info in artifact.source.tensors.values()))


def write_copy(source: ArtifactCheckpoint, out: Path, changed: Iterable[Trained], facts: Mapping[str, Any]) -> None:
    """Copy an artifact to ``out`` with the values of ``changed`` in place of the stored ones.

    Raises:
        CompressorError: it cannot be written.
        GateFailed: read back, it is not what was to be written.
    """
    partial = out.with_name(f"{out.name}.distill.partial")
    values = {trained.name: _bytes(trained) for trained in changed}
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source.path, partial, ignore=_SKIPPED)
        for file in sorted({source.source.tensors[name].file for name in values}):
            _patch(partial / file, values)
        _prove(source, partial, values)
        _tell(partial, facts)
        partial.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        raise CompressorError(f"{out}: cannot be written", got=error.strerror or str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@torch.no_grad()
def _bytes(trained: Trained) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return encode_float(trained.value().cpu().numpy(), trained.dtype)


def _patch(file: Path, values: Mapping[str, np.ndarray[Any, np.dtype[np.uint8]]]) -> None:
    """Overwrite tensors of a safetensors file in their places."""
    spans = {name: span for name, span in scan_safetensors(file).items() if name in values}
    with file.open("r+b") as stream:
        for name, span in spans.items():
            stream.seek(span.start)
            stream.write(values[name].tobytes())


def _prove(
    source: ArtifactCheckpoint, folder: Path, values: Mapping[str, np.ndarray[Any, np.dtype[np.uint8]]]
) -> None:
    """Open the copy: the same tensors, trained ones as meant, every other byte as before.

    Raises:
        GateFailed: naming the tensor that is not.
    """
    copy = ArtifactCheckpoint(SafetensorsCheckpoint(folder))
    for name in source.source.tensors:
        expected = values.get(name, source.source.raw(name).data)
        if not np.array_equal(copy.source.raw(name).data, expected):
            raise GateFailed(f"{name}: read back differently from how it was written")
    for name in source.tensors:
        copy.qtensor(name)


def _tell(folder: Path, facts: Mapping[str, Any]) -> None:
    """Report and manifest of the copy, where the artifact has them: what was done, and the new checksums."""
    report, manifest = folder / REPORT, folder / MANIFEST
    if report.is_file():
        told = parse_json(report.read_bytes(), report, REPORT)
        told["facts"] = {**told.get("facts", {}), "distill_scales": dict(facts)}
        _write_json(report, told)
    if not manifest.is_file():
        return
    told = parse_json(manifest.read_bytes(), manifest, MANIFEST)
    digest = hashlib.sha256(json.dumps([told.get("key"), facts], sort_keys=True).encode()).hexdigest()
    told["key"] = {**told.get("key", {}), "distilled": digest}
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != manifest)
    told["sha256"] = {path.relative_to(folder).as_posix(): file_sha256(path) for path in files}
    _write_json(manifest, told)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
    with atomic_write(path, len(text)) as file:
        file.write(text)
