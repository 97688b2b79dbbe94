"""Which windows are worth calibrating on: the few that best stand for all in activation space.

Each window is described cheaply: means and second moments of what enters the first blocks, projected at
random. Windows are then chosen greedily so that every candidate has a close one among them (facility
location; the greedy choice is within 1 - 1/e of the best, Nemhauser, Wolsey and Fisher 1978).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compressor.arch import find_family
from compressor.calibration.walk import Walk
from compressor.core.report import Progress, no_progress

if TYPE_CHECKING:
    from compressor.checkpoint.base import Checkpoint

DEPTH = 2
"""Blocks run, all held in memory at once."""
WIDTH = 64
"""Random directions per kind of moment and place."""
SPREAD = 0.3
"""How far a window stands for others: docs/calibration.md has what other ways of choosing gave."""
BATCH_TOKENS = 2048


def select_windows(
    checkpoint: Checkpoint,
    windows: list[list[int]],
    count: int,
    seed: int,
    device: str = "cpu",
    progress: Progress = no_progress,
) -> list[int]:
    """Indices, ascending, of the ``count`` windows (equal lengths) of a model that stand best for all."""
    walk = Walk(checkpoint, find_family(checkpoint.config, checkpoint.label), device)
    per_batch = max(1, BATCH_TOKENS // len(windows[0]))
    batches = list(torch.tensor(windows, dtype=torch.int64).split(per_batch))  # type: ignore[no-untyped-call]
    return select_informative(walk, batches, count, seed, progress)


def select_informative(
    walk: Walk, batches: list[torch.Tensor], count: int, seed: int, progress: Progress = no_progress
) -> list[int]:
    """Indices, ascending, of the ``count`` windows of batches (int64 [b, L] each) that stand best for all.

    The same seed and number of threads choose the same windows.
    """
    features = window_features(walk, batches, seed, progress)
    return sorted(facility_location(features, min(count, len(features))))


@torch.inference_mode()
def window_features(
    walk: Walk, batches: list[torch.Tensor], seed: int, progress: Progress = no_progress
) -> torch.Tensor:
    """float32 [windows, features]: every kind and place of moment weighs the same.

    Places are the embedding and the output of the first DEPTH blocks; every token is scaled to mean square
    one, as the norms before the linears do.
    """
    depth = min(DEPTH, walk.layers)
    blocks = [walk.block(layer) for layer in range(depth)]
    places: list[list[torch.Tensor]] = [[] for _ in range(2 * (depth + 1))]
    for done, ids in enumerate(batches):
        progress("selecting calibration windows", done, len(batches))
        streams = walk.embed([ids])
        for place in range(depth + 1):
            if place:
                walk.forward(blocks[place - 1], place - 1, streams)
            hidden = streams[0] * torch.rsqrt(streams[0].square().mean(-1, keepdim=True) + 1e-12)
            places[2 * place].append(hidden.mean(1).cpu())
            places[2 * place + 1].append(hidden.square().mean(1).cpu())
    progress("selecting calibration windows", len(batches), len(batches))
    for block in blocks:
        walk.release(block)
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([_projected(torch.cat(parts), generator) for parts in places], dim=1)


def _projected(moments: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Moments float32 [windows, hidden] on WIDTH random directions, centred, of mean square one."""
    directions = torch.randn(moments.shape[1], WIDTH, generator=generator)
    found = (moments - moments.mean(0)) @ directions
    return found / found.square().mean().sqrt().clamp_min(1e-12)


def facility_location(features: torch.Tensor, count: int) -> list[int]:
    """Greedy choice of ``count`` rows of features float32 [n, f], best first; ties go to the lower index.

    Similarity is exp(-d^2 / (SPREAD * mean d^2)) with d the distance between rows.
    """
    distances = torch.cdist(features.double(), features.double()).square()
    similar = torch.exp(-distances / (SPREAD * distances.mean()).clamp_min(1e-30))
    best = torch.zeros(len(features), dtype=torch.float64)
    picked: list[int] = []
    for _ in range(count):
        gains = (similar - best[:, None]).clamp_min(0).sum(0)
        gains[picked] = -1.0
        picked.append(int(gains.argmax()))
        best = torch.maximum(best, similar[:, picked[-1]])
    return picked
