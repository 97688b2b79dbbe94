"""Selected windows: deterministic, representative, and better than a random draw where windows differ."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from compressor.arch import find_family
from compressor.calibration.data import Choice, load_tokenizer, load_tokens
from compressor.calibration.select import facility_location, select_informative, select_windows, window_features
from compressor.calibration.walk import Walk
from compressor.checkpoint.base import Checkpoint
from compressor.errors import CompressorError
from compressor.models import open_model


@pytest.fixture
def model(tiny_llama: Path) -> Checkpoint:
    return open_model(str(tiny_llama))


def walk_of(model: Checkpoint) -> Walk:
    return Walk(model, find_family(model.config, model.label))


def kinds_of_text(copies: tuple[int, ...]) -> torch.Tensor:
    """int64 [sum of copies, 32]: windows over disjoint parts of the vocabulary, one part per kind."""
    draw = random.Random(0)
    rows = [
        [draw.randrange(40 * kind, 40 * kind + 40) for _ in range(32)]
        for kind, count in enumerate(copies)
        for _ in range(count)
    ]
    return torch.tensor(rows)


def test_greedy_choice_of_points_on_a_line() -> None:
    """Three clusters: one point of each, the largest first; without differences in order."""
    points = torch.tensor([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2], [5.3], [5.25], [20.0]])
    picked = facility_location(points, 3)
    assert picked[0] in range(3, 8)
    assert {1, 8} <= set(picked)
    assert facility_location(torch.zeros(4, 2), 3) == [0, 1, 2]  # nothing tells them apart: in order


def test_greedy_choice_is_the_best_by_brute_force_for_one() -> None:
    points = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    distances = torch.cdist(points.double(), points.double()).square()
    covered = torch.exp(-distances / (0.3 * distances.mean())).sum(0)
    assert facility_location(points, 1) == [int(covered.argmax())]


def test_every_kind_of_text_is_represented(model: Checkpoint) -> None:
    windows = kinds_of_text((20, 4, 4, 4))
    picked = select_informative(walk_of(model), list(windows.split(5)), 6, seed=0)
    assert {int(windows[index, 0]) // 40 for index in picked} == {0, 1, 2, 3}


def test_choice_is_sorted_repeatable_and_free_of_batching(model: Checkpoint) -> None:
    windows = kinds_of_text((10, 6, 8))
    picked = select_informative(walk_of(model), list(windows.split(3)), 6, seed=1)
    assert picked == sorted(set(picked))
    assert len(picked) == 6
    assert picked == select_informative(walk_of(model), list(windows.split(3)), 6, seed=1)
    assert picked == select_windows(model, windows.tolist(), 6, seed=1)
    assert select_informative(walk_of(model), [windows], 100, seed=1) == list(range(24))


def test_features_weigh_every_place_alike_and_tell_windows_apart(model: Checkpoint) -> None:
    windows = kinds_of_text((3, 3))
    features = window_features(walk_of(model), [windows], seed=0)
    assert features.shape == (6, 6 * 64)  # mean and second moment, at the embedding and after two blocks
    for part in features.split(64, dim=1):
        assert part.square().mean().item() == pytest.approx(1.0, rel=1e-4)
        torch.testing.assert_close(part.mean(0), torch.zeros(64), atol=1e-4, rtol=0)
    apart = torch.cdist(features, features)
    assert apart[:3, 3:].min() > apart[:3, :3].max()


def test_selected_tokens_are_some_of_the_candidates(model: Checkpoint) -> None:
    tokenizer = load_tokenizer(model)
    options = {"sequence_length": 32, "seed": 0, "checkpoint": model}
    chosen = load_tokens("default", tokenizer, samples=4, choice=Choice("informative", 5), **options)
    pool = load_tokens("default", tokenizer, samples=20, **options)
    rows = {tuple(row) for batch in pool.batches for row in batch.tolist()}
    picked = [tuple(row) for batch in chosen.batches for row in batch.tolist()]
    assert len(picked) == 4
    assert set(picked) <= rows
    assert any("4 windows selected from 20" in note for note in chosen.notes)
    plain = load_tokens("default", tokenizer, samples=4, **options)
    assert chosen.sha256 != plain.sha256


def test_nothing_to_select_from_is_noted(model: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words and more " * 10)
    found = load_tokens(
        str(tmp_path / "a.txt"),
        load_tokenizer(model),
        samples=50,
        sequence_length=16,
        seed=0,
        checkpoint=model,
        choice=Choice("informative"),
    )
    assert any("nothing to select from" in note for note in found.notes)


@pytest.mark.parametrize(
    ("choice", "words"),
    [(Choice("best"), ["--select", "'best'", "informative"]), (Choice("informative", 1), ["--pool", "at least 2"])],
)
def test_unknown_ways_to_choose_are_refused(model: Checkpoint, choice: Choice, words: list[str]) -> None:
    with pytest.raises(CompressorError) as caught:
        load_tokens(
            "prose", load_tokenizer(model), samples=2, sequence_length=16, seed=0, checkpoint=model, choice=choice
        )
    for word in words:
        assert word in str(caught.value)


def test_selecting_needs_the_model(model: Checkpoint) -> None:
    with pytest.raises(CompressorError, match="needs the model"):
        load_tokens(
            "prose", load_tokenizer(model), samples=2, sequence_length=16, seed=0, choice=Choice("informative")
        )
