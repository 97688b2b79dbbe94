"""FP8 and int8 with quantized inputs from recipe to artifact, and every command on what comes out."""

import json
import shutil

import numpy as np
import pytest
import torch
from fixtures_artifacts import file_of, overwrite
from safetensors import safe_open

RECIPE = """\
rules:
  - {match: {modules: "*.down_proj"}, format: fp8_block}
  - {match: {modules: "*.o_proj"}, format: w8a8, passes: [ptq_symmetric]}
  - {match: attention, format: fp8_dynamic}
  - {match: {modules: "*.up_proj"}, format: {preset: int4, group_size: 32}, passes: [ptq_symmetric]}
  - {match: ffn, format: fp8_tensor}
"""
DOWN, UP = "model.layers.1.mlp.down_proj", "model.layers.0.mlp.up_proj"
LABELS = {
    "down_proj": "fp8 128x128", "o_proj": "int8 channel a8", "q_proj": "fp8 channel a8", "k_proj": "fp8 channel a8",
    "v_proj": "fp8 channel a8", "up_proj": "int4 g32", "gate_proj": "fp8 tensor",
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tiny_llama, tmp_path_factory):
    from compressor.pipeline import Job, quantize

    out = tmp_path_factory.mktemp("bytes") / "run"
    recipe = out.with_suffix(".yaml")
    recipe.write_text(RECIPE)
    quantize(Job(str(tiny_llama), str(recipe), out, samples=2, sequence_length=32))
    return out


def test_the_artifact_is_stored_as_engines_expect(made):
    section = json.loads((made / "config.json").read_text())["quantization_config"]
    assert section["format"] == "mixed-precision"
    assert {g["format"] for g in section["config_groups"].values()} == {
        "float-quantized", "int-quantized", "pack-quantized",
    }  # fmt: skip
    with safe_open(file_of(made, f"{DOWN}.weight"), "pt") as file:
        weight, scale = file.get_tensor(f"{DOWN}.weight"), file.get_tensor(f"{DOWN}.weight_scale")
    assert (weight.dtype, tuple(weight.shape)) == (torch.float8_e4m3fn, (64, 128))
    assert (scale.dtype, tuple(scale.shape)) == (torch.bfloat16, (1, 1))


def test_plan_predicts_the_bytes(compress, tiny_llama, made):
    code, out, _ = compress("plan", tiny_llama, "--recipe", made.with_suffix(".yaml"), "--json")
    planned = json.loads(out)
    found = json.loads(compress("inspect", made, "--json")[1])
    assert code == 0
    assert planned["bytes"] == found["bytes"]


def test_inspect_names_every_format(compress, made):
    found = json.loads(compress("inspect", made, "--json", "--tensors")[1])
    assert found["kind"] == "compressed-tensors (mixed-precision)"
    listed = {t["name"]: t for t in found["list"]}
    for linear, label in LABELS.items():
        names = [n for n in listed if n.endswith(f".{linear}.weight")]
        assert [listed[n]["format"] for n in names] == [label] * 2
    assert listed[f"{DOWN}.weight"]["bytes"] == 64 * 128 + 2


def test_verify_accepts_it_and_finds_damage(compress, tiny_llama, made, tmp_path):
    code, _, err = compress("verify", made, "--against", tiny_llama)
    assert (code, err) == (0, "")
    for damage, word in ((b"\x7f", "NaN"), (b"\x7e" * 64, "relative error")):
        broken = tmp_path / word.split()[0]
        shutil.copytree(made, broken)
        (broken / "compress_manifest.json").unlink()
        overwrite(broken, f"{DOWN}.weight", damage)
        code, out, err = compress("verify", broken, "--against", tiny_llama)
        assert code != 0
        assert DOWN in out + err
        assert word in out + err


def test_exports_repeat_it_and_carry_what_gguf_can(compress, made, tmp_path):
    from compressor.models import open_model

    code, _, _ = compress("export", made, "--format", "compressed-tensors", "--out", tmp_path / "again")
    assert code == 0
    ours, again = open_model(str(made)), open_model(str(tmp_path / "again"))
    assert again.specs == ours.specs
    np.testing.assert_array_equal(again.qtensor(f"{DOWN}.weight").codes, ours.qtensor(f"{DOWN}.weight").codes)

    gguf = tmp_path / "a.gguf"
    arguments = ("export", made, "--format", "gguf", "--out", gguf, "--pretokenizer", "gpt-2")
    code, out, err = compress(*arguments, "--strict")
    assert code != 0
    assert "no ggml block holds FP8 values" in out + err
    assert not gguf.exists()
    code, out, err = compress(*arguments)
    assert code == 0
    assert "llama.cpp quantizes them its own way" in out + err
    found = json.loads(compress("inspect", gguf, "--json", "--tensors")[1])
    kinds = {t["name"]: t["format"] for t in found["list"]}
    assert kinds["blk.1.ffn_down.weight"] == kinds["blk.0.attn_q.weight"] == "F16"
    assert (kinds["blk.0.ffn_up.weight"], kinds["blk.0.attn_output.weight"]) == ("Q4_0", "Q8_0")


def test_evaluation_rounds_inputs(compress, made, tiny_llama, tmp_path):
    """The same weights with the activations taken out of the config score differently."""
    plain = tmp_path / "plain"
    shutil.copytree(made, plain)
    (plain / "compress_manifest.json").unlink()
    config = json.loads((plain / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        if group["format"] == "float-quantized":
            group.pop("input_activations", None)
    (plain / "config.json").write_text(json.dumps(config))
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of a text that is scored. " for i in range(60)))
    scores = []
    for model in (made, plain):
        options = ("--reference", tiny_llama, "--text", text, "--context", 64, "--chunks", 4)
        code, _, err = compress("eval", model, *options, "--json", tmp_path / "scores.json")
        assert code == 0, err
        scores.append(json.loads((tmp_path / "scores.json").read_text())["kld"]["mean"])
    assert scores[0] > scores[1]
