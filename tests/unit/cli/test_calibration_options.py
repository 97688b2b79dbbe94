"""Calibration from the command line: the options arrive, and an evaluation on the same text is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compressor.calibration.data import bundled_text

RECIPE = "rules:\n  - match: {role: ffn}\n    format: {preset: int4, group_size: 32}\n    passes: [ptq_symmetric]\n"


@pytest.fixture
def quantize(compress, tiny_llama, tmp_path):
    (tmp_path / "r.yaml").write_text(RECIPE)

    def run(*options, out="out"):
        common = ("quantize", tiny_llama, "--recipe", tmp_path / "r.yaml", "--out", tmp_path / out)
        return compress(*common, "--samples", 4, "--sequence-length", 64, *options)

    return run


def calibration(folder: Path) -> dict[str, object]:
    return json.loads((folder / "report.json").read_text())["facts"]["calibration"]


def test_evaluation_on_calibration_text_is_told(compress, quantize, tmp_path):
    text, other = tmp_path / "seen.txt", tmp_path / "other.txt"
    text.write_text(bundled_text("mathematics")[:600])
    other.write_text(bundled_text("prose")[:600])
    assert quantize("--calibration", text)[0] == 0
    for source, low, high in ((text, 0.9, 1.0), (other, 0.0, 0.0)):
        options = ("--text", source, "--context", 64, "--chunks", 3)
        code, out, _ = compress("eval", tmp_path / "out", *options, "--json", "-")
        found = json.loads(out)
        assert code == 0
        assert low <= found["calibration_overlap"] <= high
        assert any("calibration text" in note for note in found["notes"]) == (high > 0)
    _, _, err = compress("eval", tmp_path / "out", "--text", text, "--context", 64, "--chunks", 3)
    assert "was in the calibration text" in err


def test_a_model_without_report_has_no_overlap_figure(compress, tiny_llama, tmp_path):
    (tmp_path / "a.txt").write_text(bundled_text("prose")[:600])
    _, out, _ = compress("eval", tiny_llama, "--text", tmp_path / "a.txt", "--context", 64, "--json", "-")
    assert "calibration_overlap" not in json.loads(out)


def test_selecting_is_an_option_and_part_of_the_run_key(quantize, tmp_path):
    code, _, err = quantize("--select", "informative", "--pool", 3)
    assert code == 0
    assert "4 windows selected from 12" in err
    assert calibration(tmp_path / "out")["select"] == "informative"
    code, _, err = quantize("--select", "all")
    assert code == 2
    assert "calibration" in err
    assert quantize("--select", "all", out="plain")[0] == 0
    assert calibration(tmp_path / "plain")["sha256"] != calibration(tmp_path / "out")["sha256"]


def test_text_of_the_models_own_is_the_same_again(quantize, tmp_path):
    assert quantize("--calibration", "self:1,code:1")[0] == 0
    assert quantize("--calibration", "self:1,code:1", out="again")[0] == 0
    assert calibration(tmp_path / "out") == calibration(tmp_path / "again")
    assert calibration(tmp_path / "out")["tokens"] == 256


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--select", "best"), ("--select", "'best'", "informative")),
        (("--calibration", "sefl"), ("sefl", "did you mean 'self'?")),
        (("--calibration", "held_out"), ("evaluation only",)),
    ],
)
def test_mistakes_are_told_before_work(quantize, tmp_path, options, words):
    code, _, err = quantize(*options)
    assert code == 2
    for word in words:
        assert word in err
    assert not list(tmp_path.glob("out*"))
