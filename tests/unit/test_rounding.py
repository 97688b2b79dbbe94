"""The model runs only as far as some pass wants statistics."""

import shutil

import pytest

import compressor.calibration.walk as walk_module
from compressor.pipeline import Job, quantize

GPTQ_FIRST = """
rules:
  - {match: {role: ffn, layers: 0}, format: {bits: 4, group_size: 32}, passes: [gptq]}
  - {match: {role: [attention, ffn]}, format: {bits: 4, group_size: 32}, passes: [ptq_symmetric]}
"""
RTN = "rules:\n  - {match: {role: [attention, ffn]}, format: int8, passes: [ptq_symmetric]}\n"


@pytest.fixture
def walked(monkeypatch):
    """Blocks that were run, and the statistics that were gathered."""
    seen = {"blocks": [], "statistics": []}
    block, collect = walk_module.Walk.block, walk_module.Walk.collect
    monkeypatch.setattr(walk_module.Walk, "block", lambda s, n: seen["blocks"].append(n) or block(s, n))

    def spy(self, block, layer, streams, wanted=None, **more):
        found = collect(self, block, layer, streams, wanted, **more)
        seen["statistics"] += sorted(found)
        return found

    monkeypatch.setattr(walk_module.Walk, "collect", spy)
    return seen


@pytest.mark.parametrize(
    ("recipe", "blocks", "statistics"),
    [(GPTQ_FIRST, [0], ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]), (RTN, [], [])],
)
def test_blocks_nobody_asks_about_are_not_run(tiny_llama, tmp_path, walked, recipe, blocks, statistics):
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    (tmp_path / "r.yaml").write_text(recipe)
    job = Job(str(model), str(tmp_path / "r.yaml"), tmp_path / "out", samples=2, sequence_length=32)
    _, report = quantize(job)
    assert walked["blocks"] == blocks
    assert walked["statistics"] == statistics
    assert len(report.tensors) == 14
