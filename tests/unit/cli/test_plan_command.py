"""``compress plan``: the table, JSON, a bare config, what is not available yet."""

import json

import pytest

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


@pytest.fixture
def config_70b(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_70B))
    return path


def test_the_summary_of_a_70b_config(compress, config_70b):
    code, out, err = compress("plan", config_70b, "--recipe", "mixed_70b")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[2][:6] == ["320", "attention", "int4", "g128", "awq+ptq_symmetric", "attention_layers"]
    assert rows[2][7:] == ["12,079,595,520", "6,228,546,560", "4.125"]
    assert [row[1] for row in rows[1:6]] == ["embedding", "attention", "ffn", "lm_head", "norm"]
    assert f"{config_70b}: 66.816 GB of 141.107 GB (1/2.11), 7.576 bits per weight over all tensors" in out
    assert "predicted peak memory of quantize: " in out
    assert "GB  Hessians" in out
    assert "KV-CACHE is NOT AVAILABLE YET" in out
    assert "needs --substitute kv_cache=fp16" in out


def test_substitutions_reach_the_plan(compress, config_70b):
    more = ("--substitute", "awq=gptq", "--substitute", "kv_cache=fp16", "--json")
    _, out, _ = compress("plan", config_70b, "--recipe", "mixed_70b", *more)
    found = json.loads(out)
    assert found["source_bytes"] == 141_107_412_992
    assert found["bytes"] == sum(t["bytes"] for t in found["tensors"])
    assert found["peak_ram_bytes"] == sum(found["peak_parts"].values())
    assert {tuple(t["passes"]) for t in found["tensors"] if t["role"] == "attention"} == {("gptq",)}
    assert not any("NOT AVAILABLE" in note for note in found["notes"])


def test_every_tensor_is_listed_on_request(compress, tiny_llama):
    _, out, _ = compress("plan", tiny_llama, "--recipe", "demo", "--tensors")
    (line,) = [line for line in out.splitlines() if "layers.1.mlp.down_proj" in line]
    name, role, *_, weights, nbytes, bits = line.split()
    assert (name, role) == ("model.layers.1.mlp.down_proj.weight", "ffn")
    assert (weights, nbytes, bits) == ("8,192", "4,624", "4.516")


def test_a_directory_without_weights_is_planned_from_its_config(compress, config_70b):
    code, out, _ = compress("plan", config_70b.parent, "--recipe", "int8")
    assert code == 0
    assert "72.670 GB of 141.107 GB" in out


def test_markup_in_names_is_shown_as_it_is(compress, config_70b, tmp_path):
    recipe = tmp_path / "[red]x.yaml"
    recipe.write_text("rules:\n  - {match: ffn, format: int8}\n")
    _, out, _ = compress("plan", config_70b, "--recipe", recipe)
    assert "rule 1 ([red]x.yaml:2)" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--recipe", "mixed_70"), "did you mean 'mixed_70b'?"),
        (("--recipe", "int4", "--substitute", "awq=gptq"), "does not use awq"),
        (("--recipe", "mixed_70b", "--substitute", "awq"), "OLD=NEW"),
    ],
)
def test_mistakes_end_with_two(compress, config_70b, arguments, told):
    code, out, err = compress("plan", config_70b, *arguments)
    assert (code, out) == (2, "")
    assert told in err
