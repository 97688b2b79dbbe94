"""The column loop against the paper's algorithm and against OBQ, which knows no Cholesky factor."""

import numpy as np
import pytest

from compressor.kernels import affine
from compressor.kernels.gptq import definition, quantize_columns, quantize_columns_numpy


def hessian_of(columns, rank=None, dead=(), seed=0, damp=0.01):
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((rank or 3 * columns, columns)) @ (
        np.eye(columns) + rng.standard_normal((columns, columns)) / np.sqrt(columns)
    )
    inputs[:, list(dead)] = 0
    hessian = inputs.T @ inputs
    hessian[list(dead), list(dead)] = 1
    return hessian + damp * np.mean(np.diag(hessian)) * np.eye(columns)


def upper_of(hessian):
    return np.ascontiguousarray(np.linalg.cholesky(np.linalg.inv(hessian)).T)


def obq(weight, hessian, scales, zeros, groups, low, high):
    """Optimal Brain Quantization with a fixed order, one row and one column at a time.

    Rounding w_q moves the others by -(w_q - q) / [H^-1]_qq * [H^-1]_{q,:}; then row and column q of
    H^-1 are eliminated. Nothing else: no factorization, no lazy updates.
    """
    codes = np.empty(weight.shape, dtype=np.int8)
    for r in range(len(weight)):
        left, inverse = weight[r].astype(np.float64), np.linalg.inv(hessian)
        for q in range(len(left)):
            scale = float(scales[r if len(scales) > 1 else 0, groups[q]])
            zero = 0.0 if zeros is None else float(zeros[r if len(zeros) > 1 else 0, groups[q]])
            code = min(max(np.rint(left[q] / scale) + zero, low), high)
            codes[r, q] = code
            left = left - (left[q] - (code - zero) * scale) / inverse[q, q] * inverse[q]
            inverse = inverse - np.outer(inverse[:, q], inverse[q]) / inverse[q, q]
            inverse[q, q] = np.inf  # never used again
    return codes


PROBLEMS = {
    "groups smaller than the block": dict(columns=96, group=16, block=32),
    "group across blocks": dict(columns=96, group=48, block=32),
    "odd sizes": dict(columns=65, group=13, block=16, rows=7),
    "one block": dict(columns=40, group=8, block=128),
    "block of one": dict(columns=24, group=8, block=1),
    "channel": dict(columns=50, group=-1, block=16),
    "tensor": dict(columns=50, group=0, block=16),
    "asymmetric": dict(columns=64, group=16, block=24, symmetric=False),
    "two bits": dict(columns=64, group=32, block=16, bits=2),
    "eight bits": dict(columns=64, group=32, block=16, bits=8),
    "dead columns": dict(columns=64, group=16, block=16, dead=(0, 17, 63)),
    "rank deficient": dict(columns=64, group=16, block=16, rank=9),
    "any order": dict(columns=64, group=16, block=16, shuffle=True),
    "any order, asymmetric, deficient": dict(
        columns=60, group=12, block=16, shuffle=True, symmetric=False, rank=9, dead=(5,)
    ),
}


def problem(columns, group, block, rows=12, bits=4, symmetric=True, dead=(), rank=None, shuffle=False):
    rng = np.random.default_rng(columns)
    weight = rng.standard_normal((rows, columns)).astype(np.float32)
    scales, zeros = affine.choose_scales(weight, bits, group, symmetric=symmetric, search="mse")
    order = rng.permutation(columns) if shuffle else np.arange(columns)
    hessian = hessian_of(columns, rank, dead)[order][:, order]
    groups = (order // (group if group > 0 else columns)).astype(np.int32)
    weight = weight[:, order].astype(np.float64)
    return weight, hessian, (scales, zeros, groups, *affine.code_range(bits)), block


@pytest.mark.parametrize("name", PROBLEMS)
def test_equals_the_paper_and_obq_in_float64(name):
    weight, hessian, grid, block = problem(**PROBLEMS[name])
    codes, loss = quantize_columns(weight, upper_of(hessian), *grid, block)
    np.testing.assert_array_equal(codes, definition(weight, hessian, *grid))
    np.testing.assert_array_equal(codes, obq(weight, hessian, *grid))
    scales, zeros, groups, _, _ = grid
    shift = 0 if zeros is None else zeros[:, groups].astype(np.float64)
    difference = weight - (codes - shift) * scales[:, groups].astype(np.float64)
    np.testing.assert_allclose(loss, np.einsum("ri,ij,rj->r", difference, hessian, difference), rtol=1e-8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", PROBLEMS)
def test_equals_its_numpy_twin_bit_for_bit(name, dtype):
    weight, hessian, grid, block = problem(**PROBLEMS[name])
    weight, upper = weight.astype(dtype), upper_of(hessian).astype(dtype)
    before = weight.copy()
    codes, loss = quantize_columns(weight, upper, *grid, block)
    twin_codes, twin_loss = quantize_columns_numpy(weight, upper, *grid, block)
    np.testing.assert_array_equal(codes, twin_codes)
    np.testing.assert_array_equal(loss, twin_loss)
    np.testing.assert_array_equal(weight, before)
    assert codes.dtype == np.int8


def test_block_size_changes_no_code_in_float64():
    weight, hessian, grid, _ = problem(**PROBLEMS["any order"])
    upper = upper_of(hessian)
    reference, _ = quantize_columns(weight, upper, *grid, 64)
    for block in (1, 7, 128):
        np.testing.assert_array_equal(quantize_columns(weight, upper, *grid, block)[0], reference)


def test_without_correlation_it_is_round_to_nearest():
    weight, _, grid, block = problem(**PROBLEMS["groups smaller than the block"])
    codes, _ = quantize_columns(weight.astype(np.float32), np.eye(96, dtype=np.float32), *grid, block)
    scales, zeros, _, low, high = grid
    nearest = affine.round_codes_numpy(weight.astype(np.float32), scales, zeros, low, high)
    np.testing.assert_array_equal(codes, nearest)


def test_it_errs_far_less_than_round_to_nearest_on_correlated_inputs():
    weight, hessian, grid, block = problem(columns=96, group=16, block=32, rank=30)
    codes, loss = quantize_columns(weight, upper_of(hessian), *grid, block)
    scales, zeros, groups, low, high = grid
    nearest = affine.round_codes_numpy(weight.astype(np.float32), scales, zeros, low, high)
    difference = weight - nearest * scales[:, groups].astype(np.float64)
    rtn = np.einsum("ri,ij,rj->r", difference, hessian, difference)
    assert loss.sum() < 0.5 * rtn.sum()
    assert (codes != nearest).any()


def test_thread_count_changes_nothing():
    import numba

    weight, hessian, grid, block = problem(**PROBLEMS["asymmetric"])
    weight, upper = weight.astype(np.float32), upper_of(hessian).astype(np.float32)
    many = quantize_columns(weight, upper, *grid, block)
    threads = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        one = quantize_columns(weight, upper, *grid, block)
    finally:
        numba.set_num_threads(threads)
    np.testing.assert_array_equal(many[0], one[0])
    np.testing.assert_array_equal(many[1], one[1])
