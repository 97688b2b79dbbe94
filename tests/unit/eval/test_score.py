"""The lockstep walk's figures against transformers' own forward on tiny models."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor.calibration.data import load_tokenizer
from compressor.errors import CompressorError, GateFailed
from compressor.eval import score as module
from compressor.eval.score import evaluate, token_scores
from compressor.eval.windows import encode_text, make_windows
from compressor.models import open_model

TEXT = "On the east side of the island the sand turns red in the evening, and then no one is there. " * 4


def changed(source, target, change):
    """A copy of a tiny model whose weights ``change`` edits in place (a dict of tensors)."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def noisy_llama(tiny_llama, tmp_path_factory):
    def noise(tensors):
        torch.manual_seed(0)
        for name in (n for n in tensors if n.endswith("down_proj.weight")):
            tensors[name] += 0.05 * torch.randn_like(tensors[name])

    return changed(tiny_llama, tmp_path_factory.mktemp("noisy") / "model", noise)


def windows_of(path, context=32, protocol="llama.cpp", chunks=None):
    ids, bos = encode_text(load_tokenizer(open_model(str(path))), TEXT)
    return make_windows(ids, context=context, chunks=chunks, protocol=protocol, bos=bos)


def transformers_log_probabilities(path, windows):
    """float64 log-probabilities [n, vocab] at the scored positions, and the targets [n]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(input_ids=windows.tokens, use_cache=False).logits[:, windows.first : -1]
    flat = logits.reshape(-1, logits.shape[-1]).double()
    return torch.log_softmax(flat, -1).numpy(), windows.tokens[:, windows.first + 1 :].reshape(-1).numpy()


@pytest.mark.parametrize("protocol", ["llama.cpp", "gptq"])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_figure_equals_transformers(tiny_llama, noisy_llama, protocol, batch):
    windows = windows_of(tiny_llama, protocol=protocol)
    scores = token_scores(open_model(str(noisy_llama)), open_model(str(tiny_llama)), windows, batch=batch)
    q, targets = transformers_log_probabilities(noisy_llama, windows)
    p, _ = transformers_log_probabilities(tiny_llama, windows)
    rows = np.arange(len(targets))
    assert len(scores.nll) == len(targets) == windows.scored > 50
    assert scores.nll == pytest.approx(-q[rows, targets], abs=1e-4)
    assert scores.reference_nll == pytest.approx(-p[rows, targets], abs=1e-4)
    assert scores.kld == pytest.approx((np.exp(p) * (p - q)).sum(-1), abs=1e-4)
    assert scores.same_top.tolist() == (p.argmax(-1) == q.argmax(-1)).astype(float).tolist()
    assert scores.kld.mean() > 0.01  # the comparison is not of a model with itself
    assert 0 < scores.same_top.mean() < 1


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_other_families(tiny_model, family):
    path = tiny_model(family)
    windows = windows_of(path, chunks=2)
    log_p, targets = transformers_log_probabilities(path, windows)
    scores = token_scores(open_model(str(path)), None, windows)
    assert scores.nll == pytest.approx(-log_p[np.arange(len(targets)), targets], abs=1e-4)


def test_scoring_in_parts_changes_nothing(tiny_llama, noisy_llama, monkeypatch):
    """A vocabulary too large for one window at a time: 5 positions of 256 logits at once, then 15."""
    windows = windows_of(tiny_llama, chunks=3)
    models = open_model(str(noisy_llama)), open_model(str(tiny_llama))
    whole = token_scores(*models, windows)
    monkeypatch.setattr(module, "MAX_LOGITS", 5 * 256)
    parts = token_scores(*models, windows)
    for name in ("nll", "reference_nll", "kld", "same_top"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), abs=1e-5)


def test_a_model_against_itself(tiny_llama):
    model, seen = open_model(str(tiny_llama)), []
    found = evaluate(
        model,
        open_model(str(tiny_llama)),
        windows_of(tiny_llama, chunks=2),
        progress=lambda *step: seen.append(step),
    )
    assert found["kld"] == dict.fromkeys(("mean", "mean_error", "median", "p99", "p999", "max"), 0.0)
    assert (found["top1"], found["top1_error"]) == (1.0, 0.0)
    assert (found["ln_ppl_ratio"], found["ln_ppl_ratio_error"]) == (0.0, 0.0)
    assert found["perplexity"] == found["reference_perplexity"] > 1
    assert (found["chunks"], found["tokens"], found["context"]) == (2, 30, 32)
    assert [(stage, done, total) for stage, done, total in seen if done == total] == [
        ("evaluating blocks", 4, 4),
        ("scoring windows", 1, 1),
    ]


def test_figures_without_reference_are_plain_json(tiny_llama):
    found = evaluate(open_model(str(tiny_llama)), None, windows_of(tiny_llama, chunks=1))
    assert found["reference"] is None
    assert "kld" not in found
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_only_one_block_is_ever_in_memory(tiny_llama, monkeypatch):
    alive, most = set(), []
    load, drop = module.Walk.block, module.Walk.release

    def block(self, layer):
        alive.add((id(self), layer))
        most.append(len(alive))
        return load(self, layer)

    def release(self, block):
        alive.pop()
        drop(self, block)

    monkeypatch.setattr(module.Walk, "block", block)
    monkeypatch.setattr(module.Walk, "release", release)
    token_scores(open_model(str(tiny_llama)), open_model(str(tiny_llama)), windows_of(tiny_llama, chunks=1))
    assert most == [1, 1, 1, 1]


def test_vocabularies_must_agree(tiny_llama, tiny_model):
    other = tiny_model("llama", vocab_size=320)
    with pytest.raises(CompressorError, match="vocabularies differ"):
        token_scores(open_model(str(tiny_llama)), open_model(str(other)), windows_of(tiny_llama, chunks=1))


@pytest.mark.parametrize("role", ["target", "reference"])
def test_infinite_logits_name_the_model(tiny_llama, tmp_path, role):
    def overflow(tensors):
        tensors["model.norm.weight"].fill_(1e38)

    broken = changed(tiny_llama, tmp_path / "broken", overflow)
    models = [open_model(str(broken)), open_model(str(tiny_llama))]
    target, reference = models if role == "target" else reversed(models)
    with pytest.raises(GateFailed, match="broken: logits are NaN or infinite"):
        token_scores(target, reference, windows_of(tiny_llama, chunks=1))


def test_a_ruined_model_fails_with_its_figure(tiny_llama, tmp_path):
    def scale(tensors):
        tensors["model.norm.weight"].mul_(1e5)

    ruined = changed(tiny_llama, tmp_path / "ruined", scale)
    with pytest.raises(GateFailed, match="ruined: the model is ruined"):
        token_scores(open_model(str(ruined)), None, windows_of(tiny_llama, chunks=1))


@pytest.mark.usefixtures("demo_available")
def test_the_demo_model_predicts_english():
    text = (
        "The sun rises in the east and sets in the west. Water boils at one hundred degrees Celsius and "
        "freezes at zero. The capital of France is Paris, and the capital of Italy is Rome. "
    )
    model = open_model("demo")
    ids, bos = encode_text(load_tokenizer(model), text)
    assert bos is None
    found = evaluate(model, None, make_windows(ids, context=32, chunks=1, protocol="llama.cpp", bos=bos))
    assert found["tokens"] == 15
    assert 1.5 < found["perplexity"] < 12
    assert math.isfinite(found["perplexity_error"])
