"""A recipe may end in trained scales: the artifact gets its name only then."""

import json
from dataclasses import replace

import pytest
from fixtures_codes import changed_copy

from compressor.errors import CompressorError
from compressor.export.compressed_tensors import ArtifactCheckpoint
from compressor.models import open_model
from compressor.pipeline import Job, quantize

RULES = (
    "rules:\n  - {match: {role: [attention, ffn]}, format: {bits: 3, group_size: 32}, passes: [ptq_symmetric]}\n"
)
TRAINED = "finish:\n  - distill_scales: {epochs: 2, lr: 0.01, checks: 2}\n" + RULES


def job_of(model, tmp_path, text, **more):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return Job(str(model), str(path), tmp_path / "out", samples=12, sequence_length=32, **more)


def test_the_codes_stay_and_the_history_is_told(tiny_llama, tmp_path):
    _, report = quantize(job_of(tiny_llama, tmp_path, TRAINED))
    assert any("distill_scales" in event.message for event in report.events)
    assert not (tmp_path / "out.rounded").exists()
    plain = tmp_path / "plain"
    plain.mkdir()
    quantize(job_of(tiny_llama, plain, RULES))
    trained, rounded = open_model(str(tmp_path / "out")), open_model(str(plain / "out"))
    assert isinstance(trained, ArtifactCheckpoint)
    name = "model.layers.0.mlp.up_proj.weight"
    assert (trained.qtensor(name).codes == rounded.qtensor(name).codes).all()
    told = json.loads((tmp_path / "out" / "report.json").read_text())
    assert told["facts"]["distill_scales"]["steps"] > 0
    _, again = quantize(job_of(tiny_llama, tmp_path, TRAINED))
    assert any("nothing to do" in event.message for event in again.events)


def test_another_run_at_out_is_refused_before_work(tiny_llama, tmp_path):
    quantize(job_of(tiny_llama, tmp_path, RULES))
    with pytest.raises(CompressorError, match="already exists, and is not this run"):
        quantize(job_of(tiny_llama, tmp_path, TRAINED))
    assert not (tmp_path / "out.rounded").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (TRAINED.replace("distill_scales", "distil_scales"), "unknown step 'distil_scales'"),
        (TRAINED.replace("epochs: 2", "epoch: 2"), "unknown option 'epoch'"),
        ("finish: [distill_scales, distill_scales]\n" + RULES, "stands twice"),
        ("finish: [distill_scales]\nrules:\n  - {match: ffn, format: keep}\n", "quantizes nothing"),
    ],
)
def test_mistakes_are_told_before_work(tiny_llama, tmp_path, text, why):
    with pytest.raises(CompressorError, match=why):
        quantize(job_of(tiny_llama, tmp_path, text))


def test_the_best_preset_trains_and_says_so(tiny_model, tmp_path):
    model = changed_copy(tiny_model("llama"), tmp_path / "m", "config.json")
    _, report = quantize(job_of(model, tmp_path, RULES, preset="best"))
    assert any("distill_scales" in event.message for event in report.events)
    with pytest.raises(CompressorError, match="too few windows"):
        quantize(replace(job_of(model, tmp_path, RULES, preset="best"), out=tmp_path / "x", samples=3))
