import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from compressor.checkpoint.safetensors import INDEX, SafetensorsCheckpoint
from compressor.core.spec import Spec
from compressor.core.tensors import QTensor, RawTensor
from compressor.errors import CompressorError, GateFailed, Problems
from compressor.export import compressed_tensors as ct
from compressor.kernels.floats import round_to_dtype

INT4 = Spec(4, 32)
INT8 = Spec(8, -1)
GROUPS = (8, -1, 0)


def random_tensor(spec: Spec, out: int, in_: int, seed: int = 0) -> QTensor:
    """Codes over the full range, extremes included."""
    rng = np.random.default_rng(seed)
    shape = spec.scales_shape(out, in_)
    if spec.kind == "float":
        codes = rng.choice([c for c in range(256) if c & 0x7F != 0x7F], (out, in_)).astype(np.uint8)
    else:
        codes = rng.integers(spec.qmin, spec.qmax + 1, (out, in_)).astype(np.int8)
        codes.flat[:2] = spec.qmin, spec.qmax
    scales = round_to_dtype(rng.uniform(0.001, 1, shape).astype(np.float32), spec.scale_dtype)
    zeros = None if spec.symmetric else rng.integers(spec.qmin, spec.qmax + 1, shape).astype(np.int8)
    return QTensor(codes, scales, zeros, spec)


def assert_equal(a: QTensor, b: QTensor) -> None:
    assert a.spec == b.spec
    np.testing.assert_array_equal(a.codes, b.codes)
    np.testing.assert_array_equal(a.scales, b.scales)
    assert (a.zeros is None) == (b.zeros is None)
    if a.zeros is not None:
        np.testing.assert_array_equal(a.zeros, b.zeros)


# --- one matrix ---------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("bits", range(2, 9))
def test_decode_inverts_encode_and_sizes_are_exact(bits, group_size, symmetric):
    for out, in_ in ((16, 64), (7, 8), (33, 24), (1, 40), *([(5, 13), (3, 1)] if group_size < 1 else [])):
        for scale_dtype in ("BF16", "F16", "F32"):
            spec = Spec(bits, group_size, symmetric, scale_dtype)
            tensor = random_tensor(spec, out, in_, seed=bits)
            encoded = ct.encode("m", tensor)
            assert_equal(ct.decode("m", encoded, spec), tensor)
            assert ct.encoded_nbytes(spec, out, in_) == sum(raw.nbytes for raw in encoded.values())


FP8, FP8_BLOCK = Spec(8, -1, kind="float"), Spec(8, 0, kind="float", block=(16, 24))
W8A8, W4A8 = Spec(8, -1, activations="int8"), Spec(4, 8, activations="int8")
BYTE_SPECS = [FP8, Spec(8, 0, scale_dtype="F32", kind="float"), FP8_BLOCK, W8A8, W4A8]


@pytest.mark.parametrize("spec", BYTE_SPECS, ids=Spec.label)
def test_formats_with_a_byte_per_weight_come_back(spec):
    for out, in_ in ((16, 64), (7, 8), (33, 40), (1, 40)):
        tensor = random_tensor(spec, out, in_)
        encoded = ct.encode("m", tensor)
        assert set(encoded) == {"m.weight", "m.weight_scale"}
        weight = encoded["m.weight"]
        assert (weight.dtype, weight.shape) == ("F8_E4M3" if spec.kind == "float" else "I8", (out, in_))
        assert weight.data.tobytes() == tensor.codes.tobytes()
        assert_equal(ct.decode("m", encoded, spec), tensor)
        assert ct.encoded_nbytes(spec, out, in_) == sum(raw.nbytes for raw in encoded.values())
    assert ct.encode("m", random_tensor(FP8_BLOCK, 33, 40))["m.weight_scale"].shape == (3, 2)


def test_a_byte_format_whose_parts_are_wrong_is_refused():
    encoded = ct.encode("m", random_tensor(FP8, 4, 6))
    nan = RawTensor("F8_E4M3", (4, 6), np.full(24, 0xFF, np.uint8))
    with pytest.raises(CompressorError, match="not a legal fp8 channel matrix") as caught:
        ct.decode("m", {**encoded, "m.weight": nan}, FP8)
    assert "NaN" in str(caught.value)
    integers = RawTensor("I8", (4, 6), encoded["m.weight"].data)
    with pytest.raises(CompressorError, match=r"m\.weight: does not fit"):
        ct.decode("m", {**encoded, "m.weight": integers}, FP8)
    flat = RawTensor("F8_E4M3", (24,), encoded["m.weight"].data)
    with pytest.raises(CompressorError, match=r"m\.weight: no matrix"):
        ct.decode("m", {**encoded, "m.weight": flat}, FP8)
    with pytest.raises(CompressorError, match=r"m\.weight_scale: does not fit"):
        ct.decode("m", encoded, Spec(8, 0, kind="float"))
    del encoded["m.weight"]
    with pytest.raises(CompressorError, match=r"m\.weight: no matrix"):
        ct.decode("m", encoded, FP8)


def test_dtypes_and_shapes_of_the_parts():
    def parts(spec, out, in_):
        return {n: (r.dtype, r.shape) for n, r in ct.encode("a.b", random_tensor(spec, out, in_)).items()}

    assert parts(Spec(4, 32), 192, 576) == {
        "a.b.weight_packed": ("I32", (192, 72)),
        "a.b.weight_scale": ("BF16", (192, 18)),
        "a.b.weight_shape": ("I64", (2,)),
    }
    assert parts(Spec(4, 32, symmetric=False), 192, 576)["a.b.weight_zero_point"] == ("I32", (24, 18))
    assert parts(Spec(3, -1, False, "F16"), 10, 33) == {
        "a.b.weight_packed": ("I32", (10, 4)),
        "a.b.weight_scale": ("F16", (10, 1)),
        "a.b.weight_zero_point": ("I32", (1, 1)),
        "a.b.weight_shape": ("I64", (2,)),
    }
    tensor_wide = parts(Spec(8, 0, False, "F32"), 3, 5)
    assert tensor_wide["a.b.weight_scale"] == ("F32", (1,))
    assert tensor_wide["a.b.weight_zero_point"] == ("I8", (1,))


def test_golden_bytes():
    codes = np.arange(-8, 0, dtype=np.int8)[None, :]
    tensor = QTensor(codes, np.array([[1.5]], np.float32), None, Spec(4, 8))
    encoded = ct.encode("m", tensor)
    assert encoded["m.weight_packed"].data.tobytes() == bytes.fromhex("10325476")  # word 0x76543210
    assert encoded["m.weight_scale"].data.tobytes() == bytes.fromhex("c03f")
    assert encoded["m.weight_shape"].data.tobytes() == bytes.fromhex("01000000000000000800000000000000")

    codes = np.array([[-128, -127, -126, 127]], np.int8)
    encoded = ct.encode("m", QTensor(codes, np.array([[1]], np.float32), None, INT8))
    assert encoded["m.weight_packed"].data.view("<u4").tolist() == [0xFF020100]

    codes = np.array([[0, 1, 2, 3, -4, -3, -2, -1] * 4], np.int8)  # unsigned 4 5 6 7 0 1 2 3
    encoded = ct.encode("m", QTensor(codes, np.array([[1]], np.float32), None, Spec(3, -1)))
    stream = sum(int(code + 4) << (3 * i) for i, code in enumerate(codes[0]))
    assert encoded["m.weight_packed"].data.tobytes() == stream.to_bytes(12, "little")

    zeros = np.arange(-8, 2, dtype=np.int8)[:, None]  # ten rows: two words along out
    tensor = QTensor(np.zeros((10, 8), np.int8), np.ones((10, 1), np.float32), zeros, Spec(4, 8, False))
    assert ct.encode("m", tensor)["m.weight_zero_point"].data.view("<u4").tolist() == [0x76543210, 0x98]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_bytes_equal_the_foreign_library(bits, symmetric):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    spec = Spec(bits, 9, symmetric)
    tensor = random_tensor(spec, 21, 45, seed=bits)
    encoded = ct.encode("m", tensor)
    packed = encoded["m.weight_packed"]
    words = packed.data.view("<i4").reshape(packed.shape)
    foreign = pack_to_int32(torch.from_numpy(tensor.codes), bits)
    np.testing.assert_array_equal(words, foreign.numpy())
    back = unpack_from_int32(torch.from_numpy(words.copy()), bits, torch.Size((21, 45)))
    np.testing.assert_array_equal(back.numpy(), tensor.codes)
    if tensor.zeros is not None:
        packed = encoded["m.weight_zero_point"]
        foreign = pack_to_int32(torch.from_numpy(tensor.zeros), bits, packed_dim=0)
        np.testing.assert_array_equal(packed.data.view("<i4").reshape(packed.shape), foreign.numpy())


@pytest.mark.parametrize(
    ("part", "broken", "message"),
    [
        ("weight_shape", None, "m.weight_shape: missing"),
        ("weight_scale", None, "m.weight_scale: missing"),
        ("weight_zero_point", None, "m.weight_zero_point: missing"),
        ("weight_scale", ("F16", (6, 4)), "m.weight_scale: does not fit"),
        ("weight_packed", ("I32", (3, 8)), "m.weight_packed: does not fit"),
    ],
)
def test_decode_names_the_part_that_is_wrong(part, broken, message):
    spec = Spec(4, 8, symmetric=False)
    encoded = ct.encode("m", random_tensor(spec, 6, 32))
    raw = encoded.pop(f"m.{part}")
    if broken:
        encoded[f"m.{part}"] = RawTensor(*broken, raw.data)
    with pytest.raises(CompressorError, match=message):
        ct.decode("m", encoded, spec)


def test_decode_refuses_impossible_shapes_and_values():
    encoded = ct.encode("m", random_tensor(INT8, 4, 6))
    for record in ([-4, 6], [4, 60], [5, 6], [0, 0]):
        bad = RawTensor("I64", (2,), np.array(record, "<i8").view(np.uint8))
        with pytest.raises(CompressorError, match=r"m\.weight_"):
            ct.decode("m", {**encoded, "m.weight_shape": bad}, INT8)
    infinite = RawTensor("BF16", (4, 1), np.full(4, 0x7F80, "<u2").view(np.uint8))
    with pytest.raises(CompressorError, match="m: not a legal") as caught:
        ct.decode("m", {**encoded, "m.weight_scale": infinite}, INT8)
    assert "finite" in str(caught.value)


def test_sizing_needs_no_heavy_import():
    code = (
        "import sys; from compressor.export.compressed_tensors import encoded_nbytes, Spec;"
        "assert encoded_nbytes(Spec(4, 32), 192, 576) == 192*72*4 + 192*18*2 + 16;"
        "print([m for m in ('torch', 'transformers', 'numba') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# --- directories --------------------------------------------------------------------------------


def write_artifact(folder: Path, specs, extra=(), shards=1, tied=False) -> dict[str, QTensor]:
    """A directory written with the foreign safetensors library: packed parts, an embedding, a tokenizer."""
    from safetensors.torch import save_file

    quantized = {m: random_tensor(s, 32, 64, seed) for seed, (m, s) in enumerate(specs.items()) if s}
    raws = {"model.embed_tokens.weight": RawTensor("F32", (8, 3), np.arange(24, dtype="<f4").view(np.uint8))}
    for module, tensor in quantized.items():
        raws |= ct.encode(module, tensor)
    for module, spec in specs.items():
        if spec is None:
            raws[f"{module}.weight"] = RawTensor("BF16", (3, 3), np.arange(18, dtype=np.uint8))
    raws |= dict(extra)
    folder.mkdir()
    files = (
        ["model.safetensors"] if shards == 1 else [f"model-{i + 1}-of-{shards}.safetensors" for i in range(shards)]
    )
    placed = {name: files[i % shards] for i, name in enumerate(raws)}
    for file in files:
        part = {
            n: torch.from_numpy(r.data.copy()).view(TORCH_DTYPES[r.dtype]).reshape(r.shape)
            for n, r in raws.items()
            if placed[n] == file
        }
        save_file(part, folder / file, {"format": "pt"})
    if shards > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    config = {"model_type": "llama", "quantization_config": ct.quantization_config(specs, tied=tied)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return quantized


TORCH_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "I64": torch.int64, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
SPECS = {
    "model.layers.0.mlp.up_proj": INT4,
    "model.layers.0.mlp.down_proj": Spec(8, 0, False, "F32"),
    "model.layers.1.mlp.up_proj": Spec(3, 16, False, "F16"),
    "model.layers.2.mlp.up_proj": FP8_BLOCK,
    "model.layers.2.mlp.down_proj": W8A8,
    "lm_head": None,
}


def opened(folder: Path) -> ct.ArtifactCheckpoint:
    return ct.ArtifactCheckpoint(SafetensorsCheckpoint(folder))


@pytest.mark.parametrize("shards", [1, 3])
def test_artifact_reads_as_floats_and_tells_codes(tmp_path, shards):
    quantized = write_artifact(tmp_path / "a", SPECS, shards=shards)
    artifact = opened(tmp_path / "a")
    assert set(artifact.tensors) == {f"{m}.weight" for m in (*SPECS, "model.embed_tokens")}
    assert artifact.config == {"model_type": "llama"}
    assert artifact.specs == {m: s for m, s in SPECS.items() if s}
    for module, tensor in quantized.items():
        name = f"{module}.weight"
        assert_equal(artifact.qtensor(name), tensor)
        np.testing.assert_array_equal(artifact.read(name), tensor.dequantize())
        info, raw = artifact.tensors[name], artifact.raw(name)
        assert (info.dtype, info.shape) == (tensor.spec.scale_dtype, (32, 64)) == (raw.dtype, raw.shape)
        assert info.nbytes == raw.nbytes
        assert info.stored_as == tensor.spec.label()
    assert artifact.qtensor("lm_head.weight") is None
    assert [artifact.activations(m) for m in SPECS] == [None] * 4 + ["int8", None]
    assert artifact.raw("lm_head.weight").data.tolist() == list(range(18))
    np.testing.assert_array_equal(artifact.read("model.embed_tokens.weight"), np.arange(24).reshape(8, 3))
    assert list(artifact.side_files()) == ["tokenizer.json"]
    with pytest.raises(KeyError):
        artifact.raw("model.layers.0.mlp.up_proj.weight_packed.weight")


def test_a_directory_that_contradicts_its_config_is_refused_with_every_problem(tmp_path):
    write_artifact(tmp_path / "a", SPECS)
    path = tmp_path / "a" / "config.json"
    config = json.loads(path.read_text())
    wrong = {
        **SPECS,
        "model.layers.0.mlp.up_proj": Spec(4, 16),
        "model.layers.1.mlp.up_proj": Spec(5, 16, False),
    }
    config["quantization_config"] = ct.quantization_config(wrong, tied=False)
    path.write_text(json.dumps(config))
    with pytest.raises(Problems) as caught:
        opened(tmp_path / "a")
    assert "model.layers.0.mlp.up_proj.weight_scale: does not fit" in str(caught.value)
    assert "model.layers.1.mlp.up_proj.weight_packed: does not fit" in str(caught.value)

    config["quantization_config"]["ignore"] = list(SPECS)
    path.write_text(json.dumps(config))
    with pytest.raises(Problems, match="do not fit") as caught:
        opened(tmp_path / "a")
    assert str(caught.value).count("names no format") == 5


def test_codes_stored_in_another_layout_than_the_config_says_are_refused(tmp_path):
    specs = {"model.layers.0.mlp.up_proj": FP8, "model.layers.0.mlp.down_proj": Spec(8, -1)}
    write_artifact(tmp_path / "a", specs)
    path = tmp_path / "a" / "config.json"
    config = json.loads(path.read_text())
    swapped = dict(zip(specs, reversed(specs.values()), strict=True))
    config["quantization_config"] = ct.quantization_config(swapped, tied=False)
    path.write_text(json.dumps(config))
    with pytest.raises(Problems, match="do not fit") as caught:
        opened(tmp_path / "a")
    assert "model.layers.0.mlp.up_proj: not stored as quantization_config says" in str(caught.value)
    assert "model.layers.0.mlp.down_proj: not stored as quantization_config says" in str(caught.value)


def test_reordered_columns_and_files_without_codes_are_refused(tmp_path):
    index = RawTensor("I32", (1,), np.zeros(4, np.uint8))
    write_artifact(tmp_path / "a", SPECS, [("model.layers.0.mlp.up_proj.weight_g_idx", index)])
    with pytest.raises(Problems, match="do not fit") as caught:
        opened(tmp_path / "a")
    assert "weight_g_idx" in str(caught.value)
    write_artifact(tmp_path / "b", {"lm_head": None})
    with pytest.raises(Problems, match="do not fit"):
        opened(tmp_path / "b")


@pytest.mark.parametrize("shards", [1, 3])
def test_export_writes_the_same_model_and_nothing_else(tmp_path, shards):
    from safetensors import safe_open

    quantized = write_artifact(tmp_path / "a", SPECS, shards=shards)
    (tmp_path / "a" / "compress_manifest.json").write_text("{}")
    (tmp_path / "a" / "report.json").write_text("{}")
    seen = []
    facts = ct.export(opened(tmp_path / "a"), tmp_path / "b", lambda *step: seen.append(step))
    assert facts["shards"] == shards
    assert (facts["tensors"], facts["quantized"]) == (7, 5)
    assert seen[shards - 1] == ("writing", shards, shards)
    assert seen[-1] == ("reading back", 7, 7)
    source, written = SafetensorsCheckpoint(tmp_path / "a"), SafetensorsCheckpoint(tmp_path / "b")
    assert facts["bytes"] == sum(info.nbytes for info in source.tensors.values())
    assert written.config == source.config
    assert set(written.tensors) == set(source.tensors)
    for name in source.tensors:
        assert written.raw(name).data.tobytes() == source.raw(name).data.tobytes()
        with safe_open(tmp_path / "b" / written.tensors[name].file, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert list(file.get_tensor(name).shape) == list(source.tensors[name].shape)
    names = {path.name for path in (tmp_path / "b").iterdir()}
    weights = {info.file for info in written.tensors.values()}
    index = {INDEX} if shards > 1 else set()
    assert names == {"config.json", "tokenizer.json"} | weights | index
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    for module, tensor in quantized.items():
        assert_equal(opened(tmp_path / "b").qtensor(f"{module}.weight"), tensor)


def test_export_twice_gives_the_same_bytes(tmp_path):
    write_artifact(tmp_path / "a", SPECS, shards=2)
    for name in ("b", "c"):
        ct.export(opened(tmp_path / "a"), tmp_path / name)
    for path in (tmp_path / "b").iterdir():
        assert path.read_bytes() == (tmp_path / "c" / path.name).read_bytes()


def test_export_refuses_an_existing_place_and_leaves_nothing_behind(tmp_path, monkeypatch):
    write_artifact(tmp_path / "a", SPECS)
    (tmp_path / "b").mkdir()
    with pytest.raises(CompressorError, match="already exists"):
        ct.export(opened(tmp_path / "a"), tmp_path / "b")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ct, "write_safetensors", full)
        with pytest.raises(CompressorError, match="cannot be written") as caught:
            ct.export(opened(tmp_path / "a"), tmp_path / "c")
    assert "No space left" in str(caught.value)

    def flip(path, raws, write=ct.write_safetensors):
        name = "model.layers.1.mlp.up_proj.weight_packed"
        write(path, {**raws, name: replace(raws[name], data=raws[name].data ^ 1)})

    with monkeypatch.context() as patch:
        patch.setattr(ct, "write_safetensors", flip)
        with pytest.raises(GateFailed, match=r"layers\.1\.mlp\.up_proj\.weight: read back differently"):
            ct.export(opened(tmp_path / "a"), tmp_path / "c")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))
    with pytest.raises(CompressorError, match="not enough free space"):
        ct.export(opened(tmp_path / "a"), tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_zero_points_of_symmetric_formats_are_not_carried(tmp_path):
    """Some tools leave them in; engines refuse them."""
    stray = "model.layers.0.mlp.up_proj.weight_zero_point"
    write_artifact(tmp_path / "a", SPECS, [(stray, RawTensor("I8", (4,), np.zeros(4, np.uint8)))])
    artifact = opened(tmp_path / "a")
    assert stray not in artifact.tensors
    facts = ct.export(artifact, tmp_path / "b")
    written = SafetensorsCheckpoint(tmp_path / "b")
    assert set(written.tensors) == set(artifact.source.tensors) - {stray}
    assert facts["bytes"] == sum(info.nbytes for info in artifact.source.tensors.values()) - 4


def test_a_quantized_cache_in_the_config_is_noted(tmp_path):
    write_artifact(tmp_path / "a", SPECS)
    path = tmp_path / "a" / "config.json"
    assert opened(tmp_path / "a").notes == []
    config = json.loads(path.read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    path.write_text(json.dumps(config))
    assert len(opened(tmp_path / "a").notes) == 1
