"""Verification: healthy models pass, every kind of damage is found and named."""

import shutil

import numpy as np
import pytest
import torch
from fixtures_artifacts import copy_without_manifest, overwrite
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from compressor.calibration.stats import LayerStats
from compressor.core.spec import Spec
from compressor.errors import Problems
from compressor.eval.tensors import CEILING, error_limit, relative_error, rounding_error, verify_model
from compressor.models import open_model
from compressor.passes import gptq, ptq_symmetric

UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"
BF16_NAN = b"\xc0\x7f"


def problems(target, source=None):
    return verify_model(open_model(str(target)), open_model(str(source)) if source else None).problems


def edited(source, target, edit):
    """A copy of a one-file model after ``edit`` changed its dict of tensors."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_relative_error_by_hand():
    w, q = np.array([[3.0, 4.0]], np.float32), np.array([[3.0, 3.0]], np.float32)
    assert relative_error(w, q) == pytest.approx(1 / 5)
    assert relative_error(w, w) == 0.0
    assert relative_error(w, np.zeros_like(w)) == 1.0
    assert relative_error(np.zeros_like(w), np.zeros_like(w)) == 0.0
    assert relative_error(np.zeros_like(w), w) == float("inf")


def test_relative_error_in_blocks_equals_the_definition(monkeypatch):
    from compressor.eval import tensors

    rng = np.random.default_rng(0)
    w, q = (rng.standard_normal((37, 11)).astype(np.float32) for _ in range(2))
    expected = np.linalg.norm((w - q).astype(np.float64)) / np.linalg.norm(w.astype(np.float64))
    monkeypatch.setattr(tensors, "_BLOCK", 25)
    assert relative_error(w, q) == pytest.approx(expected, rel=1e-6)
    assert relative_error(w[:, 0], q[:, 0]) == pytest.approx(
        np.linalg.norm(w[:, 0] - q[:, 0]) / np.linalg.norm(w[:, 0]), rel=1e-6
    )
    spec = Spec(4, 0)
    whole = np.abs(w).max() / 7 / 12**0.5 * w.size**0.5 / np.linalg.norm(w)
    assert rounding_error(w, spec) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("group_size", [32, -1, 0])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_rounding_error_predicts_round_to_nearest(bits, group_size):
    w = np.random.default_rng(1).standard_normal((64, 128)).astype(np.float32)
    spec = Spec(bits, group_size, scale_dtype="F32")
    options = ptq_symmetric.Options(scales="absmax", range="textbook")
    rounded = ptq_symmetric.run(w, spec, None, options, "cpu").tensor
    assert relative_error(w, rounded.dequantize()) == pytest.approx(rounding_error(w, spec), rel=0.05)


FLOATS = [Spec(8, -1, kind="float"), Spec(8, 0, kind="float"), Spec(8, 0, kind="float", block=(32, 32))]


@pytest.mark.parametrize("spec", FLOATS, ids=Spec.label)
def test_rounding_error_predicts_fp8(spec):
    w = np.random.default_rng(1).standard_normal((64, 128)).astype(np.float32)
    rounded = ptq_symmetric.run(w, spec, None, ptq_symmetric.Options(scales="absmax"), "cpu").tensor
    assert rounding_error(w, spec) == pytest.approx(relative_error(w, rounded.dequantize()), rel=0.2)
    limit = error_limit(w, rounded, None)
    assert limit < 0.15
    damaged = np.where(np.arange(64)[:, None] < 2, 0, rounded.dequantize())  # two rows lost
    assert relative_error(w, damaged) > limit


@settings(max_examples=25, deadline=None)
@given(
    st.integers(3, 8), st.sampled_from([32, -1]), st.booleans(), st.sampled_from([0.0, 0.003]), st.integers(1, 64),
    st.integers(0, 2**31),
)  # fmt: skip
def test_healthy_gptq_is_never_called_damaged(bits, group_size, symmetric, outliers, rank, seed):
    """Ill-conditioned inputs and weights with outliers push GPTQ's weight error furthest."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((32, 64)) * np.where(rng.random((32, 64)) < outliers, 15, 1)
    x = rng.standard_normal((128, rank)) @ rng.standard_normal((rank, 64)) * np.exp(rng.standard_normal(64))
    stats = LayerStats.empty(64)
    stats.add(torch.from_numpy(x.astype(np.float32)))
    weight, spec = w.astype(np.float32), Spec(bits, group_size, symmetric)
    codes = gptq.run(weight, spec, stats, gptq.Options(), "cpu").tensor
    assert relative_error(weight, codes.dequantize()) < error_limit(weight, codes, None)


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, -1), (8, -1), (8, 0)])
@pytest.mark.parametrize("damage", ["scales doubled", "rows shuffled", "groups shuffled", "codes negated"])
def test_gross_damage_is_beyond_the_limit(bits, group_size, damage):
    rng = np.random.default_rng(2)
    w = rng.standard_normal((64, 128)).astype(np.float32)
    options = ptq_symmetric.Options()
    codes = ptq_symmetric.run(w, Spec(bits, group_size), None, options, "cpu").tensor
    q = codes.dequantize()
    bad = {
        "scales doubled": 2 * q,
        "rows shuffled": q[rng.permutation(64)],
        "groups shuffled": q.reshape(64, 4, 32)[:, ::-1].reshape(64, 128),
        "codes negated": -q,
    }[damage]
    assert relative_error(w, q) < error_limit(w, codes, None) < relative_error(w, bad)


def test_limits_of_gguf_types_and_floats():
    w = np.random.default_rng(3).standard_normal((64, 128)).astype(np.float32)
    assert 0.5 <= error_limit(w, None, "Q8_0", in_gguf=True) < 1.0
    assert error_limit(w, None, "Q4_0", in_gguf=True) == CEILING  # int2 codes may lie in it
    assert error_limit(w, None, "F16", in_gguf=True) == CEILING  # codes no block holds
    assert error_limit(w, None, "Q2_K") == error_limit(w, None, "IQ3_S") == 1.2
    assert error_limit(w, None, "F16") == error_limit(w, None, None) == 0.01
    assert error_limit(w[0], None, "F32") == 0.01


def test_a_model_is_true_to_itself(tiny_llama):
    found = verify_model(open_model(str(tiny_llama)), open_model(str(tiny_llama)))
    assert found.problems == []
    assert {check.relative_error for check in found.checks} == {0.0}
    assert [check.name for check in found.checks] == list(open_model(str(tiny_llama)).tensors)


def test_an_artifact_is_true_to_its_source(artifact, tiny_llama):
    found = verify_model(open_model(str(artifact)), open_model(str(tiny_llama)))
    errors = {check.name: (check.format, check.relative_error) for check in found.checks}
    assert found.problems == []
    assert errors[f"{UP}.weight"][0] == "int4 g32"
    assert 0.05 < errors[f"{UP}.weight"][1] < 0.12
    assert errors[f"{DOWN}.weight"][0] == "int8 channel"
    assert 0.003 < errors[f"{DOWN}.weight"][1] < 0.01
    assert errors["model.norm.weight"] == ("BF16", 0.0)
    ranked = [check.relative_error for check in found.worst_first()]
    assert ranked == sorted(ranked, reverse=True)
    assert found.worst().format == "int4 g32"
    assert found.to_json()["ok"] is True


def test_our_gguf_is_true_to_the_source(artifact, tiny_llama):
    found = verify_model(open_model(str(artifact.with_suffix(".gguf"))), open_model(str(tiny_llama)))
    errors = {check.name: (check.format, check.relative_error) for check in found.checks}
    assert found.problems == []
    assert errors[f"{UP}.weight"][0] == "Q4_0"
    assert 0.05 < errors[f"{UP}.weight"][1] < 0.12
    assert errors["model.norm.weight"] == ("F32", 0.0)
    assert errors.keys() == open_model(str(tiny_llama)).tensors.keys()


def test_a_gguf_of_another_model_is_not(artifact, tiny_model):
    found = problems(artifact.with_suffix(".gguf"), tiny_model("mistral"))
    assert any(f"{UP}.weight: relative error 1.4" in problem for problem in found)
    assert any("model.norm.weight: kept as stored" in problem for problem in found)


def test_nan_in_a_kept_tensor_is_named(tiny_llama, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_llama, copy)
    overwrite(copy, f"{UP}.weight", BF16_NAN, offset=2 * 65)
    (found,) = problems(copy)
    assert f"{UP}.weight: 1 value is NaN or infinite (first at row 1, column 1)" in found


@pytest.mark.parametrize("bits", [BF16_NAN, b"\x80\x7f"])  # NaN, infinity
def test_scales_that_are_no_numbers_are_named(artifact, tmp_path, bits):
    copy = copy_without_manifest(artifact, tmp_path / "copy")
    overwrite(copy, f"{UP}.weight_scale", bits)
    (found,) = problems(copy)
    assert found.startswith(f"{UP}: not a legal int4 g32 matrix")


def test_a_shape_record_that_fits_nothing_is_refused_on_opening(artifact, tmp_path):
    copy = copy_without_manifest(artifact, tmp_path / "copy")
    overwrite(copy, f"{UP}.weight_shape", b"\x07" * 8)
    with pytest.raises(Problems, match="do not fit together"):
        open_model(str(copy))


def test_damaged_codes_and_scales_are_found_by_comparing(artifact, tiny_llama, tmp_path):
    copy = copy_without_manifest(artifact, tmp_path / "copy")
    overwrite(copy, f"{UP}.weight_packed", bytes(128 * 64 // 2))  # every code -8
    overwrite(copy, f"{DOWN}.weight_scale", b"\x80\x42")  # one row of 64, scaled to 64.0 per step
    found = problems(copy, tiny_llama)
    assert len(found) == 2
    assert any(f"{UP}.weight: relative error" in p and "int4 g32 explains at most 0." in p for p in found)
    assert any(f"{DOWN}.weight: relative error" in p and "int8 channel explains at most 0.0" in p for p in found)
    assert problems(copy) == []  # legal codes: only the source tells


def test_a_kept_tensor_must_be_the_sources_bit_for_bit(artifact, tiny_llama, tmp_path):
    copy = copy_without_manifest(artifact, tmp_path / "copy")
    low_bit = open_model(str(copy)).raw("model.norm.weight").data[0] ^ 1
    overwrite(copy, "model.norm.weight", bytes([low_bit]))
    assert problems(copy, tiny_llama) == [
        "model.norm.weight: kept as stored, but its bytes differ from the source's"
    ]


def test_another_float_dtype_is_compared_by_value(tiny_llama, tmp_path):
    copy = edited(tiny_llama, tmp_path / "half", lambda t: t.update({n: v.half() for n, v in t.items()}))
    assert problems(copy, tiny_llama) == []
    worse = edited(copy, tmp_path / "worse", lambda t: t[f"{UP}.weight"].mul_(1.02))
    (found,) = problems(worse, tiny_llama)
    assert f"{UP}.weight: relative error 0.020, F16 explains at most 0.010" in found


def test_missing_extra_and_misshapen_tensors(tiny_llama, tmp_path):
    def edit(tensors):
        tensors["extra.weight"] = tensors.pop(f"{UP}.weight")
        tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"][:, :64].contiguous()

    copy = edited(tiny_llama, tmp_path / "copy", edit)
    assert problems(copy, tiny_llama) == [
        f"{UP}.weight: missing, the source has it",
        "extra.weight: not in the source",
        f"{DOWN}.weight: shape [64, 64], the source has [64, 128]",
    ]
    alone = problems(copy)
    assert len(alone) == 2
    assert any(f"{UP}.weight is missing" in problem for problem in alone)
    assert any(f"{DOWN}.weight has the wrong shape" in problem for problem in alone)


def test_a_tied_head_may_be_left_out(tiny_model, tmp_path):
    tied = tiny_model("llama", tie_word_embeddings=True)
    whole = edited(
        tied, tmp_path / "whole", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    assert problems(tied, whole) == problems(whole, tied) == problems(whole) == []


def test_an_unknown_family_is_noted(tiny_llama, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_llama, copy)
    config = copy / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"lama"'))
    found = verify_model(open_model(str(copy)))
    assert found.problems == []
    assert found.notes == ["model_type 'lama' is not known: names and shapes not checked"]
