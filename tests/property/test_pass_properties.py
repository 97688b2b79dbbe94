"""Rounding passes on any weight: never worse than round to nearest, never a scale that is not a number."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.calibration.stats import LayerStats
from compressor.core.grid import choose_grid
from compressor.core.spec import Spec
from compressor.kernels import descent
from compressor.passes import gptq

WIDTH = 64
specs = st.one_of(
    st.builds(
        Spec,
        bits=st.integers(2, 8),
        group_size=st.sampled_from([16, 32, -1, 0]),
        symmetric=st.booleans(),
        scale_dtype=st.sampled_from(["BF16", "F16", "F32"]),
    ),
    st.sampled_from([Spec(8, -1, kind="float", scale_dtype="F32"), Spec(8, 0, kind="float", block=(8, 16))]),
)


def inputs(seed: int, tokens: int, spread: float) -> np.ndarray:
    """Correlated inputs float32 [tokens, WIDTH] whose columns differ in size by up to e^spread each way."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((tokens, WIDTH)) @ (np.eye(WIDTH) + 0.3 * rng.standard_normal((WIDTH, WIDTH)))
    return (mixed * np.exp(rng.uniform(-spread, spread, WIDTH))).astype(np.float32)


def statistics(x: np.ndarray) -> LayerStats:
    stats = LayerStats.empty(WIDTH)
    stats.add(torch.from_numpy(x))
    return stats


def cost(difference: np.ndarray, x: np.ndarray) -> float:
    return float(np.square(difference.astype(np.float64) @ x.astype(np.float64).T).sum())


@settings(deadline=None, max_examples=60)
@given(specs, st.integers(0, 2**16), st.integers(1, 200), st.floats(0, 4), st.booleans())
def test_the_error_on_the_inputs_is_never_above_round_to_nearest(spec, seed, tokens, spread, refined):
    """On gptq's own scales, by inputs it may not even have enough of."""
    x = inputs(seed, tokens, spread)
    weight = np.random.default_rng(seed + 1).standard_normal((16, WIDTH)).astype(np.float32)
    rounded = gptq.run(weight, spec, statistics(x), gptq.Options(refits=2 * refined, sweeps=int(refined)))
    ours = cost(weight - rounded.tensor.dequantize(), x)
    assert rounded.facts["error"] <= rounded.facts["error_rtn"]
    assert ours == pytest.approx(rounded.facts["error"] * tokens, rel=1e-3, abs=2e-5 * cost(weight, x))


@settings(deadline=None, max_examples=100)
@given(
    specs,
    st.lists(st.sampled_from(["zero", "constant", "tiny", "huge", "one value", "normal"]), min_size=4, max_size=4),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_scales_are_finite_on_strange_groups(spec, kinds, weighted, seed):
    """All-zero and constant groups, weights of 1e-9 and 1e5, one value alone."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((8, WIDTH)).astype(np.float32)
    for number, kind in enumerate(kinds):
        part = weight[:, number * 16 : (number + 1) * 16]
        if kind in ("zero", "one value"):
            part[:] = 0
        if kind == "one value":
            part[:, 3] = 1.5
        if kind == "constant":
            part[:] = -0.25
        part *= {"tiny": 1e-9, "huge": 1e5}.get(kind, 1.0)
    importance = np.exp(rng.uniform(-20, 20, WIDTH)).astype(np.float32) if weighted else None
    grid = choose_grid(weight, spec, importance=importance)
    assert np.isfinite(grid.scales).all()
    assert (grid.scales > 0).all()
    nearest = grid.nearest().dequantize()
    assert np.isfinite(nearest).all()


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([16, 64]),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_descent_and_refit_lower_the_error_and_equal_their_definitions(bits, group, symmetric, seed):
    x = inputs(seed, 300, 1.0)
    hessian = (x.T @ x / len(x)).astype(np.float32)
    hessian[np.diag_indices(WIDTH)] += 0.01 * hessian.diagonal().mean()
    weight = np.random.default_rng(seed).standard_normal((12, WIDTH)).astype(np.float32)
    grid = choose_grid(weight, Spec(bits, group, symmetric))
    nearest = grid.nearest()
    codes, left = nearest.codes, weight - nearest.dequantize()

    def loss(codes, scales):
        steps = codes.reshape(12, -1, group).astype(np.float64)
        if grid.zeros is not None:
            steps = steps - grid.zeros[:, :, None]
        left = weight - (steps * scales[:, :, None]).reshape(weight.shape)
        return np.einsum("ri,ij,rj->r", left, hessian.astype(np.float64), left)

    limits = grid.low, grid.high
    moved = descent.descend(left, hessian, codes, grid.scales, *limits, sweeps=3)
    assert moved.min() >= grid.low
    assert moved.max() <= grid.high
    before, after = loss(codes, grid.scales), loss(moved, grid.scales)
    assert (after <= before * (1 + 1e-5)).all()
    twin = descent.descend_numpy(left, hessian, codes, grid.scales, *limits, sweeps=3)
    np.testing.assert_allclose(loss(twin, grid.scales), after, rtol=0.02)
    assert (moved == twin).mean() > 0.98
    fitted = descent.refit(weight, hessian, codes, grid.zeros, grid.scales)
    assert (loss(codes, fitted) <= before * (1 + 1e-4)).all()
    assert (fitted > 0).all()
    assert np.isfinite(fitted).all()
