"""GPTQ's column loop on FP8: its twin, its definition, and what it is for."""

import numpy as np
import pytest

from compressor.kernels import fp8, fp8_columns
from compressor.kernels.tiles import Tile


def case(rows=12, columns=72, seed=0):
    """Weights, and the Hessian of correlated inputs."""
    rng = np.random.default_rng(seed)
    inputs = (
        rng.standard_normal((400, 20)) @ rng.standard_normal((20, columns))
        + rng.standard_normal((400, columns)) / 3
    )
    hessian = inputs.T @ inputs / 400 + 0.01 * np.eye(columns)
    weight = rng.standard_normal((rows, columns)).astype(np.float32)
    return weight, hessian


def factor(hessian):
    return np.linalg.cholesky(np.linalg.inv(hessian)).T


def in_one_go(weight, hessian, scales, groups):
    """The algorithm without blocks, in float64."""
    upper, work = factor(hessian), weight.astype(np.float64)
    values = np.empty_like(weight)
    for i, group in enumerate(groups):
        scale = scales[:, group].astype(np.float64)
        values[:, i] = fp8.decode(fp8.encode_numpy((work[:, i] / scale).astype(np.float32)))
        work[:, i:] -= np.outer((work[:, i] - values[:, i] * scale) / upper[i, i], upper[i, i:])
    return values


@pytest.mark.parametrize("block", [1, 7, 128])
@pytest.mark.parametrize("tile", [Tile(1, 72), Tile(12, 72), Tile(5, 16)])
def test_equal_to_its_twin_bit_for_bit(tile, block):
    weight, hessian = case()
    scales = fp8.choose_scales(weight, tile)
    wide = np.repeat(scales, tile.rows, axis=0)[:12] if 1 < tile.rows < 12 else scales
    groups = (np.random.default_rng(1).permutation(72) // tile.columns).astype(np.int32)
    arguments = weight, factor(hessian).astype(np.float32), wide, groups, block
    codes, loss = fp8_columns.quantize_columns(*arguments)
    expected, lost = fp8_columns.quantize_columns_numpy(*arguments)
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(loss, lost)
    assert (codes != 0x80).all()


def test_equal_to_the_algorithm_without_blocks():
    weight, hessian = case()
    scales = fp8.choose_scales(weight, Tile(1, 72))
    groups = np.zeros(72, np.int32)
    codes, _ = fp8_columns.quantize_columns(weight, factor(hessian).astype(np.float32), scales, groups, 16)
    same = fp8.decode(codes) == in_one_go(weight, hessian, scales, groups)
    assert same.mean() > 0.99  # float32 against float64: a tie may fall the other way


def test_the_loss_is_the_error_of_the_outputs_and_less_than_nearest():
    weight, hessian = case()
    scales = fp8.choose_scales(weight, Tile(1, 72))
    upper, groups = factor(hessian).astype(np.float32), np.zeros(72, np.int32)
    codes, loss = fp8_columns.quantize_columns(weight, upper, scales, groups)

    def cost(codes):
        difference = (weight - fp8.dequantize(codes, scales, Tile(1, 72))).astype(np.float64)
        return np.einsum("ri,ij,rj->r", difference, hessian, difference)

    np.testing.assert_allclose(loss, cost(codes), rtol=1e-3)
    assert loss.sum() < 0.5 * cost(fp8.round_codes(weight, scales, Tile(1, 72))).sum()


def test_without_correlations_it_is_round_to_nearest():
    weight, _ = case()
    scales = fp8.choose_scales(weight, Tile(1, 72))
    codes, _ = fp8_columns.quantize_columns(weight, np.eye(72, dtype=np.float32), scales, np.zeros(72, np.int32))
    np.testing.assert_array_equal(codes & 0x7F, fp8.round_codes(weight, scales, Tile(1, 72)) & 0x7F)
