"""Scores a model block by block, beside a reference if there is one; no logits are kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from compressor.arch import find_family
from compressor.calibration.walk import Walk
from compressor.checkpoint.base import Checkpoint
from compressor.checkpoint.reader import check_against_family
from compressor.core.report import Progress, no_progress
from compressor.errors import CompressorError, GateFailed
from compressor.eval.divergence import MAX_NLL, TokenScores, join, score_logits, summarize
from compressor.eval.windows import Windows

MAX_LOGITS = 1 << 24
"""Logits of one model held at once (64 MB): a long window over a large vocabulary is scored in parts."""


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
        CompressorError: vocabularies differ, or tensors are missing.
        GateFailed: logits are not finite, or the perplexity is beyond meaning.
    """
    models = [target] if reference is None else [target, reference]
    _check_vocabularies(models)
    walks = [_walk(model, device) for model in models]
    batches = [windows.tokens[i : i + batch] for i in range(0, len(windows.tokens), batch)]
    streams = [walk.embed(batches) for walk in walks]
    steps = sum(walk.layers for walk in walks)
    for done, (index, layer) in enumerate(_lockstep([walk.layers for walk in walks])):
        progress("evaluating blocks", done, steps)
        block = walks[index].block(layer)
        walks[index].forward(block, layer, streams[index])
        walks[index].release(block)
    progress("evaluating blocks", steps, steps)
    parts: list[TokenScores] = []
    for done, ids in enumerate(batches, start=1):
        for row in range(len(ids)):
            hidden = [stream[done - 1][row, windows.first : -1] for stream in streams]
            parts += _score_window(walks, hidden, ids[row, windows.first + 1 :])
        progress("scoring windows", done, len(batches))
    scores = join(parts)
    for model, nll in zip(models, (scores.nll, scores.reference_nll), strict=False):
        _check_sane(model.label, nll)
    return scores


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


def _walk(model: Checkpoint, device: str) -> Walk:
    family = find_family(model.config, model.label)
    check_against_family(model, family)
    return Walk(model, family, device)


def _lockstep(layers: list[int]) -> list[tuple[int, int]]:
    """(model, layer) pairs, the models taking turns."""
    return [(index, layer) for layer in range(max(layers)) for index, count in enumerate(layers) if layer < count]


def _score_window(walks: list[Walk], hidden: list[torch.Tensor], targets: torch.Tensor) -> Iterator[TokenScores]:
    """Scores of one window, MAX_LOGITS of each model at a time."""
    rows = max(1, MAX_LOGITS // int(walks[0].checkpoint.config["vocab_size"]))
    for start in range(0, len(targets), rows):
        logits = [_logits(walk, h[start : start + rows]) for walk, h in zip(walks, hidden, strict=True)]
        part = targets[start : start + rows].to(logits[0].device)
        yield score_logits(logits[0], logits[1] if len(logits) > 1 else None, part)


def _logits(walk: Walk, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of a few positions, proved finite.

    Raises:
        GateFailed: naming the model.
    """
    logits = walk.logits(hidden)
    if not torch.isfinite(logits.sum(-1)).all() and not torch.isfinite(logits).all():
        hint = "`compress verify` finds the tensor"
        raise GateFailed(f"{walk.checkpoint.label}: logits are NaN or infinite", hint=hint)
    return logits


def _check_sane(label: str, nll: NDArray[np.float64] | None) -> None:
    """A ruined model is an answer, not a number.

    Raises:
        GateFailed: its perplexity is beyond any meaning.
    """
    if nll is not None and nll.mean() > MAX_NLL:
        raise GateFailed(
            f"{label}: the model is ruined",
            got=f"{nll.mean():.4g} nats per token",
            expected=f"at most {MAX_NLL:.0f}",
            hint="`compress verify MODEL --against ORIGINAL` compares every tensor",
        )


def _check_vocabularies(models: list[Checkpoint]) -> None:
    sizes = [int(model.config["vocab_size"]) for model in models]
    if len(set(sizes)) > 1:
        raise CompressorError(
            f"{models[0].label} and {models[1].label} cannot be compared: vocabularies differ",
            got=f"{sizes[0]} and {sizes[1]} tokens",
            expected="two versions of one model",
        )
