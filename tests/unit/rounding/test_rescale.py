"""Scales move between modules and the block computes what it computed."""

import numpy as np
import pytest
import torch

from compressor.arch import families
from compressor.calibration.walk import Walk
from compressor.checkpoint.reader import open_checkpoint
from compressor.core.plan import PassCall, PlannedTensor
from compressor.core.spec import Spec
from compressor.kernels.floats import round_to_dtype
from compressor.passes import awq, base
from compressor.rounding import rescale
from compressor.rounding.rescale import Rescaler, moved


def planned_of(family, walk, call, dtype="BF16", kept=()):
    """Every weight of block 0 as a plan would have it: linears int4 with one rescaling pass, norms kept."""
    found = {}
    for name, parameter in walk.block(0).named_parameters():
        module, _, kind = name.rpartition(".")
        if kind != "weight":
            continue
        linear = parameter.ndim == 2 and module not in kept
        spec = Spec(4, 16) if linear else None
        passes = (call, PassCall("ptq_symmetric", {})) if linear else ()
        found[module] = PlannedTensor(
            name, module, "ffn", 0, tuple(parameter.shape), dtype, 0, spec, passes, "rule", 0
        )
    return found


def set_up(tiny_model, name, call=None, **changes):
    family = families()[name]
    checkpoint = open_checkpoint(str(tiny_model(name, **changes)))
    walk = Walk(checkpoint, family)
    streams = walk.embed([torch.randint(3, 250, (3, 24), generator=torch.manual_seed(0))])
    block = walk.block(0)
    stats = walk.collect(block, 0, streams)
    dims = family.dims(checkpoint.config)
    call = call or PassCall("awq", {})
    planned = planned_of(family, walk, call)
    block = walk.block(0)
    rescaler = Rescaler(family, block, planned, stats, dims["heads"] // dims["kv_heads"], dims["head_dim"], "cpu")
    return walk, block, streams, rescaler


class Fixed:
    """A rescaling pass that returns wild scales, to see them folded."""

    KIND, NEEDS, PAIRS = "rescale", frozenset({"hessian"}), ("norm", "linear")

    class Options(base.PassOptions):
        pass

    @staticmethod
    def run(consumers, stats, source_of, options, device):
        channels = int(source_of.max()) + 1
        scales = np.exp(np.random.default_rng(channels).normal(0, 1, channels)).astype(np.float32)
        return base.Rescaled(scales, {})


@pytest.fixture
def fixed(monkeypatch):
    load = base.load
    monkeypatch.setattr(base, "load", lambda name: Fixed if name == "fixed" else load(name))
    return PassCall("fixed", {})


VARIANTS = [
    ("llama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {}),
]


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_wild_scales_on_every_pair_leave_the_block_as_it_was(tiny_model, fixed, name, changes):
    walk, block, streams, rescaler = set_up(tiny_model, name, fixed, **changes)
    before = walk.output(block, 0, streams[0])
    old = {key: value.clone() for key, value in block.state_dict().items()}
    folds = rescaler.run()
    after = walk.output(block, 0, streams[0])
    assert moved(before, after) < 1e-5
    assert len(folds.facts) == 4
    for key, value in block.state_dict().items():
        is_head_norm = "q_norm" in key or "k_norm" in key
        untouched = key.endswith("bias") and "v_proj" not in key and "up_proj" not in key
        assert torch.equal(value, old[key]) == (is_head_norm or untouched), key


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_statistics_after_the_folds_are_those_of_the_folded_block(tiny_model, fixed, name, changes):
    walk, block, streams, rescaler = set_up(tiny_model, name, fixed, **changes)
    folds = rescaler.run()
    measured = walk.collect(block, 0, streams)
    for key, stats in measured.items():
        scale = stats.hessian.diagonal().max()
        assert torch.allclose(folds.stats[key].hessian / scale, stats.hessian / scale, atol=1e-4), key
        assert torch.allclose(folds.stats[key].absmax, stats.absmax, rtol=1e-3), key


def test_norms_hold_what_their_dtype_holds(tiny_model, fixed):
    _, block, _, rescaler = set_up(tiny_model, "llama", fixed)
    folds = rescaler.run()
    assert set(folds.changed) == {"input_layernorm.weight", "post_attention_layernorm.weight"}
    for key, value in folds.changed.items():
        np.testing.assert_array_equal(value, round_to_dtype(value, "BF16"))
        np.testing.assert_array_equal(value, block.state_dict()[key].numpy())


def test_pairs_whose_readers_differ_or_whose_source_is_kept_stay(tiny_model, fixed):
    walk, block, streams, rescaler = set_up(tiny_model, "llama", fixed)
    kept = planned_of(rescaler.family, walk, fixed, kept=("self_attn.k_proj", "mlp.up_proj"))
    block = walk.block(0)
    rescaler.planned, rescaler.block = kept, block
    before = walk.output(block, 0, streams[0])
    folds = rescaler.run()
    assert list(folds.facts) == ["v_proj -> o_proj"]
    assert len(folds.notes) == 3
    assert moved(before, walk.output(block, 0, streams[0])) < 1e-5


def test_a_dead_norm_channel_survives(tiny_model, fixed):
    walk, block, streams, rescaler = set_up(tiny_model, "llama", fixed)
    with torch.no_grad():
        block.get_submodule("input_layernorm").weight[5] = 0
    before = walk.output(block, 0, streams[0])
    rescaler.run()
    after = walk.output(block, 0, streams[0])
    assert torch.isfinite(after).all()
    assert moved(before, after) < 1e-5


def test_grouped_query_channels_share_the_scale_of_their_value_channel(tiny_model):
    changes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}
    _, _, _, rescaler = set_up(tiny_model, "llama", None, **changes)
    pair = next(pair for pair in rescaler.family.pairs if pair.heads)
    expected = [*range(16), *range(16), *range(16, 32), *range(16, 32)]
    np.testing.assert_array_equal(rescaler._source_of(pair), expected)


def outliers(rows=48, columns=64, seed=0):
    """Statistics with a few loud inputs, and a weight whose columns are all alike."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((500, columns)).astype(np.float32)
    inputs[:, :4] *= 30
    from compressor.calibration.stats import LayerStats

    stats = LayerStats.empty(columns)
    stats.add(torch.from_numpy(inputs))
    return rng.standard_normal((rows, columns)).astype(np.float32), stats


@pytest.mark.parametrize("feedback", [False, True])
def test_awq_widens_loud_columns_and_the_true_loss_falls(feedback):
    weight, stats = outliers()
    spec = Spec(3, 64, scale_dtype="F32")
    consumer = base.Consumer(weight, spec, feedback)
    found = awq.run([consumer], stats, np.arange(64), awq.Options())
    assert found.scales[:4].min() > found.scales[4:].max()
    assert found.facts["loss_ratio"] < 0.95
    from compressor.passes import gptq, ptq_symmetric

    def loss(scales):
        scaled, after = weight * scales, stats.divided(torch.from_numpy(scales))
        if feedback:
            rounded = gptq.run(scaled, spec, after, gptq.Options())
        else:
            rounded = ptq_symmetric.run(scaled, spec, after, ptq_symmetric.Options())
        error = rounded.tensor.dequantize() / scales - weight
        return np.einsum("ri,ij,rj->", error, stats.hessian.numpy(), error)

    assert loss(found.scales) < 0.97 * loss(np.ones(64, np.float32))


def test_awq_leaves_alone_what_it_cannot_better():
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((64, 64)).astype(np.float32)
    from compressor.calibration.stats import LayerStats

    stats = LayerStats.empty(64)
    stats.add(torch.eye(64) * 8)
    found = awq.run([base.Consumer(weight, Spec(4, 32))], stats, np.arange(64), awq.Options(least_gain=0.05))
    assert found.scales is None


def test_labels():
    pair = families()["llama"].pairs[0]
    assert rescale.label(pair) == "input_layernorm -> q_proj, k_proj, v_proj"
