"""The shared fixtures are what they promise: loadable models with a matching tokenizer."""

import json

import pytest

from compressor.arch import families


@pytest.mark.parametrize("name", sorted(families()))
def test_every_family_has_a_tiny_model(tiny_model, name):
    from safetensors import safe_open

    folder = tiny_model(name)
    config = json.loads((folder / "config.json").read_text())
    expected = {key: item.shape for key, item in families()[name].tensors(config).items()}
    with safe_open(folder / "model.safetensors", "np") as file:
        found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        assert file.get_slice("model.norm.weight").get_dtype() == "BF16"
    assert found == expected


def test_the_tokenizer_round_trips_and_fits_the_vocabulary(tiny_llama):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    text = "The cat and the hat — naïve 猫 🐈\n  in\tthe end."
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < 256
    assert len(ids) < len(text.encode())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)


def test_models_are_cached_and_overridable(tiny_model):
    assert tiny_model("llama") == tiny_model("llama")
    deep = tiny_model("llama", num_hidden_layers=3)
    assert json.loads((deep / "config.json").read_text())["num_hidden_layers"] == 3
