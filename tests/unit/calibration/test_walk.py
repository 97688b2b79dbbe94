"""The block-by-block walk computes what transformers computes, and gathers what flows in."""

import numpy as np
import pytest
import torch
from torch import nn

from compressor.arch import families
from compressor.calibration import linear as calibration_linear
from compressor.calibration import stats
from compressor.calibration.walk import FloatModel, Walk
from compressor.checkpoint.base import Checkpoint, TensorInfo
from compressor.core.tensors import RawTensor

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 128,
}


class InMemory(Checkpoint):
    """A transformers model as a Checkpoint."""

    def __init__(self, model):
        self.label, self.path, self.notes = "memory", None, []
        self.config = model.config.to_dict()
        self.state = {k: v.detach().numpy().copy() for k, v in model.state_dict().items()}
        self.tensors = {k: TensorInfo(k, "F32", v.shape, v.nbytes, "memory") for k, v in self.state.items()}

    def raw(self, name):
        value = self.state[name]
        return RawTensor("F32", value.shape, value.reshape(-1).view(np.uint8))

    def read(self, name):
        return self.state[name].copy()

    def side_files(self):
        return {}

    def fingerprint(self):
        return ""


def build(family, **overrides):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(family.model_types[0], **{**SIZES, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else nn.init.normal_(parameter, 1, 0.1)
    return model


def walk_through(walk, batches):
    streams = walk.embed(batches)
    for layer in range(walk.layers):
        block = walk.block(layer)
        walk.forward(block, layer, streams)
        walk.release(block)
    return streams


@pytest.mark.parametrize("name", sorted(families()))
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers(name, tied):
    family = families()[name]
    model = build(family, tie_word_embeddings=tied)
    batches = [torch.randint(0, 128, (2, 24)), torch.randint(0, 128, (1, 40))]
    walk = Walk(InMemory(model), family)
    streams = walk_through(walk, batches)
    for ids, hidden in zip(batches, streams, strict=True):
        with torch.inference_mode():
            expected = model(input_ids=ids, use_cache=False).logits
        assert torch.allclose(walk.logits(hidden), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(families()))
def test_sliding_window_and_long_rope_reach_the_blocks(name):
    family = families()[name]
    extra = {"sliding_window": 8} if name == "mistral" else {}
    rope = {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0}
    model = build(family, rope_parameters=rope, **extra)
    ids = torch.randint(0, 128, (1, 64))
    walk = Walk(InMemory(model), family)
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits
    assert torch.allclose(walk.logits(walk_through(walk, [ids])[0]), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(families()))
def test_statistics_are_the_inputs_second_moments(name):
    family = families()[name]
    model = build(family)
    batches = [torch.randint(0, 128, (2, 16)), torch.randint(0, 128, (1, 8))]
    seen: dict[str, list[torch.Tensor]] = {}
    block0 = model.get_submodule(family.block(0))
    for linear in family.linears:
        block0.get_submodule(linear.name).register_forward_pre_hook(
            lambda m, args, key=linear.name: seen.setdefault(key, []).append(args[0])
        )
    with torch.inference_mode():
        for ids in batches:
            model(input_ids=ids, use_cache=False)
    walk = Walk(InMemory(model), family)
    streams = walk.embed(batches)
    before = [s.clone() for s in streams]
    stats = walk.collect(walk.block(0), 0, streams)
    assert all(torch.equal(a, b) for a, b in zip(before, streams, strict=True))
    assert set(stats) == {linear.name for linear in family.linears}
    for key, inputs in seen.items():
        x = torch.cat([i.reshape(-1, i.shape[-1]) for i in inputs]).double()
        assert stats[key].tokens == 40
        size = (x * x).sum(0).sqrt()
        assert ((stats[key].hessian - x.T @ x).abs() <= 2e-5 * size[:, None] * size).all()
    for group in family.inputs:  # the family's claim: one tensor feeds the whole group
        for call in zip(*(seen[name] for name in group), strict=True):
            assert all(tensor is call[0] for tensor in call)


def test_family_shapes_equal_transformers():
    for name, family in families().items():
        for tied in (False, True):
            model = build(family, tie_word_embeddings=tied, attention_bias=name == "llama")
            expected = {k: tuple(v.shape) for k, v in model.state_dict().items()}
            if tied:
                expected.pop("lm_head.weight")
            got = {k: t.shape for k, t in family.tensors(model.config.to_dict()).items()}
            assert got == expected


def test_an_empty_token_set_and_wrong_ids_are_refused():
    family = families()["llama"]
    walk = Walk(InMemory(build(family)), family)
    with pytest.raises(Exception, match="token id out of range"):
        walk.embed([torch.tensor([[1, 128]])])


@pytest.mark.parametrize("name", sorted(families()))
def test_the_steps_make_the_block(name):
    family = families()[name]
    extra = {"sliding_window": 8} if name == "mistral" else {}
    walk = Walk(InMemory(build(family, **extra)), family)
    whole = walk.embed([torch.randint(0, 128, (2, 24)), torch.randint(0, 128, (1, 40))])
    stepped, block = list(whole), walk.block(0)
    walk.forward(block, 0, whole)
    assert len(family.residuals) == 2
    for step in range(len(family.residuals)):
        walk.forward(block, 0, stepped, step)
    for one, other in zip(whole, stepped, strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(families()))
def test_a_step_s_statistics_are_the_block_s(name):
    family = families()[name]
    walk = Walk(InMemory(build(family)), family)
    streams = walk.embed([torch.randint(0, 128, (2, 24))])
    block = walk.block(0)
    expected = walk.collect(block, 0, streams)
    for step, (_, module) in enumerate(family.residuals):
        wanted = [linear.name for linear in family.linears if linear.name.startswith(module + ".")]
        found = walk.collect(block, 0, streams, wanted, step=step)
        assert set(found) == set(wanted)
        for key, sums in found.items():
            assert torch.allclose(sums.hessian, expected[key].hessian, rtol=1e-4, atol=1e-3)
        walk.forward(block, 0, streams, step)


def test_the_float_model_runs_beside_and_advances_when_asked():
    family = families()["llama"]
    walk = Walk(InMemory(build(family)), family)
    ids = [torch.randint(0, 128, (2, 24))]
    rounded, exact = walk.embed(ids), walk.embed(ids)
    rounded[0] = rounded[0] + 0.1 * torch.randn_like(rounded[0])
    block = walk.block(0)
    before = exact[0].clone()
    alone = walk.collect(block, 0, rounded)["mlp.down_proj"]
    still = walk.collect(block, 0, rounded, exact=FloatModel(block, exact, advance=False))["mlp.down_proj"]
    assert torch.equal(exact[0], before)
    assert torch.allclose(still.hessian, alone.hessian)
    inputs = []
    for hidden in (exact[0], rounded[0]):
        with torch.inference_mode():
            seen, _ = walk._inputs(block, 0, None, hidden, ["mlp.down_proj"])
        inputs.append(seen["mlp.down_proj"].reshape(-1, 96))
    assert torch.allclose(still.cross, (inputs[0] - inputs[1]).T @ inputs[1], rtol=1e-4, atol=1e-3)
    walk.collect(block, 0, rounded, exact=FloatModel(block, exact, advance=True))
    assert torch.allclose(exact[0], walk.output(block, 0, before), atol=1e-5)


def test_bf16_is_asked_for_where_it_does_no_harm_and_given_back(monkeypatch):
    """Outputs that prove a fold, and everything after the walk, stay float32."""
    if not hasattr(torch.backends.mkldnn, "matmul"):
        pytest.skip("this torch has no such setting")
    monkeypatch.setattr(calibration_linear, "bf16_is_faster", lambda: True)
    before = torch.backends.mkldnn.matmul.fp32_precision
    seen, call = set(), Walk._call

    def noted(*args, **kwargs):
        seen.add(torch.backends.mkldnn.matmul.fp32_precision)
        return call(*args, **kwargs)

    monkeypatch.setattr(Walk, "_call", noted)
    family = families()["llama"]
    for wanted, expected in ((True, "bf16"), (False, before)):
        walk = Walk(InMemory(build(family)), family, bf16=wanted)
        streams, block = walk.embed([torch.randint(0, 128, (2, 24))]), walk.block(0)
        walk.collect(block, 0, streams)
        walk.forward(block, 0, streams)
        assert seen == {expected}
        seen.clear()
        walk.output(block, 0, streams[0])
        assert seen == {before}
        seen.clear()
    assert torch.backends.mkldnn.matmul.fp32_precision == before


@pytest.mark.parametrize("faster", [True, False])
def test_the_hessian_is_as_good_as_float32_however_it_is_summed(monkeypatch, faster):
    """Inputs with one channel a thousand times the others: rounding all of it to 2^-9 would drown them."""
    monkeypatch.setattr(stats, "bf16_is_faster", lambda: faster and calibration_linear.bf16_is_faster())
    monkeypatch.setattr(stats, "_PANEL", 40)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3000, 96, generator=generator)
    x[:, 7] = 1000 + x[:, 7]
    exact = x.double().T @ x.double()
    size = exact.diagonal().sqrt()
    for settle in (True, False):
        found = stats.LayerStats.empty(96)
        for part in x.split(500):
            found.add(part, settle=settle)
        found.settle()
        assert ((found.hessian - exact).abs() / (size[:, None] * size)).max() < 3e-5
        assert torch.equal(found.hessian, found.hessian.T)
