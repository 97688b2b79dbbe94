"""What inspect finds in each kind of file."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from compressor.errors import CompressorError
from compressor.eval.contents import Stored, read_contents, totals


def test_totals_by_hand():
    found = totals([Stored("a", "int4 g32", (4, 32), 64 + 8), Stored("b", "BF16", (8,), 16)])
    assert found == {"tensors": 2, "weights": 136, "bytes": 88, "bits_per_weight": round(8 * 88 / 136, 4)}
    assert totals([])["bits_per_weight"] == 0


def test_a_model_directory(tiny_llama):
    found = read_contents(str(tiny_llama))
    size = (tiny_llama / "model.safetensors").stat().st_size
    assert found.kind == "Hugging Face directory"
    assert found.formats() == {"BF16": totals(found.tensors)}
    assert totals(found.tensors)["bits_per_weight"] == 16
    assert 0 < size - totals(found.tensors)["bytes"] < 4096  # the header is all there is besides
    assert found.metadata["hidden_size"] == 64
    assert found.metadata["model_type"] == "llama"
    assert found.files == ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert found.tokenizer == {
        "type": "BPE", "vocabulary": 256, "bos_id": 0, "eos_id": 1, "adds_bos": False, "chat_template": False,
    }  # fmt: skip


def test_an_artifact_counts_all_stored_parts(artifact, tiny_llama):
    found = read_contents(str(artifact))
    assert found.kind == "compressed-tensors (pack-quantized)"
    formats = found.formats()
    assert {name: group["tensors"] for name, group in formats.items()} == {
        "int4 g32": 12, "int8 channel": 2, "BF16": 7,
    }  # fmt: skip
    rows, columns = 64, 128  # down_proj: int8 codes, one BF16 scale per row, shape record
    assert formats["int8 channel"]["bytes"] == 2 * (rows * columns + 2 * rows + 16)
    assert formats["int4 g32"]["bits_per_weight"] == pytest.approx(4.5, abs=0.05)
    files = sum(path.stat().st_size for path in artifact.glob("*.safetensors"))
    assert 0 < files - totals(found.tensors)["bytes"] < 12_000
    assert totals(found.tensors)["weights"] == totals(read_contents(str(tiny_llama)).tensors)["weights"]
    assert found.metadata["made_from"] == str(tiny_llama)


def test_a_gguf(artifact):
    found = read_contents(str(artifact.with_suffix(".gguf")))
    assert found.kind == "GGUF v3"
    assert found.formats()["Q4_0"]["bits_per_weight"] == 4.5
    assert found.formats()["Q8_0"]["tensors"] == 2
    assert found.metadata["llama.embedding_length"] == 64
    assert found.metadata["tokenizer.ggml.tokens"] == "[256 items]"
    assert found.metadata["tokenizer.ggml.token_type"] == "[256 items]"
    assert found.tokenizer["vocabulary"] == 256
    assert found.tokenizer["splitting"] == "gpt-2"


def test_a_gguf_is_known_by_its_first_bytes(artifact, tmp_path):
    renamed = tmp_path / "model.bin"
    renamed.write_bytes(artifact.with_suffix(".gguf").read_bytes())
    assert read_contents(str(renamed)).kind == "GGUF v3"


def test_one_safetensors_file(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": np.zeros((2, 3), np.float16), "b": np.zeros(5, np.int8)}, path, metadata={"by": "hand"})
    found = read_contents(str(path))
    assert found.kind == "safetensors file"
    assert found.metadata == {"by": "hand"}
    assert {(t.name, t.format, t.shape, t.nbytes) for t in found.tensors} == {
        ("a", "F16", (2, 3), 12),
        ("b", "I8", (5,), 5),
    }


def test_hostile_and_missing_files_are_refused(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 64)
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 64)
    (tmp_path / "x.txt").write_text("hello")
    for name, words in [("x.safetensors", "header too long"), ("x.gguf", "x.gguf"), ("x.txt", "not a model")]:
        with pytest.raises(CompressorError, match=words):
            read_contents(str(tmp_path / name))
    with pytest.raises(CompressorError, match="no such file or directory"):
        read_contents(str(tmp_path / "nothing"))


@pytest.mark.usefixtures("demo_available")
def test_the_demo_model():
    found = read_contents("demo")
    assert found.formats()["Q4_1"] == {
        "tensors": 210, "weights": 106_168_320, "bytes": 66_355_200, "bits_per_weight": 5.0,
    }  # fmt: skip
    assert totals(found.tensors)["weights"] == 134_515_008
    assert found.tokenizer["vocabulary"] == 49152
    assert found.tokenizer["adds_bos"] is False
