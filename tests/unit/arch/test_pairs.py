"""Family.pairs: every family's neighbourhoods are what its blocks compute."""

import pytest

from compressor.arch import families
from compressor.arch.base import Pair

CONFIG = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "vocab_size": 32,
}
EXPECTED = (
    Pair("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "norm"),
    Pair("self_attn.v_proj", ("self_attn.o_proj",), "linear", heads=True),
    Pair("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), "norm"),
    Pair("mlp.up_proj", ("mlp.down_proj",), "linear"),
)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_pairs_of_llama_like_families(name):
    assert families()[name].pairs == EXPECTED
    assert families()[name].writers == ("self_attn.o_proj", "mlp.down_proj")
    assert families()[name].norm_kind == "rms"


@pytest.mark.parametrize("family", families().values(), ids=families())
def test_consumers_fit_their_source(family):
    dims = family.dims(CONFIG)
    linears = {linear.name: linear for linear in family.linears}
    norms = {norm.name: dims[norm.size] for norm in family.norms}
    for pair in family.pairs:
        width = norms[pair.source] if pair.kind == "norm" else dims[linears[pair.source].out]
        repeat = dims["heads"] // dims["kv_heads"] if pair.heads else 1
        assert pair.consumers
        assert {dims[linears[name].in_] for name in pair.consumers} == {width * repeat}, pair


@pytest.mark.parametrize("family", families().values(), ids=families())
def test_consumers_of_a_pair_share_their_input_alone(family):
    """Nothing else reads a source: its consumers are one whole group of ``inputs``."""
    for pair in family.pairs:
        assert pair.consumers in family.inputs
