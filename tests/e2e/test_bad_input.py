"""Bad input through the real command: one clear error, exit code 2, nothing left behind."""

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

INT4 = """
rules:
  - match: {role: [attention, ffn]}
    format: {preset: int4, group_size: 32}
    passes: [ptq_symmetric]
"""


def compress(*arguments, env=None):
    command = [sys.executable, "-m", "compressor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "int4.yaml"
    path.write_text(INT4)
    return path


@pytest.fixture
def model(tiny_llama, tmp_path):
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def refused(result, out, *words):
    """Exit 2, one error block, no traceback, no output directory."""
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("error:") == 1
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr, result.stderr
    assert not out.exists()
    assert not out.with_name(out.name + ".partial").exists()


def quantize(model, recipe, out, *more):
    return compress("quantize", model, "--recipe", recipe, "--out", out, "--samples", 2, *more)


def weights(model):
    return next(model.glob("*.safetensors"))


def edit_tensor(path: Path, name: str, data: bytes):
    """Overwrite the start of one tensor in a safetensors file."""
    content = bytearray(path.read_bytes())
    (size,) = struct.unpack("<Q", content[:8])
    start = json.loads(content[8 : 8 + size])[name]["data_offsets"][0] + 8 + size
    content[start : start + len(data)] = data
    path.write_bytes(bytes(content))


def test_missing_model(recipe, tmp_path):
    refused(quantize(tmp_path / "nowhere", recipe, tmp_path / "out"), tmp_path / "out", "nowhere")


def test_directory_that_is_no_model(recipe, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(quantize(tmp_path / "empty", recipe, tmp_path / "out"), tmp_path / "out", "config.json")


def test_truncated_weights(model, recipe, tmp_path):
    file = weights(model)
    file.write_bytes(file.read_bytes()[:-100])
    refused(quantize(model, recipe, tmp_path / "out"), tmp_path / "out", file.name)


@pytest.mark.parametrize("bits", [b"\xc0\x7f", b"\x80\x7f"], ids=["nan", "inf"])
def test_nan_weight_is_named_before_any_output(model, recipe, tmp_path, bits):
    edit_tensor(weights(model), "model.layers.1.mlp.up_proj.weight", bits)
    result = quantize(model, recipe, tmp_path / "out")
    refused(result, tmp_path / "out", "model.layers.1.mlp.up_proj.weight", "NaN")


def test_unknown_architecture(model, recipe, tmp_path):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "lama"}))
    refused(quantize(model, recipe, tmp_path / "out"), tmp_path / "out", "'lama'", "did you mean 'llama'")


def test_recipe_typo_has_line_and_suggestion(model, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("rules:\n  - match: {role: atention}\n    formt: int4\n    format: int4\n")
    result = quantize(model, bad, tmp_path / "out")
    refused(result, tmp_path / "out", "bad.yaml:3", "did you mean 'format'", "did you mean 'attention'")


def test_group_sizes_that_do_not_divide_come_all_at_once(model, tmp_path):
    bad = tmp_path / "g48.yaml"
    bad.write_text(INT4.replace("group_size: 32", "group_size: 48"))
    result = quantize(model, bad, tmp_path / "out")
    refused(result, tmp_path / "out", "q_proj", "down_proj", "48", "16, 32, 64")
    assert result.stderr.count("not a multiple of group_size 48") == 7


@pytest.mark.parametrize("content", ["", "  \n\n \n"])
def test_empty_calibration_text(model, recipe, tmp_path, content):
    text = tmp_path / "empty.txt"
    text.write_text(content)
    result = quantize(model, recipe, tmp_path / "out", "--calibration", text)
    refused(result, tmp_path / "out", "empty.txt", "holds no text")


def test_output_that_holds_another_run_is_left_untouched(model, recipe, tmp_path):
    out = tmp_path / "out"
    assert quantize(model, recipe, out).returncode == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    other = tmp_path / "int8.yaml"
    other.write_text(INT4.replace("preset: int4, group_size: 32", "preset: int8"))
    result = quantize(model, other, out)
    assert result.returncode == 2
    assert "already holds another run" in result.stderr
    assert "recipe" in result.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    again = quantize(model, recipe, out)
    assert again.returncode == 0
    assert "nothing to do" in again.stderr


def test_foreign_directory_is_left_untouched(model, recipe, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("precious")
    result = quantize(model, recipe, out, "--fresh")
    assert result.returncode == 2
    assert "left untouched" in result.stderr
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


def test_quantizing_an_artifact_is_refused(model, recipe, tmp_path):
    assert quantize(model, recipe, tmp_path / "first").returncode == 0
    refused(quantize(tmp_path / "first", recipe, tmp_path / "out"), tmp_path / "out", "already quantized")


def test_unavailable_passes_are_refused_and_substituted(tiny_model, tmp_path):
    wide = {"hidden_size": 128, "head_dim": 32}
    model, out = tiny_model("llama", **wide), tmp_path / "out"
    refused(quantize(model, "mixed_70b", out), out, "KV-cache", "--substitute kv_cache=fp16")
    run = quantize(model, "mixed_70b", out, "--substitute", "awq=gptq", "--substitute", "kv_cache=fp16")
    assert run.returncode == 0, run.stderr
    assert "awq substituted by gptq" in run.stderr


def test_full_disk_while_writing(model, recipe, tmp_path):
    """A size limit on files stands in for a disk that fills up while writing."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000));"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "from compressor.cli.app import main; sys.argv[1:] = sys.argv[1:]; main()"
    )
    command = [sys.executable, "-c", code, "quantize", model, "--recipe", recipe, "--samples", 2]
    out = tmp_path / "out"
    result = subprocess.run([*map(str, command), "--out", str(out)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 2, result.stderr
    assert "disk" in result.stderr
    assert "Traceback" not in result.stderr
    assert not out.exists()


def test_strange_options_are_user_errors(model, recipe, tmp_path):
    out = tmp_path / "out"
    refused(quantize(model, recipe, out, "--export", "ggml"), out, "--export ggml")
    refused(quantize(model, recipe, out, "--substitute", "awq"), out, "OLD=NEW")
    refused(quantize(model, recipe, out, "--substitute", "awq=gptq"), out, "does not use awq")
    refused(quantize(model, recipe, out, "--device", "cuda:7"), out, "cuda:7")
    refused(quantize(model, tmp_path / "nope.yaml", out), out, "no such recipe")


def test_output_inside_the_model_is_refused(model, recipe):
    result = quantize(model, recipe, model / "int4")
    refused(result, model / "int4", "lies inside the model")


def test_strict_refuses_at_the_first_run_and_again_on_a_finished_one(model, tmp_path):
    gptq = tmp_path / "gptq.yaml"
    gptq.write_text(INT4.replace("ptq_symmetric", "gptq").replace("group_size: 32", "group_size: 16"))
    out = tmp_path / "out"
    refused(quantize(model, gptq, out, "--export", "gguf", "--strict"), out, "not a multiple of 32")
    assert quantize(model, gptq, out).returncode == 0
    report = json.loads((out / "report.json").read_text())
    report["events"].append({"message": "rounded to nearest", "tensor": "x", "degraded": True})
    (out / "report.json").write_text(json.dumps(report))
    again = quantize(model, gptq, out)
    assert again.returncode == 0
    assert "degraded: x: rounded to nearest" in again.stderr
    assert quantize(model, gptq, out, "--strict").returncode == 2


def test_exports_can_be_repeated(model, recipe, tmp_path):
    out = tmp_path / "out"
    for _ in range(2):
        result = quantize(model, recipe, out, "--export", "gguf,compressed-tensors", "--json")
        assert result.returncode == 0, result.stderr
        assert set(json.loads(result.stdout)["exports"]) == {"gguf", "compressed-tensors"}
    (tmp_path / "out-compressed-tensors" / "config.json").write_text("{}")
    result = quantize(model, recipe, out, "--export", "compressed-tensors")
    assert result.returncode == 2
    assert "is not this export" in result.stderr
