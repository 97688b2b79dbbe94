"""What every pass owes, whichever files there are."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from compressor.calibration.stats import LayerStats
from compressor.core.plan import PassCall
from compressor.core.spec import Spec
from compressor.core.tensors import QTensor
from compressor.passes import base

ALL = base.available()
PASSES = [name for name in ALL if base.load(name).KIND == "round"]
RESCALING = [name for name in ALL if base.load(name).KIND == "rescale"]
NEEDS = {"hessian", "cross", "held_out"}
SPECS = [
    Spec(4, 32),
    Spec(8, -1, scale_dtype="F16"),
    Spec(3, 0),
    Spec(2, 48, scale_dtype="F32"),
    Spec(4, 32, symmetric=False),
    Spec(8, -1, symmetric=False, scale_dtype="F16"),
]
CASES = [
    pytest.param(name, spec, id=f"{name} {spec.label()}")
    for name in PASSES
    for spec in SPECS
    if spec.symmetric or not base.load(name).SYMMETRIC_ONLY
]


@pytest.fixture(scope="module")
def weight():
    return np.random.default_rng(0).standard_normal((20, 96)).astype(np.float32)


@pytest.fixture(scope="module")
def stats():
    rng = np.random.default_rng(1)
    inputs = rng.standard_normal((400, 30)) @ rng.standard_normal((30, 96)) + rng.standard_normal((400, 96)) / 4
    inputs[:, 11] = 0
    found = LayerStats.empty(96)
    found.add(torch.from_numpy(inputs.astype(np.float32)))
    return found


def run(name, weight, spec, stats, **options):
    module = base.load(name)
    return module.run(weight, spec, stats, module.Options(**options), "cpu")


def call(name):
    return PassCall(name, base.load(name).Options().model_dump())


def absmax_codes(weight, spec):
    """Round to nearest on absmax scales, spelled out: the floor no pass may fall below."""
    rows = 1 if spec.group_size == 0 else len(weight)
    grouped = weight.reshape(rows, -1, weight.size // rows if rows == 1 else spec.columns_per_scale(96))
    top, bottom = np.maximum(grouped.max(axis=2), 0), np.minimum(grouped.min(axis=2), 0)
    steps = spec.qmax - spec.qmin
    scales = 2 * np.maximum(top, -bottom) / steps if spec.symmetric else (top - bottom) / steps
    zeros = 0 * scales if spec.symmetric else np.rint(spec.qmin - bottom / scales)
    codes = np.clip(np.rint(grouped / scales[..., None]) + zeros[..., None], spec.qmin, spec.qmax)
    return ((codes - zeros[..., None]) * scales[..., None]).reshape(weight.shape)


def cost(difference, hessian):
    difference = difference.astype(np.float64)
    return np.einsum("ri,ij,rj->", difference, hessian, difference)


def test_the_passes_are_found():
    assert {"gptq", "ptq_symmetric"} <= set(PASSES)
    assert {"awq", "smoothquant"} <= set(RESCALING)
    assert set(ALL) == {*PASSES, *RESCALING}


@pytest.mark.parametrize("name", ALL)
def test_what_a_pass_module_exports(name):
    module = base.load(name)
    assert module.__doc__
    assert isinstance(module.NEEDS, frozenset)
    assert module.NEEDS <= NEEDS
    assert base.needs(PassCall(name, module.Options().model_dump())) <= module.NEEDS
    if name in PASSES:
        assert isinstance(module.SYMMETRIC_ONLY, bool)
    else:
        assert set(module.PAIRS) <= {"norm", "linear"}
    assert issubclass(module.Options, base.PassOptions)
    assert all(field.description for field in module.Options.model_fields.values())


@pytest.mark.parametrize("name", ALL)
def test_options_are_strict_and_have_defaults(name):
    options = base.load(name).Options
    options()
    with pytest.raises(ValidationError):
        options(no_such_option=1)
    for field in options.model_fields:
        with pytest.raises(ValidationError):
            options(**{field: object()})
        with pytest.raises(ValidationError):
            setattr(options(), field, None)


@pytest.mark.parametrize("name", RESCALING)
@pytest.mark.parametrize("spec", [Spec(4, 32), Spec(8, -1), Spec(4, 32, symmetric=False)], ids=Spec.label)
def test_scales_are_positive_the_same_every_time_and_tied(name, spec, weight, stats):
    module = base.load(name)
    source_of = np.arange(96) // 32 * 16 + np.arange(96) % 16  # every source channel is read twice
    consumers = [base.Consumer(weight, spec), base.Consumer(weight[:7], spec, feedback=True)]
    first, second = (module.run(consumers, stats, source_of, module.Options(), "cpu") for _ in range(2))
    assert first.facts == second.facts
    assert first.scales is not None
    assert first.scales.dtype == np.float32
    assert first.scales.shape == (48,)
    assert np.isfinite(first.scales).all()
    assert (first.scales > 0).all()
    np.testing.assert_array_equal(first.scales, second.scales)


@pytest.mark.parametrize("name", RESCALING)
def test_without_tokens_nothing_is_rescaled(name, weight):
    module = base.load(name)
    found = module.run([base.Consumer(weight, Spec(4, 32))], LayerStats.empty(96), np.arange(96), module.Options())
    assert found.scales is None


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_it_returns_a_legal_tensor_the_same_every_time(name, spec, weight, stats):
    before, hessian = weight.copy(), stats.hessian.clone()
    first, second = (run(name, weight, spec, stats) for _ in range(2))
    assert isinstance(first.tensor, QTensor)
    assert first.tensor.spec == spec
    assert first.tensor.shape == weight.shape
    np.testing.assert_array_equal(first.tensor.codes, second.tensor.codes)
    np.testing.assert_array_equal(first.tensor.scales, second.tensor.scales)
    assert first.facts == second.facts
    assert first.degraded == second.degraded == ()
    np.testing.assert_array_equal(weight, before)
    assert torch.equal(stats.hessian, hessian)


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_it_is_not_worse_than_absmax_rounding(name, spec, weight, stats):
    """Judged by what the pass knows: the Hessian when it asks for one, else the weights alone."""
    rounded = run(name, weight, spec, stats)
    hessian = stats.hessian.numpy().astype(np.float64) if base.needs(call(name)) else np.eye(96)
    floor = cost(weight - absmax_codes(weight, spec), hessian)
    assert floor > 0
    assert cost(weight - rounded.tensor.dequantize(), hessian) < 1.01 * floor


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_it_does_without_statistics(name, spec, weight):
    rounded = run(name, weight, spec, None)
    assert isinstance(rounded.tensor, QTensor)
    assert bool(rounded.degraded) == bool(base.needs(call(name)))
    floor = cost(weight - absmax_codes(weight, spec), np.eye(96))
    assert cost(weight - rounded.tensor.dequantize(), np.eye(96)) < 1.01 * floor


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_facts_are_json(name, spec, weight, stats):
    import json

    facts = run(name, weight, spec, stats).facts
    assert facts
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_odd_weights_are_survived(name, spec, stats):
    weight = np.zeros((3, 96), dtype=np.float32)
    weight[1, 0], weight[2] = 1e-20, 6e4
    rounded = run(name, weight, spec, stats)
    back = rounded.tensor.dequantize()
    assert np.isfinite(back).all()
    assert not back[0].any()
    assert (rounded.tensor.scales > 0).all()
