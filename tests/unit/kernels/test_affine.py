import numpy as np
import pytest

from compressor.kernels import affine
from compressor.kernels.floats import round_to_dtype


def gaussian(rows=24, columns=192, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def error_of(weight, scales, zeros, low, high, importance=None):
    """Weighted squared error in float64, from the codes, with nothing of the search in it."""
    codes = affine.round_codes_numpy(weight, scales, zeros, low, high).astype(np.float64)
    grouped = codes.reshape(len(weight), scales.shape[1], -1)
    shift = 0 if zeros is None else zeros[:, :, None].astype(np.float64)
    difference = weight - ((grouped - shift) * scales[:, :, None].astype(np.float64)).reshape(weight.shape)
    heights = np.ones(weight.shape[1]) if importance is None else importance.astype(np.float64)
    return (heights * difference**2).reshape(len(weight), scales.shape[1], -1).sum(axis=2)


def test_code_ranges():
    assert affine.code_range(4) == (-8, 7)
    assert affine.code_range(4, "textbook") == (-7, 7)
    assert affine.code_range(2, "full") == (-2, 1)


def test_textbook_int8_is_absmax_over_127():
    weight = np.array([[1.0, -2.54, 0.5, 0.0]], dtype=np.float32)
    scales, zeros = affine.choose_scales(weight, 8, -1, convention="textbook", scale_dtype="F32")
    assert zeros is None
    assert scales[0, 0] == np.float32(2.54 / 127)
    codes = affine.round_codes(weight, scales, None, -127, 127)
    assert codes.tolist() == [[50, -127, 25, 0]]


def test_full_int4_is_two_absmax_over_fifteen():
    weight = np.array([[7.5, -7.5, 3.0, -1.0]], dtype=np.float32)
    scales, _ = affine.choose_scales(weight, 4, -1)
    assert scales.tolist() == [[1.0]]
    assert affine.round_codes(weight, scales, None, -8, 7).tolist() == [[7, -8, 3, -1]]


def test_asymmetric_covers_min_to_max_and_zero():
    weight = np.array([[-3.0, 12.0, 1.0, 0.0], [4.0, 15.0, 8.0, 5.0]], dtype=np.float32)
    scales, zeros = affine.choose_scales(weight, 4, -1, symmetric=False)
    assert scales.tolist() == [[1.0], [1.0]]
    assert zeros.tolist() == [[-5], [-8]]
    codes = affine.round_codes(weight, scales, zeros, -8, 7)
    assert codes.tolist() == [[-8, 7, -4, -5], [-4, 7, 0, -3]]


def test_ties_go_to_even():
    weight = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5]], dtype=np.float32)
    codes = affine.round_codes(weight, np.ones((1, 1), np.float32), None, -8, 7)
    assert codes.tolist() == [[0, 2, 2, 0, -2, -2]]


@pytest.mark.parametrize(("group_size", "shape"), [(32, (24, 6)), (-1, (24, 1)), (0, (1, 1))])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("search", ["absmax", "mse"])
def test_shapes_and_storage_dtype(group_size, shape, symmetric, search):
    scales, zeros = affine.choose_scales(
        gaussian(), 4, group_size, symmetric=symmetric, search=search, scale_dtype="F16"
    )
    assert scales.shape == shape
    assert scales.dtype == np.float32
    np.testing.assert_array_equal(round_to_dtype(scales, "F16"), scales)
    assert (zeros is None) == symmetric
    if zeros is not None:
        assert zeros.dtype == np.int8
        assert zeros.shape == shape


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("group_size", [16, -1, 0])
@pytest.mark.parametrize("kind", ["full", "textbook", "asymmetric"])
def test_mse_is_never_worse_than_absmax(bits, group_size, kind):
    weight = gaussian(seed=bits) ** 3
    importance = np.random.default_rng(1).exponential(1, weight.shape[1]).astype(np.float32) ** 2
    symmetric = kind != "asymmetric"
    convention = "textbook" if kind == "textbook" else "full"
    low, high = affine.code_range(bits, convention)
    errors = []
    for search in ("absmax", "mse"):
        grid = affine.choose_scales(
            weight,
            bits,
            group_size,
            symmetric=symmetric,
            convention=convention,
            search=search,
            importance=importance,
        )
        errors.append(error_of(weight, *grid, low, high, importance))
    if group_size == 0:
        errors = [error.sum() for error in errors]
    assert (errors[1] <= np.asarray(errors[0]) * (1 + 1e-6)).all()
    assert np.sum(errors[1]) < np.sum(errors[0])


@pytest.mark.parametrize(("bits", "bound"), [(2, 0.16), (3, 0.040), (4, 0.0106)])
def test_mse_reaches_the_known_distortion_of_a_gaussian(bits, bound):
    weight = gaussian(64, 1024)
    low, high = affine.code_range(bits)
    scales, _ = affine.choose_scales(weight, bits, 128, search="mse")
    assert error_of(weight, scales, None, low, high).sum() / weight.size < bound


@pytest.mark.parametrize(("bits", "bound"), [(2, 0.134), (3, 0.0349), (4, 0.0092)])
def test_asymmetric_mse_reaches_it_too_by_moving_zeros(bits, bound):
    weight = gaussian(64, 1024)
    grid = affine.choose_scales(weight, bits, 128, symmetric=False, search="mse")
    assert error_of(weight, *grid, *affine.code_range(bits)).sum() / weight.size < bound


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_refit_only_takes_what_errs_less(bits):
    weight, even = gaussian(64, 256), np.ones(256, dtype=np.float32)
    low, high = affine.code_range(bits)
    form = affine._Format(bits, 32, False, True, "BF16", low, high)
    scales, _ = affine.choose_scales(weight, bits, 32)
    refitted = affine._refit(weight, even, affine._Grid(scales, np.zeros_like(scales)), form).scales
    before, after = (error_of(weight, s, None, low, high) for s in (scales, refitted))
    assert (after <= before * (1 + 1e-6)).all()
    assert after.sum() < before.sum()
    np.testing.assert_array_equal(round_to_dtype(refitted, "BF16"), refitted)


def test_importance_moves_the_scale_to_the_columns_that_matter():
    weight = np.linspace(-1, 1, 32, dtype=np.float32)[None].copy()
    weight[0, 0] = 4.0
    importance = np.ones(32, dtype=np.float32)
    even, _ = affine.choose_scales(weight, 3, -1, search="mse", importance=importance)
    importance[0] = 1e-6
    clipped, _ = affine.choose_scales(weight, 3, -1, search="mse", importance=importance)
    assert clipped[0, 0] < 0.5 * even[0, 0]
    assert clipped[0, 0] == pytest.approx(1 / 3.5, rel=0.2)


@pytest.mark.parametrize("scale_dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("search", ["absmax", "mse"])
def test_extreme_groups_get_usable_scales(scale_dtype, symmetric, search):
    weight = np.zeros((7, 32), dtype=np.float32)
    weight[1], weight[2], weight[3] = 0.7, 1e-20, 6e4
    weight[4, 3], weight[5], weight[6] = 1e30, -1e-40, np.linspace(-3e38, 3e38, 32)
    scales, zeros = affine.choose_scales(weight, 4, 32, symmetric=symmetric, search=search, scale_dtype=scale_dtype)
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    np.testing.assert_array_equal(round_to_dtype(scales, scale_dtype), scales)
    codes = affine.round_codes(weight, scales, zeros, -8, 7)
    np.testing.assert_array_equal(codes, affine.round_codes_numpy(weight, scales, zeros, -8, 7))
    assert scales[0, 0] == 1
    assert not codes[0].any()
    if scale_dtype == "F16":
        assert scales[2, 0] == np.float32(2**-14)
        assert scales[4, 0] == 65504
    shift = 0 if zeros is None else zeros[[1, 3]].astype(np.float32)
    back = (codes[[1, 3]] - shift) * scales[[1, 3]]
    np.testing.assert_allclose(back, weight[[1, 3]], rtol=0.08)


def test_zero_importance_leaves_absmax():
    weight = gaussian()
    importance = np.zeros(weight.shape[1], dtype=np.float32)
    searched, _ = affine.choose_scales(weight, 4, 32, search="mse", importance=importance)
    np.testing.assert_array_equal(searched, affine.choose_scales(weight, 4, 32)[0])


def test_row_chunks_do_not_show(monkeypatch):
    weight = gaussian(40, 64)
    whole, _ = affine.choose_scales(weight, 4, 16, search="mse")
    monkeypatch.setattr(affine, "_CHUNK", affine.CANDIDATES * 4 * 7)
    np.testing.assert_array_equal(affine.choose_scales(weight, 4, 16, search="mse")[0], whole)


@pytest.mark.parametrize("group_size", [16, -1, 0])
def test_kernels_equal_their_definitions(group_size):
    rng = np.random.default_rng(2)
    weight = gaussian(9, 48)
    rows, groups = (1, 1) if group_size == 0 else (9, 48 // (group_size if group_size > 0 else 48))
    scales = rng.uniform(0.05, 0.9, (rows, groups, 5)).astype(np.float32)
    zeros = rng.integers(-8, 8, (rows, groups, 5)).astype(np.int8)
    importance = rng.uniform(0, 2, 48).astype(np.float32)
    grid = scales, zeros.astype(np.float32)
    np.testing.assert_array_equal(
        affine.grid_errors(weight, importance, *grid, -8, 7),
        affine.grid_errors_numpy(weight, importance, *grid, -8, 7),
    )
    first = [np.ascontiguousarray(part[:, :, 0]) for part in grid]
    fast = affine.moments(weight, importance, *first, -8, 7)
    slow = affine.moments_numpy(weight, importance, *first, -8, 7)
    for got, expected in zip(fast, slow, strict=True):
        np.testing.assert_array_equal(got, expected)
    grid = scales[:, :, 0], zeros[:, :, 0]
    np.testing.assert_array_equal(
        affine.round_codes(weight, *grid, -8, 7), affine.round_codes_numpy(weight, *grid, -8, 7)
    )
    np.testing.assert_array_equal(fast[0], affine.grid_errors(weight, importance, scales, zeros, -8, 7)[:, :, 0])
    np.testing.assert_allclose(
        fast[0], error_of(weight, *grid, -8, 7, importance) if rows > 1 else fast[0], rtol=1e-5
    )


def test_moments_give_the_least_squares_scale():
    weight, even = gaussian(3, 32), np.ones(32, dtype=np.float32)
    scales = np.full((3, 1), 0.3, dtype=np.float32)
    _, cross, power = affine.moments(weight, even, scales, np.zeros_like(scales), -8, 7)
    codes = affine.round_codes_numpy(weight, scales, None, -8, 7).astype(np.float64)
    for r in range(3):
        expected = np.linalg.lstsq(codes[r][:, None], weight[r].astype(np.float64), rcond=None)[0][0]
        assert cross[r, 0] / power[r, 0] == pytest.approx(expected, rel=1e-12)
