import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from compressor.arch.llama import FAMILY
from compressor.checkpoint.safetensors import SafetensorsCheckpoint
from compressor.core.plan import PlannedTensor
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


# --- the section in config.json -----------------------------------------------------------------

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
FFN = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def model(attention, ffn, head=None, layers=12, special=None):
    specs = {}
    for layer in range(layers):
        specs.update({f"model.layers.{layer}.{name}": attention for name in ATTENTION})
        specs.update({f"model.layers.{layer}.{name}": ffn for name in FFN})
    specs.update(special or {})
    return specs | {"lm_head": head}


PARTIAL = {f"model.layers.{n}.mlp.down_proj": INT8 for n in (0, 1, 11)}
MODELS = {
    "uniform": model(INT4, INT4),
    "uniform with head": model(INT4, INT4, INT4),
    "by role": model(INT4, INT8),
    "head of its own": model(INT4, INT4, INT8),
    "ffn float": model(INT4, None),
    "some layers": model(INT4, INT4, special=PARTIAL),
    "layer 1 float": model(INT4, INT8, special=dict.fromkeys(
        (f"model.layers.1.{n}" for n in (*ATTENTION, *FFN)), None)),
    "layer 0 float, one format": model(INT4, INT4, special={"model.layers.0.mlp.up_proj": None}),
    "three and asymmetric": model(Spec(3, 64, False), Spec(8, 0), INT8, special=PARTIAL),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_config_round_trip(name):
    specs = MODELS[name]
    config = json.loads(json.dumps(ct.quantization_config(specs, tied=False)))
    assert ct.specs_from_config(config, specs) == specs
    assert config["ignore"] == [module for module, spec in specs.items() if spec is None]
    assert len(config["config_groups"]) == len({spec for spec in specs.values() if spec})


@pytest.mark.parametrize("name", MODELS)
def test_the_foreign_library_reads_the_same_formats(name):
    """One target matches each quantized module, and its group is the format that was planned."""
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import is_match, match_targets

    specs = MODELS[name]
    parsed = QuantizationConfig.model_validate(ct.quantization_config(specs, tied=False))
    linear = torch.nn.Linear(1, 1)
    schemes = {target: group for group in parsed.config_groups.values() for target in group.targets}
    for module, spec in specs.items():
        found = match_targets(module, linear, list(schemes))
        if spec is None:
            assert is_match(module, linear, parsed.ignore)
            continue
        assert not is_match(module, linear, parsed.ignore)
        assert len({id(schemes[target]) for target in found}) == 1
        weights = schemes[found[0]].weights
        assert (weights.num_bits, weights.symmetric, weights.strategy) == (
            spec.bits, spec.symmetric, spec.strategy,
        )  # fmt: skip
        assert weights.group_size == (spec.group_size if spec.group_size > 0 else None)
        if name != "uniform with head":
            assert len(found) == 1


def test_uniform_config_literally():
    assert ct.quantization_config({"model.layers.0.mlp.up_proj": INT4, "lm_head": None}, tied=False) == {
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                    "dynamic": False,
                    "observer": "minmax",
                },
            }
        },
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def targets(specs):
    groups = ct.quantization_config(specs, tied=False)["config_groups"]
    return [group["targets"] for group in groups.values()]


def test_targets_are_regexes_over_shared_parents():
    assert targets(model(INT4, INT8)) == [
        [r"re:^model\.layers\.\d+\.self_attn\.(q_proj|k_proj|v_proj|o_proj)$"],
        [r"re:^model\.layers\.\d+\.mlp\.(gate_proj|up_proj|down_proj)$"],
    ]
    int4, int8 = targets(model(INT4, INT4, special=PARTIAL))
    assert int8 == [r"re:^model\.layers\.(0|1|11)\.mlp\.down_proj$"]
    assert r"re:^model\.layers\.(2|3|4|5|6|7|8|9|10)\.mlp\.down_proj$" in int4
    assert targets(model(INT4, INT4, INT8))[1] == ["re:.*lm_head"]
    assert targets(model(INT4, INT4, INT4)) == [["Linear", "re:.*lm_head"]]


def test_tied_head_is_ignored_by_name_even_when_it_has_no_tensor():
    specs = {"model.layers.0.mlp.up_proj": INT4}
    assert ct.quantization_config(specs, tied=True)["ignore"] == ["lm_head"]
    assert ct.quantization_config(specs, tied=False)["ignore"] == []
    assert ct.quantization_config(specs | {"lm_head": None}, tied=True)["ignore"] == ["lm_head"]


def written_elsewhere(**changes):
    """A section as another tool writes it, newer keys included."""
    weights = {
        "actorder": "static", "block_structure": None, "dynamic": False, "group_size": 128, "num_bits": 4,
        "observer": "mse", "observer_kwargs": {}, "scale_dtype": None, "strategy": "group",
        "symmetric": True, "type": "int", "zp_dtype": None,
    }  # fmt: skip
    group = {
        "format": "pack-quantized", "input_activations": None, "output_activations": None,
        "targets": ["Linear"], "weights": weights,
    }  # fmt: skip
    group |= {"weights": weights | changes.pop("weights", {})} | changes.pop("group", {})
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized", "global_compression_ratio": None, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "sparsity_config": {}, "transform_config": {}, "version": "0.14.0", **changes,
    }  # fmt: skip


def test_sections_of_other_tools_are_read():
    modules = ["model.layers.0.mlp.up_proj", "lm_head"]
    assert ct.specs_from_config(written_elsewhere(), modules) == {modules[0]: Spec(4, 128), "lm_head": None}
    channel = written_elsewhere(weights={"strategy": "channel", "group_size": -1, "num_bits": 8})
    assert ct.specs_from_config(channel, modules)[modules[0]] == Spec(8, -1)
    silent = written_elsewhere(weights={"strategy": None, "group_size": None})
    assert ct.specs_from_config(silent, modules)[modules[0]] == Spec(4, 0)


def test_matching_order_is_name_then_regex_in_alphabetical_order_then_class():
    section = written_elsewhere(ignore=[r"re:.*\.layers\.0\..*"])
    base = section["config_groups"].pop("group_0")
    for bits, target in ((8, "Linear"), (7, "re:.*up_proj"), (6, r"re:.*\.3\..*"), (5, "a.3.up_proj")):
        weights = {**base["weights"], "num_bits": bits}
        section["config_groups"][f"g{bits}"] = {**base, "targets": [target], "weights": weights}
    found = ct.specs_from_config(
        section,
        ["a.3.up_proj", "b.3.up_proj", "a.4.up_proj", "a.4.down", "a.layers.0.up_proj", "x.up_projector"],
    )
    assert [spec and spec.bits for spec in found.values()] == [5, 6, 7, 8, None, 7]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (written_elsewhere(quant_method="gptq"), "quant_method"),
        (written_elsewhere(format="int-quantized", group={"format": None}), "layout is not read"),
        (written_elsewhere(group={"input_activations": {"num_bits": 8}}), "quantizes activations"),
        (written_elsewhere(weights={"type": "float"}), "weights.type"),
        (written_elsewhere(weights={"actorder": "group"}), "g_idx"),
        (written_elsewhere(weights={"num_bits": 16}), "bits must be 2..8"),
        (
            written_elsewhere(weights={"strategy": "block", "block_structure": [128, 128]}),
            "block_structure",
        ),
        (written_elsewhere(weights={"strategy": "tensor_group"}), "weights"),
        (written_elsewhere(weights={"group_size": None}), "without a positive group_size"),
        (written_elsewhere(group={"targets": ["re:("]}), r"re:\("),
        (written_elsewhere(ignore="lm_head"), "ignore"),
        (written_elsewhere(config_groups={"W4A16": ["Linear"]}), "W4A16"),
        (written_elsewhere(config_groups=[1]), "config_groups"),
        (written_elsewhere(transform_config={"config_groups": {"u": 1}}), "transform_config"),
        (written_elsewhere(sparsity_config={"format": "sparse-bitmask"}), "sparsity_config"),
    ],
)
def test_what_is_not_a_plain_integer_format_is_refused_with_the_reason(section, message):
    with pytest.raises(Problems) as caught:
        ct.specs_from_config(section, ["model.layers.0.mlp.up_proj"])
    assert message.replace("\\", "") in str(caught.value)


# --- the plan -----------------------------------------------------------------------------------


def planned(name, spec, shape=(64, 64), role="attention", layer=0, dtype="BF16"):
    module = name.removesuffix(".weight")
    return PlannedTensor(name, module, role, layer, shape, dtype, 0, spec, (), "rule 2 (x.yaml:14)", 0)


def test_check_plan_tells_everything_at_once():
    tensors = [
        planned("model.embed_tokens.weight", INT4, role="embedding", layer=None),
        planned("model.layers.0.self_attn.q_proj.weight", Spec(4, 48)),
        planned("model.layers.0.self_attn.k_proj.weight", INT4),
        planned("model.layers.0.mlp.experts.weight", INT4, shape=(4, 64, 64), role="ffn"),
        planned("model.norm.weight", None, shape=(64,), role="norm"),
        planned("lm_head.weight", INT8, role="lm_head", layer=None),
    ]
    found = ct.check_plan(tensors, tied=True)
    assert [problem.what.split(" ")[0] for problem in found] == [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.experts.weight",
        "lm_head.weight",
    ]
    assert all(problem.hint and "rule 2 (x.yaml:14)" in problem.what for problem in found)
    assert "16, 32, 64" in str(found[1])
    assert len(ct.check_plan(tensors, tied=False)) == 3


def test_engine_warnings():
    def block(layer, **formats):
        names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}
        return [planned(f"model.layers.{layer}.{names[n]}.weight", s) for n, s in formats.items()]

    assert ct.engine_warnings(block(0, q=INT4, k=INT4, v=INT4), FAMILY) == []
    fused = ct.engine_warnings(
        [*block(0, q=INT4, k=INT4, v=INT4), *block(3, q=INT4, k=INT4, v=INT8)], FAMILY
    )
    assert len(fused) == 1
    assert fused[0].endswith("but differ in block 3")
    left_float = ct.engine_warnings(block(2, q=INT4, k=INT4, v=None), FAMILY)
    assert len(left_float) == 1
    assert left_float[0].endswith("differ in block 2")
    odd = Spec(3, 0, False, "F16")
    lines = ct.engine_warnings(block(0, q=odd, k=odd, v=odd), FAMILY)
    for word in ("int3 (3 tensors)", "one scale per tensor", "dequantize=True", "stored in F16"):
        assert sum(word in line for line in lines) == 1
    assert len(lines) == 4


# --- directories --------------------------------------------------------------------------------


def write_artifact(folder: Path, specs, extra=(), shards=1, tied=False) -> dict[str, QTensor]:
    """A directory written with the foreign safetensors library: packed parts, an embedding, a tokenizer."""
    from safetensors.torch import save_file

    quantized = {m: random_tensor(s, 32, 64, seed) for seed, (m, s) in enumerate(specs.items()) if s}
    raws = {
        "model.embed_tokens.weight": RawTensor("F32", (8, 3), np.arange(24, dtype="<f4").view(np.uint8))
    }
    for module, tensor in quantized.items():
        raws |= ct.encode(module, tensor)
    for module, spec in specs.items():
        if spec is None:
            raws[f"{module}.weight"] = RawTensor("BF16", (3, 3), np.arange(18, dtype=np.uint8))
    raws |= dict(extra)
    folder.mkdir()
    files = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{i + 1}-of-{shards}.safetensors" for i in range(shards)]
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
        (folder / ct.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    config = {"model_type": "llama", "quantization_config": ct.quantization_config(specs, tied=tied)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return quantized


TORCH_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "I64": torch.int64, "I8": torch.int8,
}  # fmt: skip
SPECS = {
    "model.layers.0.mlp.up_proj": INT4,
    "model.layers.0.mlp.down_proj": Spec(8, 0, False, "F32"),
    "model.layers.1.mlp.up_proj": Spec(3, 16, False, "F16"),
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
    assert str(caught.value).count("names no format") == 3


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
    assert (facts["tensors"], facts["quantized"]) == (5, 3)
    assert seen[-1] == ("reading back", 5, 5)
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
    index = {ct.INDEX} if shards > 1 else set()
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
        patch.setattr(ct._ShardFile, "write", full)
        with pytest.raises(CompressorError, match="cannot be written") as caught:
            ct.export(opened(tmp_path / "a"), tmp_path / "c")
    assert "No space left" in str(caught.value)

    def skip_scales(self, name, raw, write=ct._ShardFile.write):
        write(
            self,
            name,
            replace(raw, data=raw.data ^ 1) if name.endswith("mlp.up_proj.weight_scale") else raw,
        )

    monkeypatch.setattr(ct._ShardFile, "write", skip_scales)
    with pytest.raises(GateFailed, match=r"up_proj\.weight: read back differently"):
        ct.export(opened(tmp_path / "a"), tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
