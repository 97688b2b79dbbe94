"""The story of a run: open, plan, calibrate, round block by block, write, finish.

Every user error is raised in ``prepare``, from headers, before any work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import __version__
from compressor.arch import find_family
from compressor.arch.base import Family
from compressor.checkpoint.base import Checkpoint
from compressor.checkpoint.reader import check_against_family, expected_tensors, open_config
from compressor.checkpoint.writer import RunDirectory, check_free_space, check_side_names
from compressor.core.plan import Plan, PlannedTensor
from compressor.core.profile import Profile
from compressor.core.report import Progress, Report, no_progress
from compressor.errors import CompressorError, Problems
from compressor.finishing import check_finish, finish, is_finished, rounded_place
from compressor.models import open_source
from compressor.recipe.plan import RunShape, make_plan
from compressor.recipe.presets import find_preset
from compressor.recipe.schema import Recipe, load_recipe, unavailable
from compressor.rounding.run import check_finite, round_blocks
from compressor.rounding.tensor import Work, shard_name
from compressor.runkey import run_key
from compressor.transforms import base as transforms

if TYPE_CHECKING:
    from compressor.calibration.data import TokenSet

EXPORTS = ("compressed-tensors", "gguf")


@dataclass(frozen=True)
class Job:
    """What a user asks of ``compress quantize``; ``samples`` None leaves the number to the preset."""

    model: str
    recipe: str
    out: Path
    calibration: str = "default"
    preset: str = "default"
    samples: int | None = None
    sequence_length: int = 512
    seed: int = 0
    device: str = "cpu"
    strict: bool = False
    fresh: bool = False
    substitutions: Mapping[str, str] = field(default_factory=dict)
    exports: tuple[str, ...] = ()
    select: str = "all"
    pool: int = 4


@dataclass(frozen=True)
class Prepared:
    """A job whose every question is answered: nothing after this should fail on user input."""

    job: Job
    checkpoint: Checkpoint
    family: Family
    recipe: Recipe
    plan: Plan


def prepare(job: Job) -> Prepared:
    """Open the model, read the recipe, plan every tensor, and raise every user error there is.

    Raises:
        CompressorError: anything the user can cause (several at once as Problems).
    """
    recipe = load_recipe(job.recipe, job.substitutions, job.preset)
    job = replace(job, samples=_samples(job))
    checkpoint = open_source(job.model)
    _check_place(job.out, checkpoint)
    family = find_family(checkpoint.config, job.model)
    check_against_family(checkpoint, family)
    checkpoint = transforms.apply(recipe.transforms, checkpoint, family)
    plan = make_plan(
        label=checkpoint.label,
        config=checkpoint.config,
        family=family,
        tensors=checkpoint.tensors,
        recipe=recipe,
        run=RunShape(_samples(job), job.sequence_length),
    )
    return Prepared(job, checkpoint, family, recipe, plan)


def _check_place(out: Path, checkpoint: Checkpoint) -> None:
    """An artifact inside the model's own directory would become part of the model.

    Raises:
        CompressorError: ``out`` is the model, or lies in it.
    """
    model, place = checkpoint.path.resolve(), out.resolve()
    if out != Path() and (place == model or model in place.parents):
        raise CompressorError(
            f"--out {out}: lies inside the model {checkpoint.label}", hint="choose another directory"
        )


def _samples(job: Job) -> int:
    """Calibration windows of a job."""
    return find_preset(job.preset).samples if job.samples is None else job.samples


def plan_model(job: Job) -> Plan:
    """The plan of a model on disk, or of a bare config.json (weights are then taken from the config).

    Raises:
        CompressorError: as ``prepare``.
    """
    path = Path(job.model)
    has_weights = any(path.glob("*.safetensors")) if path.is_dir() else path.suffix != ".json"
    if has_weights:
        ready = prepare(job)
        return _with_limits(_with_notes(ready), ready.family.tied(ready.checkpoint.config))
    label, config = open_config(path)
    written = load_recipe(job.recipe, job.substitutions, job.preset)
    family = _checked_family(config, label)
    added = transforms.notes(written.transforms, config, family)
    plan = make_plan(
        label=label,
        config=config,
        family=family,
        tensors=None,
        recipe=written,
        run=RunShape(_samples(job), job.sequence_length),
    )
    tied = family.tied(transforms.present(written.transforms, config, family, label))
    return _with_limits(replace(plan, notes=(*plan.notes, *added)), tied)


def _with_notes(ready: Prepared) -> Plan:
    """The plan, with what the recipe's transforms say of the model (a run tells it with the source's notes)."""
    config = transforms.untransformed(ready.checkpoint).config
    added = transforms.notes(ready.recipe.transforms, config, ready.family)
    return replace(ready.plan, notes=(*ready.plan.notes, *added))


def _with_limits(plan: Plan, tied: bool) -> Plan:
    """The plan, with what the artifact's format cannot hold as notes: ``quantize`` would refuse it."""
    from compressor.export.compressed_tensors import check_plan

    refused = tuple(f"quantize will refuse this: {problem.what}" for problem in check_plan(plan.tensors, tied))
    return replace(plan, notes=(*plan.notes, *refused))


def _checked_family(config: Mapping[str, Any], label: str) -> Family:
    """The family of a bare config, its sizes present and sane."""
    family = find_family(config, label)
    expected_tensors(config, family, label)
    return family


def check_runnable(ready: Prepared) -> None:
    """Refuse what can be planned but not run: missing passes, formats and exports that cannot hold it.

    Raises:
        Problems: all of them at once.
    """
    from compressor.calibration.linear import check_device
    from compressor.calibration.walk import check_config
    from compressor.export import compressed_tensors, gguf

    check_device(ready.job.device)
    check_config(ready.checkpoint)
    tied = ready.family.tied(ready.checkpoint.config)
    problems = list(unavailable(ready.recipe))
    problems += compressed_tensors.check_plan(ready.plan.tensors, tied)
    problems += check_side_names(ready.checkpoint.side_files())
    unknown = [name for name in ready.job.exports if name not in EXPORTS]
    problems += [
        CompressorError(f"--export {name}: unknown format", expected=", ".join(EXPORTS)) for name in unknown
    ]
    if "compressed-tensors" in ready.job.exports and not ready.plan.quantized():
        problems.append(CompressorError("--export compressed-tensors: the recipe quantizes nothing"))
    problems += check_finish(ready.recipe.finish, _samples(ready.job), bool(ready.plan.quantized()))
    problems += _taken_targets(ready.job)
    if "gguf" in ready.job.exports:
        problems += gguf.check(ready.checkpoint, ready.family)
        problems += _gguf_floats(ready.plan) if ready.job.strict else []
    if problems:
        raise Problems(f"{ready.checkpoint.label} cannot be quantized this way", problems)


def export_path(artifact: Path, format_name: str) -> Path:
    """Where ``--export`` puts a format: beside the artifact."""
    ending = {"gguf": ".gguf"}.get(format_name, f"-{format_name}")
    return artifact.with_name(artifact.name + ending)


def _taken_targets(job: Job) -> list[CompressorError]:
    """Export targets that stand already while the artifact they would come from does not."""
    if not job.out.name or job.out.is_symlink():
        return [
            CompressorError(f"--out {job.out}: needs a name of its own, and no link", hint="name a new directory")
        ]
    if job.out.exists():
        return []
    targets = [export_path(job.out, name) for name in job.exports]
    return [
        CompressorError(f"{target}: already exists", hint="remove it first")
        for target in targets
        if target.exists()
    ]


def _gguf_floats(plan: Plan) -> list[CompressorError]:
    """Matrices whose codes no ggml block holds: they would be written as floats."""
    from compressor.export.gguf_codes import grid_obstacle

    reasons = {t.name: grid_obstacle(t.spec, t.shape[1]) for t in plan.tensors if t.spec is not None}
    return [
        CompressorError(
            f"{name}: {reason}; gguf would hold it as floats", hint="run without --strict to accept this"
        )
        for name, reason in reasons.items()
        if reason is not None
    ]


def quantize(job: Job, progress: Progress = no_progress, profile: Profile | None = None) -> tuple[Prepared, Report]:
    """Run a job: returns the plan it followed and the report; the artifact is in ``job.out``.

    Finished blocks survive a crash: the same call goes on where it stopped and ends in the same bytes.
    ``profile``, where given, learns how long each stage took.

    Raises:
        CompressorError: anything the user can cause.
    """
    from compressor.calibration.data import Choice, load_tokenizer, load_tokens

    ready = prepare(job)
    check_runnable(ready)
    job, timed = ready.job, profile or Profile()
    tokens = load_tokens(
        job.calibration,
        load_tokenizer(ready.checkpoint),
        samples=_samples(job),
        sequence_length=job.sequence_length,
        seed=job.seed,
        vocab_size=int(ready.checkpoint.config["vocab_size"]),
        checkpoint=ready.checkpoint,
        choice=Choice(job.select, job.pool),
        device=job.device,
        progress=progress,
    )
    report, key, steps = (
        _new_report(ready, tokens),
        run_key(ready.job, ready.recipe, ready.checkpoint, tokens),
        ready.recipe.finish,
    )
    if steps and is_finished(job.out, key):
        return ready, _stored_report(job.out, report)
    place = rounded_place(job.out) if steps else job.out
    with RunDirectory.open(place, key, fresh=job.fresh) as run:
        if run.already_done:
            report = _stored_report(place, report)
        else:
            _round(ready, tokens, run, report, progress, timed)
    if steps:
        with timed.stage("training scales"):
            report.note(finish(steps, place, ready.checkpoint, tokens, job.out, job.seed, progress))
    return ready, report


def _round(
    ready: Prepared, tokens: TokenSet, run: RunDirectory, report: Report, progress: Progress, timed: Profile
) -> None:
    """Everything between an open run directory and its finished artifact."""
    job = ready.job
    check_free_space(job.out, ready.plan.disk_bytes)
    with timed.stage("checking weights"):
        check_finite(transforms.untransformed(ready.checkpoint), progress)
        transforms.verify(ready.checkpoint, ready.family, tokens.batches, job.device)
    work = Work(ready.checkpoint, ready.family, ready.plan, job.device, job.strict, timed)
    round_blocks(work, run, tokens, progress)
    with timed.stage("finishing files"):
        _gather_facts(ready, run, report)
        _finish(ready, run, report)


def export_artifact(
    source: str,
    format_name: str,
    out: Path,
    *,
    pretokenizer: str | None = None,
    float_type: str | None = None,
    strict: bool = False,
    progress: Progress = no_progress,
) -> tuple[dict[str, Any], Report]:
    """Repack a model into ``format_name`` at ``out``; proves itself by reading the file back.

    Raises:
        CompressorError: unknown format, ``out`` exists, or the format cannot hold the model.
    """
    from compressor.export import compressed_tensors, gguf
    from compressor.models import open_model

    if format_name not in EXPORTS:
        raise CompressorError("unknown export format", got=repr(format_name), expected=", ".join(EXPORTS))
    checkpoint, report = open_model(source), Report(strict=strict)
    for line in checkpoint.notes:
        report.note(line)
    if format_name == "gguf":
        facts = gguf.export(
            checkpoint,
            out,
            pretokenizer=pretokenizer,
            float_type=float_type,
            progress=progress,
            report=report,
        )
        return facts, report
    if not isinstance(checkpoint, compressed_tensors.ArtifactCheckpoint):
        raise CompressorError(f"{source}: has no integer codes to export", hint="run `compress quantize` first")
    return compressed_tensors.export(checkpoint, out, progress), report


def _new_report(ready: Prepared, tokens: TokenSet) -> Report:
    """A report holding everything known before the first block."""
    from compressor.calibration.overlap import sketch
    from compressor.export.compressed_tensors import engine_warnings

    report = Report(strict=ready.job.strict)
    report.facts = {
        "version": __version__,
        "model": ready.checkpoint.label,
        "family": ready.family.name,
        "recipe": ready.recipe.canonical(),
        "calibration": {
            "source": ready.job.calibration,
            "description": tokens.description,
            "tokens": tokens.tokens,
            "sha256": tokens.sha256,
            "seed": ready.job.seed,
            "select": ready.job.select,
            "overlap": sketch(row for batch in tokens.batches for row in batch.tolist()).to_json(),
        },
        "bytes": {"source": ready.plan.source_nbytes, "artifact": ready.plan.nbytes},
        "bits_per_weight": round(ready.plan.bits_per_weight, 4),
    }
    warnings = engine_warnings(ready.plan.tensors, ready.family)
    for line in (*ready.checkpoint.notes, *ready.plan.notes, *tokens.notes, *warnings):
        report.note(line)
    return report


def _stored_report(out: Path, report: Report) -> Report:
    """The per-tensor facts of a run finished earlier."""
    stored = json.loads((out / "report.json").read_text())
    report.tensors = stored["tensors"]
    for event in stored["events"]:
        if event["degraded"]:
            report.degrade(event["message"], event["tensor"])
        elif event["tensor"]:
            report.note(event["message"], event["tensor"])
    report.note(f"{out} already holds this run: nothing to do")
    return report


def _gather_facts(ready: Prepared, run: RunDirectory, report: Report) -> None:
    """Collect what each shard's rounding reported, whichever process did it."""
    for index in range(ready.plan.layers + 1):
        for name, facts in run.facts(shard_name(index, ready.plan.layers)).items():
            report.tensors[name] = facts
            for sentence in facts["degraded"]:
                report.degrade(sentence, name)
            if facts.get("damp", 0) and facts["damp"] > facts["damp_asked"]:
                report.note(f"damp raised from {facts['damp_asked']} to {facts['damp']:.3g}", name)
            if facts.get("rounding") == "rtn" and not facts["degraded"]:
                report.note("round to nearest was better than GPTQ here and was kept", name)


def _finish(ready: Prepared, run: RunDirectory, report: Report) -> None:
    """Write config, index, manifest and report, then let the directory appear under its name."""
    from compressor.export import compressed_tensors

    tied = ready.family.tied(ready.checkpoint.config)
    linears = {t.module: t.spec for t in ready.plan.tensors if _is_linear(t)}
    config = dict(ready.checkpoint.config)
    if any(linears.values()):
        config["quantization_config"] = compressed_tensors.quantization_config(linears, tied=tied)
    manifest = {"version": __version__, "source": ready.checkpoint.label}
    pretokenizer = getattr(ready.checkpoint, "pretokenizer", None)
    if pretokenizer:
        manifest["pretokenizer"] = pretokenizer
    run.finish(
        config=config,
        side_files=ready.checkpoint.side_files(),
        manifest=manifest,
        report=report.to_json(),
    )


def _is_linear(tensor: PlannedTensor) -> bool:
    return tensor.role in ("attention", "ffn", "lm_head") and tensor.name.endswith(".weight")
