"""Scores a model block by block, beside a reference if there is one; no logits are kept."""

from __future__ import annotations

import time
from typing import Any

import torch

from compressor.arch import find_family
from compressor.calibration.walk import Walk
from compressor.checkpoint.base import Checkpoint
from compressor.core.report import Progress, no_progress
from compressor.errors import CompressorError, GateFailed
from compressor.eval.divergence import TokenScores, join, score_logits, summarize
from compressor.eval.windows import Windows


@torch.inference_mode()
def token_scores(
    target: Checkpoint,
    reference: Checkpoint | None,
    windows: Windows,
    *,
    device: str = "cpu",
    batch: int = 4,
    progress: Progress = no_progress,
) -> TokenScores:
    """Walk both models in lockstep, one block of each in memory, then score window by window.

    Raises:
        CompressorError: vocabularies differ, or the logits are not finite (a damaged model: GateFailed).
    """
    models = [target] if reference is None else [target, reference]
    walks = [Walk(model, find_family(model.config, model.label), device) for model in models]
    _check_vocabularies(models)
    batches = list(windows.tokens.split(batch))
    streams = [walk.embed(batches) for walk in walks]
    steps = sum(walk.layers for walk in walks)
    for done, (index, layer) in enumerate(_lockstep([walk.layers for walk in walks])):
        progress("evaluating blocks", done, steps)
        block = walks[index].block(layer)
        walks[index].forward(block, layer, streams[index])
        walks[index].release(block)
    progress("evaluating blocks", steps, steps)
    parts = []
    for done, ids in enumerate(batches, start=1):
        for row in range(len(ids)):
            hidden = [stream[done - 1][row, windows.first : -1] for stream in streams]
            parts.append(_score_window(walks, hidden, ids[row, windows.first + 1 :], target.label))
        progress("scoring windows", done, len(batches))
    return join(parts)


def evaluate(
    target: Checkpoint,
    reference: Checkpoint | None,
    windows: Windows,
    *,
    device: str = "cpu",
    batch: int = 4,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Figures of a model: perplexity, and divergence from the reference, with errors and the protocol."""
    started = time.monotonic()
    scores = token_scores(target, reference, windows, device=device, batch=batch, progress=progress)
    return {
        "target": target.label,
        "reference": reference.label if reference else None,
        "protocol": windows.protocol,
        "context": windows.context,
        "chunks": int(windows.tokens.shape[0]),
        "tokens": windows.scored,
        **summarize(scores),
        "seconds": round(time.monotonic() - started, 2),
    }


def _lockstep(layers: list[int]) -> list[tuple[int, int]]:
    """(model, layer) pairs, the models taking turns."""
    return [(index, layer) for layer in range(max(layers)) for index, count in enumerate(layers) if layer < count]


def _score_window(walks: list[Walk], hidden: list[torch.Tensor], targets: torch.Tensor, label: str) -> TokenScores:
    logits = [walk.logits(h).cpu() for walk, h in zip(walks, hidden, strict=True)]
    if not torch.isfinite(logits[0]).all():
        raise GateFailed(f"{label}: logits are NaN or infinite", hint="`compress verify` finds the tensor")
    return score_logits(logits[0], logits[1] if len(logits) > 1 else None, targets)


def _check_vocabularies(models: list[Checkpoint]) -> None:
    sizes = [int(model.config["vocab_size"]) for model in models]
    if len(set(sizes)) > 1:
        raise CompressorError(
            f"{models[0].label} and {models[1].label} cannot be compared: vocabularies differ",
            got=f"{sizes[0]} and {sizes[1]} tokens",
            expected="two versions of one model",
        )
