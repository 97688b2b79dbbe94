"""Model directories: what is read, what is carried, what is refused."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from compressor.checkpoint.reader import open_checkpoint
from compressor.checkpoint.safetensors import SafetensorsCheckpoint
from compressor.errors import CompressorError, Problems


def folder(tmp_path, arrays, config=None):
    (tmp_path / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    if arrays:
        save_file(arrays, tmp_path / "model.safetensors")
    return tmp_path


def sharded(tmp_path, shards, weight_map=None):
    folder(tmp_path, {})
    for file, arrays in shards.items():
        save_file(arrays, tmp_path / file)
    if weight_map is None:
        weight_map = {name: file for file, arrays in shards.items() for name in arrays}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_values_equal_the_librarys(tiny_llama):
    import torch
    from safetensors.torch import load_file as load_torch

    checkpoint = open_checkpoint(tiny_llama)
    expected = load_torch(tiny_llama / "model.safetensors")
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        raw, values = checkpoint.raw(name), checkpoint.read(name)
        assert (raw.dtype, raw.shape) == ("BF16", tuple(tensor.shape))
        assert np.array_equal(raw.data, tensor.view(torch.uint8).numpy().reshape(-1))
        assert np.array_equal(values, tensor.float().numpy())
        assert values.flags.writeable
        assert values.flags.c_contiguous
        assert checkpoint.tensors[name].stored_as is None


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_other_float_dtypes(tmp_path, dtype):
    array = np.linspace(-3, 3, 12).reshape(3, 4).astype(dtype)
    checkpoint = SafetensorsCheckpoint(folder(tmp_path, {"w": array}))
    assert np.array_equal(checkpoint.read("w"), array.astype(np.float32))


def test_integers_are_delivered_raw_but_not_as_floats(tmp_path):
    checkpoint = SafetensorsCheckpoint(folder(tmp_path, {"codes": np.arange(6, dtype=np.int32)}))
    assert np.array_equal(checkpoint.raw("codes").data.view("<i4"), np.arange(6))
    with pytest.raises(CompressorError, match="codes: not a float tensor"):
        checkpoint.read("codes")
    with pytest.raises(KeyError):
        checkpoint.read("nothing")


def test_bad_values_are_named_and_placed(tmp_path):
    weight = np.zeros((5, 7), np.float32)
    weight[3, 4], weight[4, 0] = np.nan, -np.inf
    vector = np.array([1, 2, np.inf], np.float16)
    checkpoint = SafetensorsCheckpoint(folder(tmp_path, {"model.layers.3.w": weight, "v": vector}))
    with pytest.raises(CompressorError) as caught:
        checkpoint.read("model.layers.3.w")
    first = "model.layers.3.w: 2 values are NaN or infinite (first at row 3, column 4)"
    assert str(caught.value).startswith(first)
    with pytest.raises(CompressorError, match=r"v: 1 value is NaN or infinite \(first at index 2\)"):
        checkpoint.read("v")


def test_shards_are_one_model(tmp_path):
    a, b = np.ones((2, 2), np.float32), np.full(3, 2, np.float32)
    path = sharded(tmp_path, {"m-1.safetensors": {"a": a}, "m-2.safetensors": {"b": b}})
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors["b"].file == "m-2.safetensors"
    assert np.array_equal(checkpoint.read("a"), a)
    assert np.array_equal(checkpoint.read("b"), b)


ARRAY = np.ones(2, np.float32)
BAD_INDEXES = {
    "absolute": ({"a": "/etc/x.safetensors"}, "is not allowed"),
    "parent": ({"a": "../m-1.safetensors"}, "is not allowed"),
    "parent inside": ({"a": "x/../../m-1.safetensors"}, "is not allowed"),
    "backslash": ({"a": "..\\m-1.safetensors"}, "is not allowed"),
    "no weights": ({"a": "config.json"}, "is not allowed"),
    "no string": ({"a": 3}, "is not allowed"),
    "missing shard": ({"a": "m-1.safetensors", "b": "m-9.safetensors"}, "shard m-9.safetensors is missing"),
    "missing tensor": ({"a": "m-1.safetensors", "z": "m-1.safetensors"}, "z is not in m-1.safetensors"),
    "wrong shard": (
        {"a": "m-2.safetensors", "b": "m-2.safetensors", "x": "m-1.safetensors"},
        "a is not in m-2",
    ),
    "empty": ({}, "no weight_map"),
}


@pytest.mark.parametrize("case", BAD_INDEXES)
def test_bad_indexes_are_refused(tmp_path, case):
    weight_map, message = BAD_INDEXES[case]
    shards = {"m-1.safetensors": {"a": ARRAY}, "m-2.safetensors": {"b": ARRAY}}
    with pytest.raises(CompressorError) as caught:
        open_checkpoint(sharded(tmp_path, shards, weight_map))
    assert message in str(caught.value)


def test_a_tensor_in_two_shards_is_refused_and_all_problems_are_told(tmp_path):
    shards = {"m-1.safetensors": {"a": ARRAY, "c": ARRAY}, "m-2.safetensors": {"a": ARRAY, "c": ARRAY}}
    weight_map = {"a": "m-1.safetensors", "c": "m-2.safetensors"}
    with pytest.raises(Problems) as caught:
        open_checkpoint(sharded(tmp_path, shards, weight_map))
    assert "a is in two shards" in str(caught.value)
    assert "c is in two shards" in str(caught.value)


def test_every_other_file_is_carried(tmp_path, tiny_llama):
    path = tmp_path / "model"
    shutil.copytree(tiny_llama, path)
    carried = {
        "tokenizer.model": b"\x00\x01", "chat_template.jinja": b"{{ x }}", "modeling_x.py": b"pass",
        "README.md": b"# x", "sub/notes.txt": b"n", ".gitattributes": b"a", "LICENSE": b"l",
    }  # fmt: skip
    dropped = (
        "pytorch_model.bin", "old.pt", "x.gguf", "original/consolidated.00.pth", "report.json",
        "pytorch_model.bin.index.json", "compress_manifest.json", ".git/config", ".cache/x",
    )  # fmt: skip
    for name in (*carried, *dropped):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(carried.get(name, b"{}"))
    blob = tmp_path / "blob"
    blob.write_bytes(b"linked")
    (path / "merges.txt").symlink_to(blob)
    files = open_checkpoint(path).side_files()
    usual = {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "merges.txt"}
    assert set(files) == {*carried, *usual}
    assert files["merges.txt"] == blob
    assert {name: files[name].read_bytes() for name in carried} == carried


def test_the_fingerprint_follows_content_and_config(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"small": rng.random((10, 10), np.float32), "large": rng.random((3 << 18,), np.float32)}
    path = folder(tmp_path, arrays)
    first = open_checkpoint(path).fingerprint()
    assert open_checkpoint(path).fingerprint() == first
    seen = {first}
    for name, index in (("small", (9, 9)), ("large", 1 << 18)):
        changed = {key: value.copy() for key, value in arrays.items()}
        changed[name][index] += 1
        folder(tmp_path, changed)
        seen.add(open_checkpoint(path).fingerprint())
    folder(tmp_path, arrays, {"model_type": "llama", "rope_theta": 3.0})
    seen.add(open_checkpoint(path).fingerprint())
    folder(tmp_path, {"other": arrays["small"], "large": arrays["large"]})
    seen.add(open_checkpoint(path).fingerprint())
    assert len(seen) == 5


def test_fingerprint_by_its_definition(tmp_path):
    import hashlib

    array = np.arange(3 << 18, dtype=np.float32)  # 3 MiB
    path = folder(tmp_path, {"w": array}, {"model_type": "llama"})
    data, step = array.tobytes(), 1 << 20
    samples = b"".join(data[start : start + 4096] for start in range(0, len(data), step))
    text = b'{"model_type": "llama"}' + b"w F32 (786432,)\0" + samples
    assert open_checkpoint(path).fingerprint() == hashlib.sha256(text).hexdigest()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no config.json"),
        ({"config.json": "{"}, "config.json is not valid JSON"),
        ({"config.json": "[1]"}, "not a JSON object"),
        ({"config.json": '{"a":1,"a":2}'}, "'a' twice"),
        ({"config.json": "{}"}, "no weight files"),
        ({"config.json": "{}", "pytorch_model.bin": "x"}, "save it as safetensors"),
        ({"config.json": "{}", "x.gguf": "x"}, "pass the .gguf file"),
        (
            {"config.json": "{}", "model-00001-of-00002.safetensors": "x"},
            "model.safetensors.index.json and",
        ),
        ({"config.json": "{}", "model.safetensors": "x"}, "truncated"),
    ],
)
def test_unusable_directories(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CompressorError) as caught:
        open_checkpoint(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_quantized_input_opens_raw_and_says_so(tmp_path):
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}
    checkpoint = open_checkpoint(folder(tmp_path, {"w.qweight": np.zeros((2, 2), np.int32)}, config))
    assert checkpoint.config["quantization_config"] == {"quant_method": "gptq"}
    assert checkpoint.tensors["w.qweight"].dtype == "I32"


def test_reading_leaves_the_file_alone(tiny_llama):
    before = (tiny_llama / "model.safetensors").read_bytes()
    values = open_checkpoint(tiny_llama).read("model.norm.weight")
    values[:] = 0
    assert (tiny_llama / "model.safetensors").read_bytes() == before
