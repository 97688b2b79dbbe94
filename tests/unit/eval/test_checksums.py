"""Files against their headers and an artifact's manifest."""

import json
import shutil

import pytest

from compressor.eval.checksums import check_files


@pytest.fixture
def copy(artifact, tmp_path):
    return shutil.copytree(artifact, tmp_path / "copy")


def test_whole_files_have_no_problems(artifact, tiny_llama):
    assert check_files(artifact) == check_files(tiny_llama) == check_files(artifact.with_suffix(".gguf")) == []
    assert check_files(artifact / "nothing-here") == []


@pytest.mark.parametrize(
    "name", ["model-00002-of-00003.safetensors", "config.json", "tokenizer.json", "report.json"]
)
def test_one_flipped_bit_is_found(copy, name):
    content = bytearray((copy / name).read_bytes())
    content[-2] ^= 4
    (copy / name).write_bytes(content)
    assert check_files(copy) == [f"{name}: its content changed since it was written"]


def test_missing_and_extra_files_are_found(copy):
    (copy / "model-00001-of-00003.safetensors").rename(copy / "other.safetensors")
    assert check_files(copy) == [
        "model-00001-of-00003.safetensors: missing",
        "other.safetensors: not in the manifest",
    ]


def test_a_truncated_file_without_manifest(tiny_llama, artifact, tmp_path):
    copy = shutil.copytree(tiny_llama, tmp_path / "copy")
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[:-1])
    (found,) = check_files(copy)
    assert "truncated" in found
    assert f"got: {len(content) - 1} bytes; expected: {len(content)} bytes" in found
    (tmp_path / "short.gguf").write_bytes(artifact.with_suffix(".gguf").read_bytes()[:-1])
    (found,) = check_files(tmp_path / "short.gguf")
    assert "short.gguf" in found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("{}", "holds no checksums"),
        ('{"sha256": [1]}', "holds no checksums"),
        (json.dumps({"sha256": {"../secret": "0"}}), "a file outside the directory"),
        (json.dumps({"sha256": {"/etc/passwd": "0"}}), "a file outside the directory"),
    ],
)
def test_a_damaged_or_hostile_manifest(copy, text, words):
    (copy / "compress_manifest.json").write_text(text)
    assert words in check_files(copy)[0]
