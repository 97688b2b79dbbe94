"""``compress verify``: 0 whole, 1 damaged, 2 no model."""

import json
import shutil

from fixtures_artifacts import copy_without_manifest, file_of, overwrite

UP = "model.layers.1.mlp.up_proj"


def test_a_whole_artifact(compress, artifact, tiny_llama):
    code, out, err = compress("verify", artifact)
    assert (code, err) == (0, "")
    assert out == f"{artifact}: 21 tensors re-read, 0 compared with the source: whole\n"
    code, out, _ = compress("verify", artifact, "--against", tiny_llama, "--worst", 3)
    lines = out.splitlines()
    assert code == 0
    assert len(lines) == 5  # header, three tensors, verdict
    errors = [float(line.split()[-1]) for line in lines[1:4]]
    assert errors == sorted(errors, reverse=True)
    assert lines[4] == f"{artifact}: 21 tensors re-read, 21 compared with the source: whole"


def test_our_gguf(compress, artifact, tiny_llama):
    code, out, err = compress("verify", artifact.with_suffix(".gguf"), "--against", tiny_llama)
    assert code == 0, err
    assert "21 compared with the source: whole" in out


def test_a_changed_byte_fails_on_the_checksum(compress, artifact, tmp_path):
    copy = shutil.copytree(artifact, tmp_path / "copy")
    overwrite(copy, f"{UP}.weight_packed", b"\x00")
    code, out, err = compress("verify", copy)
    assert code == 1
    assert out.endswith(": damaged\n")
    assert f"{file_of(copy, f'{UP}.weight_packed').name}: its content changed" in err


def test_a_damaged_tensor_is_named_in_text_and_json(compress, artifact, tiny_llama, tmp_path):
    copy = copy_without_manifest(artifact, tmp_path / "copy")
    overwrite(copy, f"{UP}.weight_packed", bytes(4096))
    code, _, err = compress("verify", copy, "--against", tiny_llama)
    assert code == 1
    assert f"problem: {UP}.weight: relative error" in err
    code, out, err = compress("verify", copy, "--against", tiny_llama, "--json")
    found = json.loads(out)
    assert code == 1
    assert found["ok"] is False
    assert found["problems"][0].startswith(f"{UP}.weight: relative error")
    assert {t["name"] for t in found["tensors"]} >= {f"{UP}.weight", "lm_head.weight"}


def test_files_that_contradict_themselves(compress, artifact, tiny_llama, tmp_path):
    cut = shutil.copytree(tiny_llama, tmp_path / "cut")
    content = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(content[:-10])
    code, out, err = compress("verify", cut, "--json")
    assert code == 1
    assert "truncated" in json.loads(out)["problems"][0]
    assert "truncated" in err
    wrong = copy_without_manifest(artifact, tmp_path / "wrong")
    overwrite(wrong, f"{UP}.weight_shape", b"\x07" * 8)
    code, _, err = compress("verify", wrong)
    assert code == 1
    assert UP in err


def test_no_model_is_a_user_error(compress, artifact, tmp_path):
    code, out, err = compress("verify", tmp_path / "nothing")
    assert (code, out) == (2, "")
    assert "no such file or directory" in err
    code, out, err = compress("verify", artifact, "--against", tmp_path / "nothing")
    assert (code, out) == (2, "")
    assert "no such file or directory" in err
