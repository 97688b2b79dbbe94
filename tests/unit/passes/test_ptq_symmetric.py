from itertools import pairwise

import numpy as np
import pytest
from pydantic import ValidationError

from compressor.core.spec import Spec
from compressor.errors import CompressorError
from compressor.kernels.floats import round_to_dtype
from compressor.passes import ptq_symmetric

OPTIONS = ptq_symmetric.Options()


def gaussian(rows=16, columns=96):
    return np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)


def test_defaults_and_registry_constants():
    assert (OPTIONS.scales, OPTIONS.range) == ("mse", "full")
    assert not ptq_symmetric.needs(OPTIONS)
    assert ptq_symmetric.needs(ptq_symmetric.Options(weighted=True)) == {"hessian"}
    assert ptq_symmetric.KIND == "round"
    assert ptq_symmetric.SYMMETRIC_ONLY


def test_textbook_int8_per_channel():
    options = ptq_symmetric.Options(scales="absmax", range="textbook")
    weight = np.array([[1.27, -0.5, 0.0, 0.01], [-2.54, 2.54, 0.02, 0.05]], dtype=np.float32)
    tensor = ptq_symmetric.run(weight, Spec(8, -1, scale_dtype="F32"), None, options).tensor
    np.testing.assert_array_equal(tensor.scales, np.float32([[1.27 / 127], [2.54 / 127]]))
    assert tensor.codes.tolist() == [[127, -50, 0, 1], [-127, 127, 1, 2]]


def test_textbook_never_uses_the_lowest_code_and_full_does():
    weight = gaussian()
    textbook = ptq_symmetric.Options(range="textbook")
    assert ptq_symmetric.run(weight, Spec(3, 32), None, textbook).tensor.codes.min() == -3
    assert ptq_symmetric.run(weight, Spec(3, 32), None, OPTIONS).tensor.codes.min() == -4


@pytest.mark.parametrize("group_size", [32, -1, 0])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_facts_tell_the_error(bits, group_size):
    weight = gaussian()
    rounded = ptq_symmetric.run(weight, Spec(bits, group_size), None, OPTIONS)
    difference = (weight - rounded.tensor.dequantize()).astype(np.float64)
    assert rounded.facts["weight_error"] == pytest.approx((difference**2).sum(), rel=1e-9)
    total = (weight.astype(np.float64) ** 2).sum()
    assert rounded.facts["relative_weight_error"] == pytest.approx((difference**2).sum() / total, rel=1e-9)
    assert rounded.degraded == ()


def test_more_bits_err_less():
    errors = [
        ptq_symmetric.run(gaussian(), Spec(bits, 32), None, OPTIONS).facts["weight_error"] for bits in range(2, 9)
    ]
    assert all(fine < coarse / 2 for coarse, fine in pairwise(errors))


def test_a_zero_matrix_stays_zero():
    rounded = ptq_symmetric.run(np.zeros((2, 64), np.float32), Spec(4, 32), None, OPTIONS)
    assert not rounded.tensor.dequantize().any()
    assert rounded.facts == {"weight_error": 0.0, "relative_weight_error": 0.0}


def test_an_asymmetric_format_is_refused():
    with pytest.raises(CompressorError, match="zero points") as caught:
        ptq_symmetric.run(gaussian(), Spec(4, 32, symmetric=False), None, OPTIONS)
    assert "gptq" in str(caught.value)


def test_unknown_options_are_refused():
    with pytest.raises(ValidationError):
        ptq_symmetric.Options(range="half")
    with pytest.raises(ValidationError):
        ptq_symmetric.Options(act_order=True)


FP8 = [Spec(8, -1, kind="float"), Spec(8, 0, kind="float"), Spec(8, 0, kind="float", block=(8, 64))]


@pytest.mark.parametrize("spec", FP8, ids=Spec.label)
def test_fp8_rounds_every_weight_to_its_nearest_value(spec):
    weight = gaussian()
    rounded = ptq_symmetric.run(weight, spec, None, ptq_symmetric.Options(scales="absmax"))
    scales = rounded.tensor.scales
    assert scales.max() == round_to_dtype(np.float32([np.abs(weight).max() / 448]), "BF16")[0]
    values = rounded.tensor.dequantize()
    assert np.abs(values - weight).max() <= np.abs(weight).max() / 16  # half a step of the top binade, 1/8 to 1/16
    error = float(np.square((values - weight).astype(np.float64)).sum())
    assert rounded.facts["weight_error"] == pytest.approx(error, rel=1e-9)
    assert rounded.facts["relative_weight_error"] == pytest.approx(0.0265**2, rel=0.3)


@pytest.mark.parametrize("spec", FP8, ids=Spec.label)
def test_the_search_lowers_the_error_of_fp8(spec):
    errors = [
        ptq_symmetric.run(gaussian(), spec, None, ptq_symmetric.Options(scales=scales)).facts["weight_error"]
        for scales in ("mse", "absmax")
    ]
    assert errors[0] < errors[1]
