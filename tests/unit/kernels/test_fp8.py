"""FP8 E4M3 against torch and against its definition."""

import numpy as np
import pytest
import torch

from compressor.kernels import fp8
from compressor.kernels.floats import round_to_dtype
from compressor.kernels.tiles import Tile

TORCH = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
POSITIVE = fp8.VALUES[:0x7F]
MIDDLES = (POSITIVE[1:] + POSITIVE[:-1]) / 2
TILES = [Tile(1, 96), Tile(40, 96), Tile(16, 32), Tile(64, 64)]


def torch_codes(x):
    """torch turns what lies beyond 464 into NaN, so saturate first."""
    return torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def gaussian(rows=40, columns=96, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def test_every_code_means_what_torch_says():
    np.testing.assert_array_equal(fp8.VALUES, TORCH)
    assert np.isnan(fp8.VALUES[list(fp8.NAN_CODES)]).all()
    assert np.isnan(fp8.VALUES).sum() == 2
    assert [fp8.VALUES[c] for c in (0x7E, 0x08, 0x01, 0x38, 0xB8)] == [448, 2**-6, 2**-9, 1, -1]


def test_every_value_has_its_code():
    codes = np.array([c for c in range(256) if c not in fp8.NAN_CODES], np.uint8)
    np.testing.assert_array_equal(fp8.encode(fp8.decode(codes)), codes)
    assert np.signbit(fp8.decode(np.array([0x80], np.uint8)))[0]


def test_ties_go_to_the_even_code():
    codes = fp8.encode(MIDDLES)
    assert (codes % 2 == 0).all()
    np.testing.assert_array_equal(codes, torch_codes(MIDDLES))
    np.testing.assert_array_equal(fp8.encode(-MIDDLES), codes | 128)


def test_beside_a_tie_the_nearer_value_wins():
    index = np.arange(len(MIDDLES))
    np.testing.assert_array_equal(fp8.encode(np.nextafter(MIDDLES, np.float32(0))), index)
    np.testing.assert_array_equal(fp8.encode(np.nextafter(MIDDLES, np.float32(1e9))), index + 1)


def test_overflow_saturates_and_underflow_keeps_its_sign():
    x = np.array([449, 464, 465, 1e30, np.inf, -500, -np.inf, 1e-40, -1e-40, 0.0, -0.0], np.float32)
    expected = [0x7E] * 5 + [0xFE] * 2 + [0, 0x80, 0, 0x80]
    assert fp8.encode(x).tolist() == expected
    assert fp8.encode_numpy(x).tolist() == expected


def test_nan_has_no_code():
    with pytest.raises(ValueError, match="NaN"):
        fp8.encode(np.array([1.0, np.nan], np.float32))


def test_encode_equals_its_definition_and_torch_over_all_magnitudes():
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(50_000) * 10.0 ** rng.uniform(-6, 4, 50_000)).astype(np.float32)
    codes = fp8.encode(x)
    np.testing.assert_array_equal(codes, fp8.encode_numpy(x))
    np.testing.assert_array_equal(codes, torch_codes(x))


def test_absmax_puts_the_largest_weight_at_448():
    weight = np.array([[1.0, -896.0, 2.0], [448.0, 3.0, 0.0], [0, 0, 0]], np.float32)
    scales = fp8.choose_scales(weight, Tile(1, 3))
    assert scales.tolist() == [[2.0], [1.0], [1.0]]
    assert fp8.decode(fp8.round_codes(weight, scales, Tile(1, 3))).tolist() == [
        [0.5, -448, 1], [448, 3, 0], [0, 0, 0],
    ]  # fmt: skip
    assert fp8.choose_scales(weight, Tile(3, 3)).tolist() == [[2.0]]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_rounding_equals_torch_tile_by_tile(tile, dtype):
    weight = gaussian() * np.float32(0.05)
    scales = fp8.choose_scales(weight, tile, scale_dtype=dtype)
    codes = fp8.round_codes(weight, scales, tile)
    values = fp8.dequantize(codes, scales, tile)
    for i, j in np.ndindex(*scales.shape):
        part = np.s_[i * tile.rows : (i + 1) * tile.rows, j * tile.columns : (j + 1) * tile.columns]
        peak = round_to_dtype(np.float32([np.abs(weight[part]).max() / 448]), dtype)
        assert scales[i, j] == max(peak[0], 2.0**-14 if dtype == "F16" else 0)
        np.testing.assert_array_equal(codes[part], torch_codes(weight[part] / scales[i, j]))
        np.testing.assert_array_equal(values[part], TORCH[codes[part]] * scales[i, j])


def test_large_matrices_are_worked_through_in_pieces(monkeypatch):
    weight = gaussian(70, 96)
    for tile in (Tile(1, 96), Tile(70, 96), Tile(16, 32)):
        scales = fp8.choose_scales(weight, tile)
        codes = fp8.round_codes(weight, scales, tile)
        with monkeypatch.context() as patch:
            patch.setattr(fp8, "_CHUNK", 96 * 20)
            np.testing.assert_array_equal(fp8.round_codes(weight, scales, tile), codes)
            np.testing.assert_array_equal(
                fp8.dequantize(codes, scales, tile), fp8.decode(codes) * fp8.spread(scales, tile, 70, 96)
            )


@pytest.mark.parametrize("tile", TILES)
def test_moments_equal_their_definition(tile):
    weight, importance = gaussian(), np.random.default_rng(1).random(96).astype(np.float32)
    weight[3] *= 1e-4  # subnormal
    weight[5] *= 1e5  # saturated
    scales = round_to_dtype(
        np.random.default_rng(2).uniform(0.002, 0.02, tile_shape(tile)).astype(np.float32), "BF16"
    )
    found = fp8.moments(weight, importance, scales, tile)
    np.testing.assert_array_equal(found, fp8.moments_numpy(weight, importance, scales, tile))
    wide = fp8.dequantize(fp8.round_codes(weight, scales, tile), scales, tile)
    by_hand = (importance.astype(np.float64) * (weight - wide).astype(np.float64) ** 2).sum()
    assert found[0].sum() == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("tile", TILES)
def test_many_scales_at_once_equal_one_after_the_other(monkeypatch, tile):
    weight, importance = gaussian(), np.random.default_rng(1).random(96).astype(np.float32)
    scales = np.random.default_rng(2).uniform(0.0002, 0.02, (*tile_shape(tile), 5)).astype(np.float32)
    expected = [fp8.moments(weight, importance, scales[:, :, k], tile)[0] for k in range(5)]
    np.testing.assert_array_equal(fp8.grid_errors(weight, importance, scales, tile), np.stack(expected, axis=2))
    monkeypatch.setattr(fp8, "_CHUNK", 300)  # in pieces of a few tiles
    np.testing.assert_array_equal(fp8.grid_errors(weight, importance, scales, tile), np.stack(expected, axis=2))


def tile_shape(tile, rows=40, columns=96):
    return -(-rows // tile.rows), -(-columns // tile.columns)


@pytest.mark.parametrize("tile", TILES)
def test_the_search_errs_less_in_every_tile_that_matters(tile):
    weight, importance = gaussian(), np.random.default_rng(1).exponential(1, 96).astype(np.float32)
    first = fp8.choose_scales(weight, tile)
    found = fp8.choose_scales(weight, tile, search="mse", importance=importance)
    errors = [fp8.moments_numpy(weight, importance, s, tile)[0] for s in (found, first)]
    assert (errors[0] <= errors[1]).all()
    assert errors[0].sum() < errors[1].sum()
    assert np.array_equal(round_to_dtype(found, "BF16"), found)


def test_importance_decides_what_the_search_saves():
    weight = np.concatenate([np.linspace(0.9, 1.1, 64), [2.06]]).astype(np.float32)[None]
    heavy = np.ones(65, np.float32)
    heavy[-1] = 1e6
    scale = fp8.choose_scales(weight, Tile(1, 65), search="mse", importance=heavy, scale_dtype="F32")
    last = fp8.dequantize(fp8.round_codes(weight, scale, Tile(1, 65)), scale, Tile(1, 65))[0, -1]
    assert last == pytest.approx(2.06, rel=1e-4)


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1e5, 1e30])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_scales_stay_finite_and_positive(size, dtype):
    weight = gaussian() * np.float32(size)
    weight[:16] = 0
    for search in ("absmax", "mse"):
        for tile in TILES:
            scales = fp8.choose_scales(weight, tile, scale_dtype=dtype, search=search)
            assert np.isfinite(scales).all()
            assert (scales > 0).all()
            assert np.array_equal(round_to_dtype(scales, dtype), scales)
