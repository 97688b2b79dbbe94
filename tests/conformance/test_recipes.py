"""What every shipped recipe owes, whichever files there are."""

import re

import pytest

from compressor.arch import families, find_family
from compressor.errors import CompressorError
from compressor.recipe.estimate import RunShape
from compressor.recipe.plan import make_plan
from compressor.recipe.schema import load_recipe, shipped_recipes

RECIPES = shipped_recipes()
SUBSTITUTES = {"mixed_70b": {"awq": "gptq", "kv_cache": "fp16"}}
LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
NEEDS_128 = {"gptq_int4_g128", "mixed_70b"}
every_recipe = pytest.mark.parametrize("name", sorted(RECIPES))


def plan(config, name, **substitutions):
    return make_plan(
        label="model",
        config=config,
        family=find_family(config, "model"),
        tensors=None,
        recipe=load_recipe(name, substitutions),
        run=RunShape(),
    )


def test_the_directory_is_not_empty():
    assert {"int4", "int8", "gptq_int4_g128", "mixed", "mixed_70b", "demo"} <= RECIPES.keys()


@every_recipe
def test_its_header_tells_what_it_is_for_and_its_true_sizes(name):
    comment = [line for line in RECIPES[name].read_text().splitlines() if line.startswith("#")]
    text = " ".join(line.lstrip("# ") for line in comment)
    assert "`compress plan" in text
    large = plan(LLAMA_70B, name)
    assert f"{large.nbytes / 1e9:.1f} GB of {large.source_nbytes / 1e9:.1f} GB" in text
    if name not in NEEDS_128:
        small = plan(SMOLLM2, name)
        assert f"{small.nbytes / 1e9:.3f} GB of {small.source_nbytes / 1e9:.3f} GB" in text


@every_recipe
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_it_plans_a_large_model(name, tied):
    found = plan({**LLAMA_70B, "tie_word_embeddings": tied}, name, **SUBSTITUTES.get(name, {}))
    assert len(found.quantized()) == 560
    assert {t.role for t in found.quantized()} == {"attention", "ffn"}
    assert all(t.passes and t.rule != "no rule" for t in found.quantized())
    assert not any("NOT AVAILABLE" in note for note in found.notes)
    assert any("lm_head" in note for note in found.notes) == (tied and name == "mixed_70b")


@every_recipe
def test_it_plans_the_embedded_model_or_says_why_not(name):
    if name in NEEDS_128:
        with pytest.raises(CompressorError, match="576 is not a multiple of group_size 128"):
            plan(SMOLLM2, name)
        return
    assert len(plan(SMOLLM2, name).quantized()) == 210


@every_recipe
@pytest.mark.parametrize("family", sorted(families()))
def test_it_plans_every_family(name, family):
    model_type = families()[family].model_types[0]
    config = {
        **LLAMA_70B,
        "model_type": model_type,
        "head_dim": 128,
        "num_hidden_layers": 5,
        "attention_bias": True,
    }
    found = plan(config, name)
    assert len(found.quantized()) == 35
    assert {t.role for t in found.tensors if t.spec is None} <= {"embedding", "lm_head", "norm", "other"}


def test_the_short_form_is_shipped_verbatim():
    body = re.sub(r"(?m)^#.*\n", "", RECIPES["mixed_70b"].read_text())
    assert body == (
        "quantization_config:\n"
        "  embedding_layer:\n    precision: fp16\n"
        "  attention_layers:\n    precision: int4\n    method: awq\n"
        "  ffn_layers:\n    precision: int8\n    method: ptq_symmetric\n"
        "  lm_head:\n    precision: fp16\n"
        "  kv_cache:\n    precision: int8\n"
    )
