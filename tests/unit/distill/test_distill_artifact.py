"""The written copy: same codes, values as validated, every other byte as before; refusals before any work."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from compressor.arch import find_family
from compressor.calibration.walk import Walk
from compressor.distill import artifact as module
from compressor.distill.artifact import distill_scales
from compressor.distill.train import Options, split
from compressor.errors import CompressorError, GateFailed
from compressor.eval.checksums import check_manifest
from compressor.models import open_model

OPTIONS = Options(lr=5e-3, checks=2)


@pytest.fixture(scope="module")
def distilled(artifact, reference, tokens, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "better"
    return out, distill_scales(artifact, reference, tokens, out, OPTIONS)


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def logits(checkpoint, windows):
    walk = Walk(checkpoint, find_family(checkpoint.config, "test"))
    streams = walk.embed([windows])
    for layer in range(walk.layers):
        walk.forward(walk.block(layer), layer, streams)
    return torch.log_softmax(walk.logits(streams[0]), -1)


def test_codes_stay_and_scales_and_norms_move(artifact, distilled):
    before, after = open_model(str(artifact)), open_model(str(distilled[0]))
    moved = set()
    for name in before.source.tensors:
        old, new = before.source.raw(name), after.source.raw(name)
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
        if not np.array_equal(old.data, new.data):
            moved.add(name)
    scales = {n for n in before.source.tensors if n.endswith("weight_scale")}
    norms = {n for n in before.source.tensors if "norm" in n}
    assert moved <= scales | norms
    assert len(moved & scales) == len(scales) == 14
    assert moved & norms
    assert after.specs == before.specs


def test_the_figure_told_is_the_written_models(artifact, reference, distilled, tokens):
    out, facts = distilled
    _, held_out = split(tokens, OPTIONS.seed)
    log_p = logits(reference, held_out)
    for folder, told in ((artifact, facts["kld_before"]), (out, facts["kld_after"])):
        gap = log_p - logits(open_model(str(folder)), held_out)
        assert (log_p.exp() * gap).sum(-1).mean().item() == pytest.approx(told, rel=1e-3)
    assert facts["improved"]
    assert facts["kld_after"] < 0.9 * facts["kld_before"]
    assert (facts["windows"], facts["held_out"], facts["steps"]) == (12, 4, 12)


def test_every_other_file_is_the_artifacts_and_the_manifest_holds(artifact, distilled):
    before, after = files(artifact), files(distilled[0])
    assert before.keys() == after.keys()
    differing = {name for name in before if before[name] != after[name]}
    told = {"compress_manifest.json", "report.json"}
    assert told <= differing
    assert all(name in told or name.endswith(".safetensors") for name in differing)
    assert check_manifest(distilled[0]) == []
    old, new = json.loads(before["compress_manifest.json"]), json.loads(after["compress_manifest.json"])
    assert old["key"].items() < new["key"].items()
    report = json.loads(after["report.json"])
    assert report["facts"]["distill_scales"]["kld_after"] == distilled[1]["kld_after"]
    assert report["tensors"] == json.loads(before["report.json"])["tensors"]


def test_twice_the_same_bytes(artifact, reference, tokens, distilled, tmp_path):
    distill_scales(artifact, reference, tokens, tmp_path / "again", OPTIONS)
    assert files(tmp_path / "again") == files(distilled[0])


def test_without_gain_the_weights_are_the_artifacts(artifact, reference, tokens, tmp_path):
    options = Options(lr=1.0, norm_lr=1.0, checks=1)
    facts = distill_scales(artifact, reference, tokens, tmp_path / "same", options)
    assert not facts["improved"]
    assert facts["kld_after"] == facts["kld_before"]
    before, after = files(artifact), files(tmp_path / "same")
    assert all(before[name] == after[name] for name in before if name.endswith(".safetensors"))
    assert check_manifest(tmp_path / "same") == []


def test_an_artifact_without_manifest_gets_none(artifact, reference, tokens, tmp_path):
    plain = Path(shutil.copytree(artifact, tmp_path / "plain"))
    (plain / "compress_manifest.json").unlink()
    (plain / "report.json").unlink()
    distill_scales(plain, reference, tokens, tmp_path / "out", replace(OPTIONS, epochs=0.1))
    assert files(plain).keys() == files(tmp_path / "out").keys()


def test_a_failed_proof_leaves_nothing(artifact, reference, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_patch", lambda file, values: None)
    with pytest.raises(GateFailed, match="read back differently"):
        distill_scales(artifact, reference, tokens, tmp_path / "out", replace(OPTIONS, epochs=0.3))
    assert list(tmp_path.iterdir()) == []


def test_refusals_come_before_work(artifact, tiny_model, reference, tokens, tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("work began")

    monkeypatch.setattr(module, "teach", never)

    def refused(match, artifact=artifact, reference=reference, out=tmp_path / "out", options=OPTIONS):
        with pytest.raises(CompressorError, match=match):
            distill_scales(artifact, reference, tokens, out, options)

    refused("already exists", out=artifact)
    refused("lies inside the model", out=artifact / "deeper" / "out")
    refused("has no integer codes", artifact=reference.path)
    refused("is quantized", reference=open_model(str(artifact)))
    refused("was not made of", reference=open_model(str(tiny_model("llama", num_hidden_layers=3))))
    refused("was not made of", reference=open_model(str(tiny_model("qwen3"))))
    refused("--epochs must be above 0", options=replace(OPTIONS, epochs=0))
    refused("--max-seconds must be above 0", options=replace(OPTIONS, max_seconds=-1.0))
    refused("--lr: no usable", options=replace(OPTIONS, lr=float("nan")))
