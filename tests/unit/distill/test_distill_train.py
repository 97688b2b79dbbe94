"""The streamed backward against whole-model autograd; training that gains, stops, and repeats itself."""

import os
import subprocess
import sys

import pytest
import torch
from fixtures_artifacts import build_artifact
from transformers import AutoConfig, AutoModelForCausalLM

from compressor.arch import find_family
from compressor.calibration import linear
from compressor.calibration.walk import Walk
from compressor.core.report import no_progress
from compressor.distill.student import Student, Teacher
from compressor.distill.train import Options, Trainer, rate, schedule, split, teach
from compressor.errors import CompressorError
from compressor.models import open_model

HEAD_TOO = """
rules:
  - match: {role: [attention, ffn, lm_head]}
    format: {preset: int4, group_size: 32, symmetric: false}
    passes: [gptq]
"""


@pytest.fixture(autouse=True)
def _in_float32(monkeypatch):
    """Gradients are compared to more digits than bf16 products have."""
    monkeypatch.setattr(linear, "bf16_is_faster", lambda: False)


def a_trainer(artifact, reference, tokens, options=None, windows=None):
    source = open_model(str(artifact))
    family = find_family(source.config, "test")
    teacher = Teacher(reference, family)
    taught = teach(teacher, torch.cat(tokens.batches)[:windows], no_progress)
    return Trainer(Student(source, family), teacher, options or Options()), taught


def whole_model_gradients(trainer, reference, batch):
    """KLD and gradients by log factor, by torch through the complete model at once."""
    student = trainer.student
    source = student.checkpoint
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**source.config), dtype=torch.float32).eval()
    weights = {n: torch.from_numpy(source.read(n)) for n in source.tensors}
    for trained in student.trained.values():
        value = trained.value()
        tensor = source.qtensor(trained.name.replace("weight_scale", "weight"))
        if tensor is not None:
            levels = torch.from_numpy(tensor.codes).float().view(*value.shape, -1)
            if tensor.zeros is not None:
                levels = levels - torch.from_numpy(tensor.zeros).float()[..., None]
            value = (levels * value[..., None]).view(tensor.shape)
        weights[trained.name.replace("weight_scale", "weight")] = value
    logits = torch.func.functional_call(model, weights, (batch,), {"use_cache": False}).logits
    floats = {n: torch.from_numpy(reference.read(n)) for n in reference.tensors}
    with torch.no_grad():
        target = torch.func.functional_call(model, floats, (batch,), {"use_cache": False}).logits
    log_p = torch.log_softmax(target, -1)
    kld = (log_p.exp() * (log_p - torch.log_softmax(logits, -1))).sum(-1).mean()
    kld.backward()
    found = {n: t.log_factor.grad.clone() for n, t in student.trained.items()}
    for trained in student.trained.values():
        trained.log_factor.grad = None
    return kld.item(), found


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("head", [False, True], ids=["float head", "quantized head"])
def test_streamed_gradients_are_the_whole_models(family, head, tiny_model, tmp_path, tokens, monkeypatch):
    monkeypatch.setattr("fixtures_artifacts.export_artifact", lambda *a, **k: None)
    if head:
        monkeypatch.setattr("fixtures_artifacts.RECIPE", HEAD_TOO)
    folder = tiny_model(family)
    artifact, reference = build_artifact(folder, tmp_path / "run"), open_model(str(folder))
    trainer, taught = a_trainer(artifact, reference, tokens, windows=3)
    expected_kld, expected = whole_model_gradients(trainer, reference, taught.tokens)
    monkeypatch.setattr(trainer, "_update", lambda part_done: None)
    assert trainer.step(taught, 0.5) == pytest.approx(expected_kld, rel=1e-3)
    names = trainer.student.trained
    assert ("lm_head.weight_scale" in names) == head
    assert "model.norm.weight" in names
    for name, trained in names.items():
        scale = expected[name].abs().max()
        torch.testing.assert_close(trained.log_factor.grad, expected[name], rtol=0, atol=float(scale) * 2e-3)


def test_decoding_codes_leaves_torch_its_threads(artifact):
    """The first kernel of a process sets the number of threads for torch as well: hence a process of its own."""
    code = (
        "import sys, torch; from compressor.models import open_model; from compressor.arch import find_family;"
        "from compressor.distill.student import Student; source = open_model(sys.argv[1]);"
        "torch.set_num_threads(1);"
        "Student(source, find_family(source.config, '')); print(torch.get_num_threads())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(artifact)],
        env={**os.environ, "NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "1"


def test_before_training_the_student_is_the_artifact(artifact, reference, tokens):
    trainer, taught = a_trainer(artifact, reference, tokens, windows=4)
    walk = Walk(trainer.student.checkpoint, trainer.student.family)
    streams = walk.embed([taught.tokens])
    hidden = trainer.student.embedded(taught.tokens)
    with torch.no_grad():
        for layer in range(walk.layers):
            walk.forward(walk.block(layer), layer, streams)
            hidden = trainer.student.step_block(layer, hidden)
    torch.testing.assert_close(hidden, streams[0].clone(), rtol=1e-5, atol=1e-5)


def test_training_gains_and_keeps_the_best(artifact, reference, tokens):
    trainer, taught = a_trainer(artifact, reference, tokens, Options(lr=5e-3, epochs=2, checks=4))
    index = torch.arange(16)
    held_out = taught.part(index[12:])
    history = trainer.run(taught.part(index[:12]), held_out, no_progress)
    klds = [kld for _, kld in history.checks]
    assert history.steps == 24
    assert [step for step, _ in history.checks] == [0, 6, 12, 18, 24]
    assert klds[history.best] == min(klds)
    assert klds[history.best] < 0.8 * klds[0]
    assert trainer.check(held_out) == klds[history.best]


def test_a_rate_that_only_harms_ends_early_with_the_start(artifact, reference, tokens):
    options = Options(lr=1.0, norm_lr=1.0, epochs=3, checks=12, patience=2)
    trainer, taught = a_trainer(artifact, reference, tokens, options)
    index = torch.arange(16)
    history = trainer.run(taught.part(index[:12]), taught.part(index[12:]), no_progress)
    assert history.ended == "no gain on held-out windows"
    assert len(history.checks) == 3
    assert history.best == 0
    assert not any(t.log_factor.any() for t in trainer.trained)


def test_time_ends_training_gracefully(artifact, reference, tokens):
    trainer, taught = a_trainer(artifact, reference, tokens, Options(lr=1e-3, max_seconds=1e-6))
    index = torch.arange(16)
    history = trainer.run(taught.part(index[:12]), taught.part(index[12:]), no_progress)
    assert history.ended == "time was up"
    assert history.steps == 1
    assert [step for step, _ in history.checks] == [0, 1]


def test_windows_are_split_by_seed_without_overlap(tokens):
    training, held_out = split(tokens, 0)
    assert (len(training), len(held_out)) == (12, 4)
    rows = {tuple(row.tolist()) for row in torch.cat(tokens.batches)}
    assert {tuple(row.tolist()) for row in torch.cat([training, held_out])} == rows
    assert not torch.equal(split(tokens, 1)[1], held_out)
    few = type(tokens)([tokens.batches[0][:4]], 128, "", "")
    with pytest.raises(CompressorError, match="too little calibration text"):
        split(few, 0)


def test_the_schedule_visits_every_window_once_an_epoch():
    steps = schedule(10, Options(epochs=1.5, batch=4))
    assert [len(step) for step in steps] == [4, 4, 4, 3]
    numbers = torch.cat(steps)
    assert sorted(numbers[:10].tolist()) == list(range(10))
    assert len(set(numbers[10:].tolist())) == 5


def test_the_rate_rises_then_falls_to_zero():
    assert rate(0.05, 0.1) == pytest.approx(0.5)
    assert rate(0.1, 0.1) == 1.0
    assert rate(0.55, 0.1) == pytest.approx(0.5)
    assert rate(1.0, 0.1) == rate(3.0, 0.1) == 0.0
    assert rate(0.0, 0.0) == 1.0
