"""What a tenth of the calibration windows costs: second moments of the chosen against those of all.

``python tests/bench/calibration_subset.py [MODEL] [SEED]`` prints a table (docs/calibration.md).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable

import torch

from compressor.arch import find_family
from compressor.calibration import select
from compressor.calibration.data import load_tokenizer, load_tokens
from compressor.calibration.walk import Walk
from compressor.models import open_model

WINDOWS, CHOSEN, LENGTH, DRAWS, DAMP = 120, 12, 256, 8, 0.01
LAYERS, INPUTS = (4, 10), ("self_attn.q_proj", "mlp.up_proj")


@torch.inference_mode()
def moments(walk: Walk, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Per input: float32 [windows, in, in], the sum of x x^T of each window."""
    streams, found = walk.embed(batches), []
    for layer in range(max(LAYERS) + 1):
        block = walk.block(layer)
        seen: dict[str, list[torch.Tensor]] = {name: [] for name in INPUTS if layer in LAYERS}
        hooks = [
            block.get_submodule(name).register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0]))
            for name, kept in seen.items()
        ]
        walk.forward(block, layer, streams)
        for hook in hooks:
            hook.remove()
        walk.release(block)
        found += [torch.einsum("wti,wtj->wij", x, x) for x in map(torch.cat, seen.values())]
    return found


def stein(every: torch.Tensor, chosen: Iterable[int]) -> float:
    """Stein's loss per dimension of the chosen windows' mean second moment, for that of all."""
    target, found = every.mean(0).double(), every[list(chosen)].mean(0).double()
    size = len(target)
    damp = DAMP * target.diagonal().mean() * torch.eye(size, dtype=torch.float64)
    ratio = torch.linalg.solve(found + damp, target + damp)
    return float((ratio.diagonal().sum() - size - torch.linalg.slogdet(ratio)[1]) / size)


def k_center(features: torch.Tensor, count: int) -> list[int]:
    """Each next window is the one farthest from those chosen."""
    distances = torch.cdist(features.double(), features.double())
    picked = [int(distances.sum(1).argmin())]
    while len(picked) < count:
        picked.append(int(distances[picked].amin(0).argmax()))
    return picked


def pivoted_cholesky(features: torch.Tensor, count: int) -> list[int]:
    """Each next window is the one with the largest part outside the span of those chosen."""
    rest, picked = features.double().clone(), []
    for _ in range(count):
        picked.append(int(rest.square().sum(1).argmax()))
        direction = rest[picked[-1]] / rest[picked[-1]].norm()
        rest -= torch.outer(rest @ direction, direction)
    return picked


def main(model: str = "demo", seed: str = "0") -> None:
    """Print the table."""
    checkpoint = open_model(model)
    options = {"samples": WINDOWS, "sequence_length": LENGTH, "seed": int(seed)}
    tokens = load_tokens("default", load_tokenizer(checkpoint), checkpoint=checkpoint, **options)
    walk = Walk(checkpoint, find_family(checkpoint.config, model))
    features = select.window_features(walk, tokens.batches, int(seed))
    every = moments(walk, tokens.batches)
    draws = [random.Random(i).sample(range(WINDOWS), CHOSEN) for i in range(DRAWS)]
    losses = sorted(sum(stein(m, draw) for m in every) / len(every) for draw in draws)
    print(
        f"| {DRAWS} random draws | mean {sum(losses) / DRAWS:.3f}, best {losses[0]:.3f}, worst {losses[-1]:.3f} |"
    )
    for name, choose in (
        ("facility location (`informative`)", select.facility_location),
        ("k-center", k_center),
        ("pivoted Cholesky", pivoted_cholesky),
    ):
        picked = choose(features, CHOSEN)
        print(f"| {name} | {sum(stein(m, picked) for m in every) / len(every):.3f} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
