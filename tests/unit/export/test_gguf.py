"""GGUF export: types chosen, codes proved, metadata typed as llama.cpp wants, nothing left behind on errors."""

import json
import math
import shutil
from types import SimpleNamespace

import gguf as foreign
import numpy as np
import pytest
from fixtures_codes import changed_copy, coded, random_codes

from compressor.arch import families, find_family
from compressor.checkpoint.base import TensorInfo
from compressor.checkpoint.reader import open_checkpoint
from compressor.core.report import Report, no_progress
from compressor.core.spec import Spec
from compressor.core.tensors import QTensor
from compressor.errors import CompressorError, GateFailed, Problems
from compressor.export import gguf, gguf_codes, gguf_metadata

INFO = TensorInfo("model.layers.0.mlp.up_proj.weight", "BF16", (4, 64), 512, "model.safetensors")


def export(checkpoint, out, report=None, **options):
    options = {"pretokenizer": None, "float_type": None, **options}
    return gguf.export(checkpoint, out, progress=no_progress, report=report or Report(), **options)


def stored(path):
    return {tensor.name: tensor for tensor in foreign.GGUFReader(path).tensors}


def zeroed(scale, zero, bits=4):
    """Asymmetric codes in one group with one scale and zero point."""
    spec = Spec(bits, 32, symmetric=False, scale_dtype="F32")
    scales, zeros = np.full((4, 2), scale, np.float32), np.full((4, 2), zero, np.int8)
    return QTensor(random_codes(4, 64, spec).codes, scales, zeros, spec)


CARRIED = [
    (random_codes(4, 64, Spec(2, 32)), "Q4_0"),
    (random_codes(4, 64, Spec(4, 64)), "Q4_0"),
    (random_codes(4, 64, Spec(4, -1)), "Q4_0"),
    (random_codes(4, 64, Spec(4, 0)), "Q4_0"),
    (random_codes(4, 64, Spec(5, 32)), "Q5_0"),
    (random_codes(4, 64, Spec(6, 32)), "Q8_0"),
    (random_codes(4, 64, Spec(8, 32, scale_dtype="F16")), "Q8_0"),
    (random_codes(4, 64, Spec(3, 32, symmetric=False)), "Q4_0"),
    (random_codes(4, 64, Spec(7, 32, symmetric=False)), "Q8_0"),
    (zeroed(0.25, 3), "Q4_1"),
    (zeroed(0.25, -8), "Q4_1"),
    (zeroed(1 + 2**-10, 3), "Q5_0"),  # (1 + 2^-10) * 11 needs 13 bits: no fp16 offset
    (zeroed(0.25, 0, bits=8), "Q8_0"),
]


@pytest.mark.parametrize(("tensor", "kind"), CARRIED, ids=lambda x: x if isinstance(x, str) else x.spec.label())
def test_codes_are_carried_and_proved(tensor, kind):
    assert gguf.choose_type(tensor, INFO) == gguf_codes.Choice(kind)
    data = gguf_codes.pack(tensor, kind)
    theirs = foreign.quants.dequantize(data, foreign.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(theirs, tensor.dequantize())
    assert gguf_codes.same(tensor, kind, data)
    for position in (0, data.shape[1] - 1):  # a scale's byte, a code's byte
        damaged = data.copy()
        damaged[-1, position] ^= 1
        assert not gguf_codes.same(tensor, kind, damaged)


def big_range():
    tensor = zeroed(0.25, 100, bits=8)
    tensor.codes[0, 0] = -128
    return tensor


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (random_codes(4, 48, Spec(4, 16)), "48 columns are not a multiple of 32"),
        (random_codes(4, 64, Spec(4, 16)), "group size 16 is not a multiple of 32"),
        (zeroed(0.1, 0), "a scale is not exactly an fp16 number"),
        (big_range(), "minus zero points do not fit"),
        (random_codes(4, 64, Spec(8, -1, kind="float"), deviation=2**-6), "no ggml block holds FP8 values"),
    ],
)
def test_what_cannot_be_carried_becomes_floats_with_a_reason(tensor, reason):
    for asked, kind in ((None, "F16"), ("F32", "F32")):
        choice = gguf.choose_type(tensor, INFO, asked)
        assert choice.kind == kind
        assert reason in choice.reason


def test_codes_too_large_for_f16_become_bf16():
    assert gguf.choose_type(random_codes(4, 64, Spec(4, 16), deviation=5e5), INFO).kind == "BF16"
    large = random_codes(4, 64, Spec(8, -1, kind="float"), deviation=2**15)  # times 448
    assert gguf.choose_type(large, INFO).kind == "BF16"


@pytest.mark.parametrize(
    ("dtype", "shape", "asked", "kind"),
    [
        ("BF16", (4, 64), None, "BF16"),
        ("F16", (4, 64), None, "F16"),
        ("F32", (4, 64), None, "F32"),
        ("F64", (4, 64), None, "F32"),
        ("F32", (4, 64), "F16", "F16"),
        ("BF16", (64,), "F16", "F32"),
    ],
)
def test_floats_keep_their_dtype_unless_asked(dtype, shape, asked, kind):
    info = TensorInfo("x", dtype, shape, 1, "f")
    assert gguf.choose_type(None, info, asked) == gguf_codes.Choice(kind)


def test_permute_interleaves_the_rotary_halves_of_each_head():
    rows = np.arange(8)  # two heads of four: halves (0, 1 | 2, 3) and (4, 5 | 6, 7)
    np.testing.assert_array_equal(gguf_codes.permute(rows, 2), [0, 2, 1, 3, 4, 6, 5, 7])
    matrix = np.arange(16).reshape(8, 2)
    np.testing.assert_array_equal(gguf_codes.permute(matrix, 2), matrix[[0, 2, 1, 3, 4, 6, 5, 7]])


def test_export_moves_codes_scales_and_zeros_of_q_and_k_together(tiny_llama, tmp_path):
    names = {"self_attn.q_proj": ("attn_q", 4), "self_attn.k_proj": ("attn_k", 2), "mlp.up_proj": ("ffn_up", None)}
    checkpoint = coded(tiny_llama, {"*layers*": Spec(4, 32, symmetric=False)})
    facts = export(checkpoint, tmp_path / "m.gguf")
    assert facts["types"] == {"BF16": 2, "F32": 5, "Q5_0": 14}
    assert facts["file_type"] == "Q5_0"
    assert facts["verified_tensors"] == 21
    assert facts["bytes"] == (tmp_path / "m.gguf").stat().st_size
    found = stored(tmp_path / "m.gguf")
    for ours, (theirs, heads) in names.items():
        expected = checkpoint.read(f"model.layers.0.{ours}.weight")
        expected = expected if heads is None else gguf_codes.permute(expected, heads)
        tensor = found[f"blk.0.{theirs}.weight"]
        np.testing.assert_array_equal(foreign.quants.dequantize(tensor.data, tensor.tensor_type), expected)


def test_metadata_has_the_types_llama_cpp_insists_on(tiny_model, tmp_path):
    directory = tmp_path / "my-model"
    shutil.copytree(tiny_model("llama", head_dim=32), directory)
    card = "---\nlicense: apache-2.0\nlanguage: [en, de]\n---\n# Model\n"
    (directory / "README.md").write_text(card)
    generation = {"do_sample": True, "temperature": 0.5, "top_k": 20}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    export(open_checkpoint(str(directory)), tmp_path / "m.gguf")
    fields = foreign.GGUFReader(tmp_path / "m.gguf").fields
    found = {name: (field.types[0].name, field.contents()) for name, field in fields.items()}
    expected = {
        "general.architecture": ("STRING", "llama"),
        "general.type": ("STRING", "model"),
        "general.name": ("STRING", "my-model"),
        "general.license": ("STRING", "apache-2.0"),
        "general.languages": ("ARRAY", ["en", "de"]),
        "general.file_type": ("UINT32", 32),
        "general.quantization_version": ("UINT32", 2),
        "general.sampling.temp": ("FLOAT32", 0.5),
        "general.sampling.top_k": ("INT32", 20),
        "llama.block_count": ("UINT32", 2),
        "llama.context_length": ("UINT32", 256),
        "llama.embedding_length": ("UINT32", 64),
        "llama.feed_forward_length": ("UINT32", 128),
        "llama.attention.head_count": ("UINT32", 4),
        "llama.attention.head_count_kv": ("UINT32", 2),
        "llama.attention.key_length": ("UINT32", 32),
        "llama.attention.value_length": ("UINT32", 32),
        "llama.rope.dimension_count": ("UINT32", 32),
        "llama.rope.freq_base": ("FLOAT32", 10000.0),
        "llama.vocab_size": ("UINT32", 256),
        "tokenizer.ggml.model": ("STRING", "gpt2"),
        "tokenizer.ggml.pre": ("STRING", "gpt-2"),
        "tokenizer.ggml.bos_token_id": ("UINT32", 0),
        "tokenizer.ggml.eos_token_id": ("UINT32", 1),
        "tokenizer.ggml.padding_token_id": ("UINT32", 2),
        "tokenizer.ggml.add_bos_token": ("BOOL", False),
        "tokenizer.ggml.add_eos_token": ("BOOL", False),
        "tokenizer.ggml.add_space_prefix": ("BOOL", False),
    }
    assert {name: found.get(name) for name in expected} == expected
    assert found["general.size_label"] == ("STRING", "131K")
    assert found["llama.attention.layer_norm_rms_epsilon"][0] == "FLOAT32"
    assert not any(str(tmp_path) in str(value) for _, value in found.values())


def test_rope_factors_of_llama_3_equal_the_frequency_by_frequency_rule():
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 1, "vocab_size": 1}
    config |= {"num_hidden_layers": 1, "rope_scaling": rope}
    expected = []
    for i in range(32):
        wavelength = 2 * math.pi * 500000.0 ** (2 * i / 64)
        if wavelength < 8192 / 4:
            expected.append(1.0)
        elif wavelength > 8192 / 1:
            expected.append(8.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected.append(1 / ((1 - smooth) / 8 + smooth))
    found = gguf_metadata.rope_factors(families()["llama"], config)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert {1.0, 8.0} < set(found.tolist())


def test_a_tied_head_that_equals_the_embedding_is_dropped(tiny_model, tmp_path):
    directory = changed_copy(tiny_model("llama"), tmp_path / "m", "config.json", tie_word_embeddings=True)
    checkpoint = open_checkpoint(str(directory))
    assert "lm_head.weight" in checkpoint.tensors
    with pytest.raises(Problems, match=r"lm_head.weight: differs from the embedding"):
        export(checkpoint, tmp_path / "m.gguf")
    same = TiedHead(checkpoint)
    export(same, tmp_path / "m.gguf")
    assert "output.weight" not in stored(tmp_path / "m.gguf")


def TiedHead(checkpoint):
    """The checkpoint with lm_head reading as the embedding."""
    inner = checkpoint.raw
    checkpoint.raw = lambda name: inner("model.embed_tokens.weight" if name == "lm_head.weight" else name)
    return checkpoint


def test_degradations_are_reported_and_strict_refuses_them(tiny_llama, tmp_path):
    checkpoint, report = coded(tiny_llama, {"*.down_proj.weight": Spec(4, 16)}), Report()
    export(checkpoint, tmp_path / "m.gguf", report)
    assert [(e.tensor, e.degraded) for e in report.events] == [
        (f"model.layers.{i}.mlp.down_proj.weight", True) for i in (0, 1)
    ]
    assert "group size 16" in report.events[0].message
    with pytest.raises(CompressorError, match="group size 16"):
        export(checkpoint, tmp_path / "strict.gguf", Report(strict=True))
    assert not (tmp_path / "strict.gguf").exists()


def test_the_recorded_pretokenizer_wins_over_the_structure(tiny_llama, tmp_path):
    checkpoint = coded(tiny_llama, {})
    assert export(checkpoint, tmp_path / "m.gguf")["pretokenizer"] == "gpt-2"
    checkpoint.pretokenizer = "mpt"
    assert export(checkpoint, tmp_path / "m.gguf")["pretokenizer"] == "mpt"
    assert export(checkpoint, tmp_path / "m.gguf", pretokenizer="smollm")["pretokenizer"] == "smollm"
    with pytest.raises(Problems, match=r"pretokenizer 'smoll' is unknown"):
        export(checkpoint, tmp_path / "m.gguf", pretokenizer="smoll")


def test_a_sliding_window_is_a_degradation(tiny_model, tmp_path):
    directory = changed_copy(tiny_model("mistral"), tmp_path / "m", "config.json", sliding_window=64)
    report = Report()
    export(open_checkpoint(str(directory)), tmp_path / "m.gguf", report)
    assert "sliding window of 64" in report.events[0].message


def test_a_file_that_reads_back_differently_is_refused_and_removed(tiny_llama, tmp_path, monkeypatch):
    written = gguf._write

    def damaged(path, *rest):
        written(path, *rest)
        tensor = stored(path)["blk.1.attn_v.weight"]
        with path.open("r+b") as file:
            file.seek(int(tensor.data_offset) + 7)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))

    monkeypatch.setattr(gguf, "_write", damaged)
    for specs in ({"*layers*": Spec(4, 32)}, {}):
        with pytest.raises(GateFailed, match=r"layers\.1\.self_attn\.v_proj"):
            export(coded(tiny_llama, specs), tmp_path / "m.gguf")
        assert list(tmp_path.iterdir()) == []


def test_a_value_too_large_for_f16_is_named(tiny_llama, tmp_path):
    checkpoint = coded(tiny_llama, {"*.1.mlp.up_proj.weight": Spec(8, 16)})
    name = "model.layers.1.mlp.up_proj.weight"
    checkpoint.codes[name] = random_codes(128, 64, Spec(8, 16), deviation=1e6)
    with pytest.raises(CompressorError, match=rf"{name}: .* too large for F16"):
        export(checkpoint, tmp_path / "m.gguf", float_type="f16")
    assert list(tmp_path.iterdir()) == []


def test_only_an_earlier_export_is_replaced(tiny_llama, tmp_path):
    out, checkpoint = tmp_path / "m.gguf", open_checkpoint(str(tiny_llama))
    out.write_bytes(b"GGUF of somebody else")
    with pytest.raises(CompressorError, match="is no earlier export"):
        export(checkpoint, out)
    assert out.read_bytes() == b"GGUF of somebody else"
    out.unlink()
    export(checkpoint, out, float_type="F32")
    first = out.read_bytes()
    export(checkpoint, out, float_type="F32")
    assert out.read_bytes() == first
    with pytest.raises(CompressorError, match="is no earlier export"):
        export(open_checkpoint(str(out)), out)


def test_a_full_disk_is_told_before_writing(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CompressorError, match="disk is too full"):
        export(open_checkpoint(str(tiny_llama)), tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def check(directory, **options):
    checkpoint = open_checkpoint(str(directory))
    return gguf.check(checkpoint, find_family(checkpoint.config, "x"), **options)


def test_check_finds_nothing_on_a_good_model(tiny_llama):
    assert check(tiny_llama) == []


def test_check_names_the_families_that_can(tiny_model):
    unable = [name for name, family in families().items() if family.gguf_arch is None]
    if not unable:
        pytest.skip("every family has a GGUF architecture")
    problems = check(tiny_model(unable[0]))
    assert len(problems) == 1
    assert unable[0] in str(problems[0])
    assert "llama, mistral" in str(problems[0])


def test_check_reports_everything_at_once(tiny_llama, tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    directory = changed_copy(
        tiny_llama, tmp_path / "m", "config.json", hidden_act="gelu", rope_parameters=rope, intermediate_size=96
    )
    (directory / "tokenizer.json").unlink()
    text = "\n".join(map(str, check(directory)))
    for part in ("hidden_act", "dynamic", "tokenizer.json is missing"):
        assert part in text
    assert "model.layers.1.mlp.up_proj.weight: not as config.json says" in text


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("mscale", 0.7, True),
        ("beta_fast", 16, True),
        ("truncate", False, True),
        ("attention_factor", 1.5, True),
        ("attention_factor", 0.1 * math.log(4) + 1, False),
        ("beta_fast", 32.0, False),
    ],
)
def test_check_of_yarn_constants(key, value, found):
    rope = {"rope_type": "yarn", "factor": 4.0, key: value}
    config = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 1, "vocab_size": 1}
    problems = gguf_metadata.check_config(
        families()["llama"], {**config, "num_hidden_layers": 1, "rope_scaling": rope}
    )
    assert [key in str(problem) for problem in problems] == ([True] if found else [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("---\nlicense: mit\n---\n", {"license": "mit"}),
        ("# none", {}),
        ("---\n: [\n---\n", {}),
        ("---\n3\n---", {}),
    ],
)
def test_front_matter(text, expected):
    assert gguf_metadata.front_matter(text) == expected
