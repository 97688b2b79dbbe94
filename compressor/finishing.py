"""What is done to a rounded artifact as a whole: its scales are trained, and only then it gets its name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.checkpoint.base import Checkpoint
from compressor.checkpoint.safetensors import MANIFEST
from compressor.core.plan import PassCall
from compressor.core.report import Progress
from compressor.errors import CompressorError

if TYPE_CHECKING:
    from compressor.calibration.data import TokenSet


def rounded_place(out: Path) -> Path:
    """Where the artifact stands until it is finished: ``OUT.rounded``, which resumes like any run."""
    return out.with_name(f"{out.name}.rounded")


def is_finished(out: Path, key: Mapping[str, str]) -> bool:
    """Whether ``out`` already holds this run, trained.

    Raises:
        CompressorError: something else stands there.
    """
    if not os.path.lexists(out):
        return False
    try:
        stored: dict[str, Any] = json.loads((out / MANIFEST).read_text(encoding="utf-8"))["key"]
    except (OSError, ValueError, KeyError, TypeError):
        stored = {}
    if "distilled" in stored and {k: v for k, v in stored.items() if k != "distilled"} == dict(key):
        return True
    raise CompressorError(f"--out {out}: already exists, and is not this run", hint="remove it, or name another")


def check_finish(calls: tuple[PassCall, ...], samples: int, quantized: bool) -> list[CompressorError]:
    """Why an artifact could not be finished this way, before any work."""
    from compressor.distill.train import FEWEST_HELD_OUT

    if not calls:
        return []
    problems = []
    if not quantized:
        problems.append(CompressorError("finish: the recipe quantizes nothing, there are no scales to train"))
    if samples <= FEWEST_HELD_OUT:
        got = f"--samples {samples}"
        problems.append(
            CompressorError("distill_scales: too few windows", got=got, expected=f"> {FEWEST_HELD_OUT}")
        )
    return problems


def finish(
    calls: tuple[PassCall, ...],
    rounded: Path,
    reference: Checkpoint,
    tokens: TokenSet,
    out: Path,
    seed: int,
    progress: Progress,
) -> str:
    """Train the scales of the artifact at ``rounded`` into ``out``; removes ``rounded``.

    Returns:
        A sentence for the report.
    """
    from compressor.distill.artifact import distill_scales
    from compressor.distill.train import Options

    (call,) = calls
    facts = distill_scales(rounded, reference, tokens, out, Options(**call.options, seed=seed), progress)
    shutil.rmtree(rounded)
    before, after = facts["kld_before"], facts["kld_after"]
    if not facts["improved"]:
        return f"distill_scales: nothing beat KLD {before:.5f} on held-out windows; the scales stayed"
    return f"distill_scales: KLD on held-out windows {before:.5f} -> {after:.5f} ({facts['steps']} steps)"
