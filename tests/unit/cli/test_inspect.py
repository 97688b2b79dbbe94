"""``compress inspect``: tables, JSON, refusals."""

import json

import numpy as np
from safetensors.numpy import save_file


def test_the_table_of_an_artifact(compress, artifact):
    code, out, err = compress("inspect", artifact)
    assert (code, err) == (0, "")
    assert f"{artifact}: compressed-tensors (pack-quantized)" in out
    assert "hidden_size: 64" in out
    assert "vocabulary: 256" in out
    assert "int4 g32" in out
    assert out.splitlines()[-1].startswith("21 tensors, 106,816 weights")
    assert "q_proj" not in out


def test_every_tensor_is_listed_on_request(compress, artifact):
    _, out, _ = compress("inspect", artifact, "--tensors")
    (line,) = [line for line in out.splitlines() if "layers.1.mlp.down_proj" in line]
    assert line.split() == ["model.layers.1.mlp.down_proj.weight", "int8", "channel", "64", "x", "128", "8,336"]


def test_json_is_pure_and_complete(compress, artifact):
    code, out, _ = compress("inspect", artifact.with_suffix(".gguf"), "--json", "--tensors")
    found = json.loads(out)
    assert code == 0
    assert found["kind"] == "GGUF v3"
    assert found["tensors"] == len(found["list"]) == 21
    assert found["bytes"] == sum(t["bytes"] for t in found["list"])
    assert json.loads(compress("inspect", artifact, "--json")[1])["list"] is None


def test_names_from_a_hostile_file_reach_no_terminal_as_commands(compress, tmp_path):
    path = tmp_path / "evil.safetensors"
    save_file({"[/red]\x1b[2J\nname": np.zeros(2, np.float32)}, path, metadata={"k": "\x1b]0;title\x07"})
    code, out, _ = compress("inspect", path, "--tensors")
    assert code == 0
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "[/red]\\x1b[2J\\nname" in out
    assert "\\x1b]0;title\\x07" in out


def test_refusals_are_one_error_with_exit_code_2(compress, tmp_path):
    (tmp_path / "cut.safetensors").write_bytes(b"\x08\x00\x00\x00")
    code, out, err = compress("inspect", tmp_path / "cut.safetensors")
    assert (code, out) == (2, "")
    assert "truncated safetensors file" in err
    code, out, err = compress("inspect", tmp_path / "nothing")
    assert (code, out) == (2, "")
    assert err.count("error:") == 1
