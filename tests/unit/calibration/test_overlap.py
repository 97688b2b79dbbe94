"""Overlap of a text with calibration text: the share found is the share there is."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from compressor.calibration.overlap import SHINGLE, Sketch, overlap_share, shingle_hashes, sketch, stored_sketch


def tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(50_000) for _ in range(count)]


def test_hashes_are_of_every_run_of_32_tokens() -> None:
    row = tokens(100, 0)
    assert len(shingle_hashes([row])) == 100 - SHINGLE + 1
    one = shingle_hashes([row[10 : 10 + SHINGLE]])
    assert len(one) == 1
    assert one[0] in shingle_hashes([row])
    assert len(shingle_hashes([row[: SHINGLE - 1]])) == 0
    assert len(shingle_hashes([])) == 0


def test_order_and_every_token_count() -> None:
    row = tokens(SHINGLE, 0)
    swapped = [row[1], row[0], *row[2:]]
    changed = [[*row[:i], row[i] + 1, *row[i + 1 :]] for i in range(SHINGLE)]
    assert len(shingle_hashes([row, swapped, *changed])) == 2 + SHINGLE


def test_repeated_text_counts_once() -> None:
    row = tokens(60, 0)
    assert np.array_equal(shingle_hashes([row, row]), shingle_hashes([row]))


def test_hashes_are_spread_evenly() -> None:
    """Small ids, as in byte tokenizers, must not crowd the hashes: bottom-k sampling relies on it."""
    draw = random.Random(0)
    hashes = shingle_hashes([[draw.randrange(40) for _ in range(20_000)]])
    counts = np.bincount((hashes >> np.uint64(60)).astype(np.int64), minlength=16)
    assert counts.min() > 1100  # 1,248 expected in each sixteenth, standard deviation 34
    assert counts.max() < 1400


def test_small_text_is_kept_whole_and_shares_are_exact() -> None:
    row = tokens(1000, 0)
    stored = sketch([row])
    assert overlap_share(stored, [row]) == 1.0
    assert overlap_share(stored, [tokens(1000, 1)]) == 0.0
    half = row[: 500 + SHINGLE // 2] + tokens(500, 2)
    inside = 500 + SHINGLE // 2 - SHINGLE + 1
    assert overlap_share(stored, [half]) == pytest.approx(inside / (len(half) - SHINGLE + 1))
    assert overlap_share(stored, [[]]) == 0.0


def test_large_text_is_sampled_and_shares_are_estimated() -> None:
    row = tokens(60_000, 0)
    stored = sketch([row], kept=4000)
    assert len(stored.hashes) == 4000
    assert stored.bound == int(stored.hashes[-1])
    mixed = row[30_000:36_000] + tokens(18_000, 5)
    assert overlap_share(stored, [mixed]) == pytest.approx(0.25, abs=0.03)
    assert overlap_share(stored, [tokens(20_000, 6)]) == 0.0


def test_sketch_survives_json() -> None:
    for stored in (sketch([tokens(400, 0)]), sketch([tokens(9000, 0)], kept=100), sketch([])):
        again = Sketch.from_json(json.loads(json.dumps(stored.to_json())))
        assert again is not None
        assert np.array_equal(again.hashes, stored.hashes)
        assert again.bound == stored.bound


@pytest.mark.parametrize(
    "change",
    [{"shingle": 16}, {"hashes": "?"}, {"hashes": "AAAA"}, {"hashes": 3}, {"bound": "no"}, {"bound": 3}, None],
)
def test_what_is_no_sketch_is_ignored(change: dict[str, object] | None, tmp_path: Path) -> None:
    stored = None if change is None else {**sketch([tokens(50, 0)]).to_json(), **change}
    assert Sketch.from_json(stored) is None
    assert stored_sketch(tmp_path) is None
    (tmp_path / "report.json").write_text(json.dumps({"facts": {"calibration": {"overlap": stored}}}))
    assert stored_sketch(tmp_path) is None
    (tmp_path / "report.json").write_text("[")
    assert stored_sketch(tmp_path) is None
