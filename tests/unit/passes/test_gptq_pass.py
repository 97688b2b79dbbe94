import numpy as np
import pytest
import torch
from pydantic import ValidationError

from compressor.calibration import factor
from compressor.calibration.stats import LayerStats
from compressor.core.spec import Spec
from compressor.kernels.gptq import definition, quantize_columns
from compressor.passes import gptq

OPTIONS = gptq.Options()
FACTS = {
    "rounding",
    "damp",
    "dead_columns",
    "moved",
    "refined",
    "error",
    "error_rtn",
    "relative_error",
    "relative_error_rtn",
}


def gaussian(rows=24, columns=96, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def stats_of(columns=96, rank=40, tokens=300, dead=(), scale=1.0):
    rng = np.random.default_rng(3)
    inputs = rng.standard_normal((tokens, rank)) @ rng.standard_normal((rank, columns)) * scale
    inputs *= np.linspace(0.2, 3, columns)
    inputs[:, list(dead)] = 0
    stats = LayerStats.empty(columns)
    stats.add(torch.from_numpy(inputs.astype(np.float32)))
    return stats


def cost(weight, tensor, stats):
    difference = (weight - tensor.dequantize()).astype(np.float64)
    hessian = stats.hessian.numpy().astype(np.float64)
    return np.einsum("ri,ij,rj->", difference, hessian, difference) / stats.tokens


SPECS = [Spec(4, 16), Spec(4, -1), Spec(4, 0), Spec(3, 32, symmetric=False), Spec(8, 32), Spec(2, 48)]


@pytest.mark.parametrize("spec", SPECS, ids=Spec.label)
@pytest.mark.parametrize("act_order", [True, False])
def test_it_beats_round_to_nearest_and_the_facts_are_true(spec, act_order):
    weight, stats = gaussian(), stats_of()
    rounded = gptq.run(weight, spec, stats, gptq.Options(act_order=act_order))
    facts = rounded.facts
    assert set(facts) == FACTS
    assert facts["rounding"] == "gptq"
    assert facts["damp"] == 0.01
    assert facts["dead_columns"] == 0
    assert facts["error"] == pytest.approx(cost(weight, rounded.tensor, stats), rel=1e-3)
    assert facts["error"] < 0.7 * facts["error_rtn"]
    nothing = (weight.astype(np.float64) @ stats.hessian.numpy()) * weight / stats.tokens
    assert facts["relative_error"] == pytest.approx(facts["error"] / nothing.sum(), rel=1e-4)
    assert facts["relative_error_rtn"] == pytest.approx(facts["error_rtn"] / nothing.sum(), rel=1e-4)
    assert rounded.degraded == ()


def test_error_rtn_is_round_to_nearest_on_the_same_scales():
    weight, stats = gaussian(), stats_of()
    rounded = gptq.run(weight, Spec(4, 16), stats, OPTIONS)
    scales = np.repeat(rounded.tensor.scales, 16, axis=1)
    difference = (weight - np.clip(np.rint(weight / scales), -8, 7) * scales).astype(np.float64)
    expected = np.einsum("ri,ij,rj->", difference, stats.hessian.numpy().astype(np.float64), difference)
    assert rounded.facts["error_rtn"] == pytest.approx(expected / stats.tokens, rel=1e-3)


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("spec", [Spec(4, 16), Spec(4, 16, symmetric=False)], ids=Spec.label)
def test_codes_are_the_papers(act_order, spec):
    weight, stats = gaussian(), stats_of(dead=(4, 50))
    tensor = gptq.run(weight, spec, stats, gptq.Options(act_order=act_order)).tensor
    hessian = stats.hessian.numpy().astype(np.float64)
    mean = np.diag(hessian)[np.diag(hessian) > 0].mean()
    order = np.argsort(-np.diag(hessian), kind="stable") if act_order else np.arange(96)
    hessian[[4, 50], [4, 50]] = 1
    hessian += 0.01 * mean * np.eye(96)
    groups = (order // 16).astype(np.int32)
    codes = definition(weight[:, order], hessian[order][:, order], tensor.scales, tensor.zeros, groups, -8, 7)
    # float32 against float64: a weight that lands next to a rounding boundary may fall either way
    assert (tensor.codes[:, order] != codes).mean() < 0.005


def test_act_order_helps_here():
    weight, stats = gaussian(64), stats_of()
    errors = [gptq.run(weight, Spec(3, 32), stats, gptq.Options(act_order=o)).facts["error"] for o in (True, False)]
    assert errors[0] < errors[1]


def test_dead_columns_keep_their_rounded_weights():
    weight, stats = gaussian(), stats_of(dead=(4, 50))
    rounded = gptq.run(weight, Spec(4, 16), stats, OPTIONS)
    assert rounded.facts["dead_columns"] == 2
    scales = np.repeat(rounded.tensor.scales, 16, axis=1)
    nearest = np.clip(np.rint(weight / scales), -8, 7)
    np.testing.assert_array_equal(rounded.tensor.codes[:, [4, 50]], nearest[:, [4, 50]])


def test_dead_columns_need_no_damp():
    stats = stats_of(dead=(4, 50))
    diagonal = stats.hessian.diagonal()
    diagonal[diagonal > 0] += 0.02 * diagonal.mean()  # full rank but for the dead columns
    facts = gptq.run(gaussian(), Spec(4, 16), stats, gptq.Options(damp=0.0)).facts
    assert (facts["damp"], facts["dead_columns"], facts["rounding"]) == (0.0, 2, "gptq")


def test_dead_columns_do_not_touch_the_others():
    weight, stats = gaussian(), stats_of(dead=(4, 50))
    other = weight.copy()
    other[:, [4, 50]] *= 0.9  # inside its group's range; absmax scales need not change
    spec, options = Spec(4, 1, scale_dtype="F32"), gptq.Options(scales="absmax")
    codes = [gptq.run(w, spec, stats, options).tensor.codes for w in (weight, other)]
    living = np.delete(np.arange(96), [4, 50])
    np.testing.assert_array_equal(codes[0][:, living], codes[1][:, living])


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_scale_of_the_inputs_does_not_matter(scale):
    weight = gaussian()
    reference = gptq.run(weight, Spec(4, 16), stats_of(), OPTIONS).tensor
    tensor = gptq.run(weight, Spec(4, 16), stats_of(scale=scale), OPTIONS).tensor
    assert (tensor.codes == reference.codes).mean() > 0.99


def test_one_token_is_enough():
    stats = stats_of(tokens=1)
    rounded = gptq.run(gaussian(), Spec(4, 16), stats, OPTIONS)
    assert rounded.facts["rounding"] == "gptq"
    assert rounded.facts["error"] < 0.1 * rounded.facts["error_rtn"]


@pytest.mark.parametrize(
    ("stats", "why"),
    [
        (None, "no calibration tokens"),
        (LayerStats.empty(96), "no calibration tokens"),
        (LayerStats(torch.zeros(96, 96), 5), "inputs were zero"),
        (LayerStats(torch.full((96, 96), float("nan")), 5), "not finite"),
        (LayerStats(torch.eye(96) - 10 * torch.ones(96, 96).fill_diagonal_(0), 5), "Cholesky"),
    ],
    ids=["none", "no tokens", "zero", "nan", "indefinite"],
)
def test_without_usable_statistics_it_rounds_to_nearest_and_says_so(stats, why):
    weight = gaussian()
    rounded = gptq.run(weight, Spec(4, 16), stats, OPTIONS)
    assert len(rounded.degraded) == 1
    assert why in rounded.degraded[0]
    assert set(rounded.facts) == FACTS
    assert rounded.facts["rounding"] == "rtn"
    scales = np.repeat(rounded.tensor.scales, 16, axis=1)
    np.testing.assert_array_equal(rounded.tensor.codes, np.clip(np.rint(weight / scales), -8, 7))


def test_the_ladder_of_damps():
    assert list(factor._ladder(0.01)) == pytest.approx([0.01, 0.1, 1.0])
    assert list(factor._ladder(0.0)) == pytest.approx([0.0, 0.001, 0.01, 0.1, 1.0])
    assert list(factor._ladder(0.3)) == pytest.approx([0.3, 1.0])
    assert list(factor._ladder(1.0)) == [1.0]


def test_a_hessian_that_needs_more_damp_gets_it_and_the_facts_say_so():
    stats = stats_of()
    values, vectors = torch.linalg.eigh(stats.hessian.double())
    values[0] = -0.05 * values.mean()  # lets damp 0.01 fail, 0.1 succeed
    stats.hessian = (vectors * values @ vectors.T).float()
    rounded = gptq.run(gaussian(), Spec(4, 16), stats, OPTIONS)
    assert rounded.facts["damp"] == pytest.approx(0.1)
    assert rounded.degraded == ()


def test_where_gptq_gains_nothing_round_to_nearest_is_kept():
    stats = LayerStats(torch.eye(96), 5)
    rounded = gptq.run(gaussian(), Spec(4, 16), stats, OPTIONS)
    assert rounded.facts["rounding"] == "rtn"
    assert rounded.facts["error"] == rounded.facts["error_rtn"]
    assert rounded.degraded == ()


def test_the_factor_is_that_of_the_inverse():
    hessian = stats_of(dead=(7,)).hessian
    living, order = hessian.diagonal() > 0, torch.randperm(96, generator=torch.manual_seed(0))
    upper = factor._inverse_factor(hessian, living, order, 0.01, torch.float64)
    damped = factor.damped(hessian, living, order, 0.01, torch.float64)
    np.testing.assert_allclose(upper.T @ upper, torch.linalg.inv(damped), rtol=1e-8, atol=1e-12)
    np.testing.assert_array_equal(upper.tril(-1), 0)
    assert (upper.diagonal() > 0).all()


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("shape", [(9, 6), (1, 1)])
def test_columns_torch_gives_the_kernels_codes_in_float64(zeros, shape):
    rng, columns = np.random.default_rng(1), 54
    inputs = rng.standard_normal((200, columns)) @ rng.standard_normal((columns, columns))
    upper = np.linalg.cholesky(np.linalg.inv(inputs.T @ inputs + np.eye(columns))).T.copy()
    weight = rng.standard_normal((9, columns))
    scales = rng.uniform(0.2, 0.4, shape)
    zero = rng.integers(-3, 4, shape).astype(np.int8) if zeros else None
    groups = (rng.permutation(columns) // (columns // shape[1])).astype(np.int32)
    codes, loss = quantize_columns(weight, upper, scales, zero, groups, -8, 7, 16)
    moved = [None if a is None else torch.from_numpy(a) for a in (weight, upper, scales, zero, groups)]
    twin, twin_loss = gptq.columns_torch(*moved, -8, 7, 16)
    np.testing.assert_array_equal(twin, codes)
    np.testing.assert_allclose(twin_loss, loss, rtol=1e-9)
    assert twin.dtype == torch.int8


def test_the_accelerator_path_ends_in_the_same_tensor(monkeypatch):
    weight, stats = gaussian(), stats_of()
    expected = gptq.run(weight, Spec(4, 16, symmetric=False), stats, OPTIONS).tensor

    def on_device(weight, upper, scales, zeros, groups, *rest):
        moved = [torch.from_numpy(np.ascontiguousarray(a)) for a in (weight, upper, scales, zeros, groups)]
        codes, loss = gptq.columns_torch(*moved, *rest)
        return codes.numpy(), loss.numpy()

    monkeypatch.setattr("compressor.kernels.gptq.quantize_columns", on_device)
    tensor = gptq.run(weight, Spec(4, 16, symmetric=False), stats, OPTIONS).tensor
    assert (tensor.codes == expected.codes).mean() > 0.995


def test_nothing_given_is_changed():
    weight, stats = gaussian(columns=48), stats_of(48)
    before, hessian = weight.copy(), stats.hessian.clone()
    gptq.run(weight, Spec(4, 16), stats, gptq.Options(act_order=False))
    np.testing.assert_array_equal(weight, before)
    assert torch.equal(stats.hessian, hessian)


def test_a_wrong_hessian_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        gptq.run(gaussian(), Spec(4, 16), stats_of(48), OPTIONS)


@pytest.mark.parametrize("wrong", [{"damp": -0.1}, {"damp": 2}, {"block_size": 0}, {"act_order": "yes"}, {"x": 1}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ValidationError):
        gptq.Options(**wrong)


def test_strips_of_columns_do_not_show(monkeypatch):
    difference, hessian = gaussian(), stats_of().hessian
    whole = gptq._cost(difference, hessian)
    monkeypatch.setattr(gptq, "_STRIP", 17)
    assert gptq._cost(difference, hessian) == pytest.approx(whole, rel=1e-5)
    expected = np.einsum("ri,ij,rj->", difference, hessian.numpy().astype(np.float64), difference)
    assert whole == pytest.approx(expected, rel=1e-5)


def test_propagation_is_the_least_squares_answer_to_drifted_inputs():
    """With tokens to spare and no damp, W* gives what W gave on the float inputs, as well as any matrix can."""
    rng = np.random.default_rng(5)
    exact = rng.standard_normal((3000, 48)).astype(np.float32)
    drifted = (
        exact + 0.3 * exact @ rng.standard_normal((48, 48)) / 7 + 0.1 * rng.standard_normal((3000, 48))
    ).astype(np.float32)
    stats = LayerStats.empty(48, cross=True)
    stats.add(torch.from_numpy(drifted), torch.from_numpy(exact))
    weight = rng.standard_normal((8, 48)).astype(np.float32)
    plain = {"propagate_damp": 0.0}
    target = gptq._propagated(weight, stats, gptq.Options(propagate=1.0, **plain))
    best = np.linalg.lstsq(drifted.astype(np.float64), exact.astype(np.float64) @ weight.T, rcond=None)[0].T
    np.testing.assert_allclose(target, best, atol=2e-3)
    half = gptq._propagated(weight, stats, gptq.Options(propagate=0.5, **plain))
    np.testing.assert_allclose(half, (weight + best) / 2, atol=2e-3)
    careful = gptq._propagated(weight, stats, gptq.Options(propagate=1.0, propagate_damp=1.0))
    assert 0 < np.linalg.norm(careful - weight) < 0.9 * np.linalg.norm(target - weight)


def test_propagation_pays_on_the_outputs_and_the_facts_say_how_far_the_weight_moved():
    rng = np.random.default_rng(6)
    exact = rng.standard_normal((2000, 64)).astype(np.float32)
    drifted = (exact @ (np.eye(64) + 0.1 * rng.standard_normal((64, 64)))).astype(np.float32)
    stats = LayerStats.empty(64, cross=True)
    stats.add(torch.from_numpy(drifted), torch.from_numpy(exact))
    weight = rng.standard_normal((16, 64)).astype(np.float32)

    def output_error(strength):
        rounded = gptq.run(weight, Spec(4, 32), stats, gptq.Options(propagate=strength))
        moved = rounded.facts["moved"]
        return np.linalg.norm(exact @ weight.T - drifted @ rounded.tensor.dequantize().T), moved

    (none, still), (full, moved) = output_error(0.0), output_error(1.0)
    assert still == 0
    assert 0.1 < moved < 3
    assert full < 0.5 * none


def test_what_it_needs_follows_its_options():
    assert gptq.needs(gptq.Options()) == {"hessian", "cross"}
    assert gptq.needs(gptq.Options(propagate=0.0)) == {"hessian"}
    assert gptq.needs(gptq.Options(propagate=0.0, sweeps=1)) == {"hessian"}
    assert gptq.needs(gptq.Options(propagate=0.0, sweeps=1, held_out=True)) == {"hessian", "held_out"}


@pytest.mark.parametrize("options", [{"refits": 3}, {"sweeps": 2}, {"refits": 2, "sweeps": 1}], ids=str)
def test_refining_lowers_the_error_and_is_kept_only_where_held_out_tokens_agree(options):
    weight, stats = gaussian(), stats_of()
    plain = gptq.run(weight, Spec(3, 16), stats, gptq.Options())
    refined = gptq.run(weight, Spec(3, 16), stats, gptq.Options(**options))
    assert refined.facts["refined"]
    assert not plain.facts["refined"]
    assert refined.facts["error"] < 0.999 * plain.facts["error"]
    silent = LayerStats(torch.zeros_like(stats.hessian), 10)
    against = LayerStats(stats.hessian, stats.tokens, held_out=silent)
    kept = gptq.run(weight, Spec(3, 16), against, gptq.Options(held_out=True, **options))
    assert not kept.facts["refined"]
    np.testing.assert_array_equal(kept.tensor.codes, plain.tensor.codes)
