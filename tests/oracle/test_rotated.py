"""Rotated models as foreign programs see them: transformers with compressed-tensors, and llama.cpp."""

import json

import numpy as np
import pytest
import torch
from llamacpp import LlamaCpp, require

from compressor.checkpoint.reader import open_checkpoint
from compressor.checkpoint.writer import RunDirectory
from compressor.errors import CompressorError
from compressor.models import open_model
from compressor.pipeline import Job, export_artifact, quantize

RECIPE = """
transforms: [{rotate: {kind: KIND, seed: 5}}]
rules:
  - match: {role: [attention, ffn]}
    format: int8
    passes: [gptq]
"""
KEEP = "transforms: [rotate]\nrules: [{match: {modules: '*'}, format: keep}]\n"
TOKENS = np.random.default_rng(1).integers(3, 256, 64).tolist()


def run(model, recipe, folder):
    path = folder / "r.yaml"
    path.write_text(recipe)
    return quantize(Job(str(model), str(path), folder / "out", samples=4, sequence_length=64))


def logits_of(model):
    with torch.inference_mode():
        return model.eval()(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].float().numpy()


def loaded(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def float_model(folder):
    """transformers' model of our own reading of an artifact."""
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = open_model(str(folder))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**checkpoint.config), dtype=torch.float32)
    state = {name: torch.from_numpy(checkpoint.read(name)) for name in checkpoint.tensors}
    model.load_state_dict(state)
    return model


def apart(found, expected):
    """Root mean square of the difference over the spread of the logits."""
    return float(np.sqrt(((found - expected) ** 2).mean()) / expected.std())


@pytest.mark.parametrize("kind", ["hadamard", "orthogonal"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_transformers_runs_a_rotated_artifact(tiny_model, tmp_path, family, kind):
    model = tiny_model(family, tie_word_embeddings=True)
    _, report = run(model, RECIPE.replace("KIND", kind), tmp_path)
    assert any("unties the head" in event.message for event in report.events)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    theirs = logits_of(loaded(tmp_path / "out"))
    ours, original = logits_of(float_model(tmp_path / "out")), logits_of(loaded(model))
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-4 * np.abs(ours).max())
    assert apart(ours, original) < 0.06  # int8 and one rounding to bf16; a wrong rotation is 1 or more apart
    assert report.facts["recipe"]["transforms"] == [{"rotate": {"kind": kind, "seed": 5, "values": True}}]


def test_a_rotated_model_kept_in_floats_is_the_model(tiny_model, tmp_path):
    model = tiny_model("llama", tie_word_embeddings=True)
    run(model, KEEP, tmp_path)
    assert 0 < apart(logits_of(loaded(tmp_path / "out")), logits_of(loaded(model))) < 0.02


def test_without_the_untied_head_it_would_show(tiny_model, tmp_path):
    """The tests above can fail: the head of a rotated model is not its embedding."""
    model = tiny_model("llama", tie_word_embeddings=True)
    run(model, KEEP, tmp_path)
    rotated = loaded(tmp_path / "out")
    rotated.lm_head.weight = rotated.model.embed_tokens.weight
    assert apart(logits_of(rotated), logits_of(loaded(model))) > 0.1


@pytest.mark.parametrize("overrides", [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_llama_cpp_runs_a_rotated_gguf(tiny_model, tmp_path, overrides):
    require()
    model = tiny_model("llama", **overrides)
    run(model, RECIPE.replace("KIND", "hadamard"), tmp_path)
    export_artifact(str(tmp_path / "out"), "gguf", tmp_path / "out.gguf")
    expected, original = logits_of(float_model(tmp_path / "out")), logits_of(loaded(model))
    with LlamaCpp(tmp_path / "out.gguf") as judge:
        found = judge.logits(TOKENS)
    assert apart(found, expected) < 0.05  # llama.cpp rounds activations to int8
    assert apart(found, original) < 0.08


def test_a_compressed_tensors_export_has_the_untied_head(tiny_model, tmp_path):
    run(tiny_model("llama", tie_word_embeddings=True), RECIPE.replace("KIND", "hadamard"), tmp_path)
    export_artifact(str(tmp_path / "out"), "compressed-tensors", tmp_path / "ct")
    model = loaded(tmp_path / "ct")
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    np.testing.assert_array_equal(logits_of(model), logits_of(loaded(tmp_path / "out")))


def test_the_same_bytes_twice(tiny_model, tmp_path):
    digests = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        run(tiny_model("llama"), RECIPE.replace("KIND", "orthogonal"), tmp_path / name)
        digests.append(json.loads((tmp_path / name / "out" / "compress_manifest.json").read_text())["sha256"])
    assert digests[0] == digests[1]


def test_an_interrupted_run_goes_on_to_the_same_bytes(tiny_model, tmp_path, monkeypatch):
    recipe, model, write = RECIPE.replace("KIND", "hadamard"), tiny_model("llama"), RunDirectory.write_shard

    def stops_at_the_second(self, name, tensors, facts):
        if name.startswith("model-00002"):
            raise KeyboardInterrupt
        write(self, name, tensors, facts)

    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    run(model, recipe, tmp_path / "whole")
    monkeypatch.setattr(RunDirectory, "write_shard", stops_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run(model, recipe, tmp_path / "broken")
    monkeypatch.undo()
    assert len(list((tmp_path / "broken" / "out.partial").glob("*.safetensors"))) == 1
    with pytest.raises(CompressorError, match=r"different: model .*recipe "):
        run(model, recipe.replace("seed: 5", "seed: 6"), tmp_path / "broken")
    run(model, recipe, tmp_path / "broken")
    sums = [
        json.loads((tmp_path / name / "out" / "compress_manifest.json").read_text())["sha256"]
        for name in ("whole", "broken")
    ]
    assert sums[0] == sums[1]


def test_a_gguf_source_can_be_rotated(tiny_model, tmp_path):
    """Biases, permuted rows and all: the view sits on any checkpoint."""
    from compressor.core.report import Report, no_progress
    from compressor.export import gguf

    model, path = tiny_model("llama", attention_bias=True), tmp_path / "m.gguf"
    checkpoint = open_checkpoint(str(model))
    report = Report(strict=True)
    gguf.export(checkpoint, path, pretokenizer=None, float_type="BF16", progress=no_progress, report=report)
    run(path, KEEP, tmp_path)
    assert apart(logits_of(loaded(tmp_path / "out")), logits_of(loaded(model))) < 0.02
