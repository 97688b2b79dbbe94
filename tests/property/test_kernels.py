import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from compressor.kernels import affine
from compressor.kernels.bitpack import pack_rows, pack_rows_numpy, unpack_rows, unpack_rows_numpy
from compressor.kernels.gptq import quantize_columns, quantize_columns_numpy

few = settings(max_examples=60, deadline=None)
weights = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.sampled_from([8, 24, 40])),
    elements=st.floats(-1000, 1000, width=32) | st.floats(-(2**-10), 2**-10, width=32),
)


@st.composite
def packable(draw):
    bits = draw(st.integers(1, 8))
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 77)))
    return bits, draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, (1 << bits) - 1)))


@few
@given(packable())
def test_packing_comes_back_and_equals_its_definition(case):
    bits, codes = case
    words = pack_rows(codes, bits)
    np.testing.assert_array_equal(words, pack_rows_numpy(codes, bits))
    np.testing.assert_array_equal(unpack_rows(words, bits, codes.shape[1]), codes)
    np.testing.assert_array_equal(unpack_rows_numpy(words, bits, codes.shape[1]), codes)


@few
@given(packable())
def test_the_stream_read_as_one_number_holds_code_i_at_bit_i_times_bits(case):
    bits, codes = case
    for row, words in zip(codes.tolist(), pack_rows(codes, bits).tolist(), strict=True):
        number = sum(word << (32 * i) for i, word in enumerate(words))
        assert number == sum(code << (bits * i) for i, code in enumerate(row))


@few
@given(
    weights,
    st.integers(2, 8),
    st.sampled_from([8, -1, 0]),
    st.sampled_from(["full", "textbook", "asymmetric"]),
    st.sampled_from(["F16", "BF16", "F32"]),
    st.sampled_from(["absmax", "mse"]),
)
def test_inside_the_range_no_weight_moves_more_than_half_a_scale(weight, bits, group_size, kind, dtype, search):
    symmetric, convention = kind != "asymmetric", "textbook" if kind == "textbook" else "full"
    low, high = affine.code_range(bits, convention)
    scales, zeros = affine.choose_scales(
        weight,
        bits,
        group_size,
        symmetric=symmetric,
        scale_dtype=dtype,
        convention=convention,
        search=search,
    )
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    codes = affine.round_codes(weight, scales, zeros, low, high)
    np.testing.assert_array_equal(codes, affine.round_codes_numpy(weight, scales, zeros, low, high))
    assert codes.min() >= low
    assert codes.max() <= high
    scale = np.repeat(scales.astype(np.float64), weight.shape[1] // scales.shape[1], axis=1)
    zero = 0 if zeros is None else np.repeat(zeros.astype(np.float64), weight.shape[1] // zeros.shape[1], axis=1)
    inside = (weight >= (low - zero) * scale) & (weight <= (high - zero) * scale)
    moved = np.abs(weight - (codes - zero) * scale)
    # the float32 quotient may round across a tie: 2^-23 of a quotient of at most 256
    assert (moved <= scale * (0.5 + 2.0**-14))[inside].all()
    expected = np.where(weight > 0, high, low)
    np.testing.assert_array_equal(codes[~inside], expected[~inside])


@few
@given(weights, st.integers(2, 8), st.sampled_from([8, -1, 0]), st.booleans(), st.booleans())
def test_the_search_never_loses_to_absmax(weight, bits, group_size, symmetric, weighted):
    columns = weight.shape[1]
    importance = np.linspace(0, 3, columns, dtype=np.float32) if weighted else np.ones(columns, np.float32)
    low, high = affine.code_range(bits)
    errors = []
    for search in ("absmax", "mse"):
        scales, zeros = affine.choose_scales(
            weight, bits, group_size, symmetric=symmetric, search=search, importance=importance
        )
        shift = np.zeros_like(scales) if zeros is None else zeros.astype(np.float32)
        error, _, _ = affine.moments_numpy(weight, importance, scales, shift, low, high)
        errors.append(error.sum() if group_size == 0 else error)
    assert np.all(errors[1] <= errors[0])


@few
@given(
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(1, 48),
    st.integers(2, 8),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_the_column_loop_equals_its_twin(rows, columns, block, bits, double, seed):
    rng = np.random.default_rng(seed)
    dtype = np.float64 if double else np.float32
    weight = rng.standard_normal((rows, columns)).astype(dtype)
    upper = np.triu(rng.standard_normal((columns, columns)) * 0.2, 1) + np.diag(rng.uniform(0.3, 2, columns))
    scales = rng.uniform(0.05, 1, (rows, 3)).astype(np.float32)
    zeros = rng.integers(-2, 2, (rows, 3)).astype(np.int8)
    groups = rng.integers(0, 3, columns).astype(np.int32)
    args = weight, upper.astype(dtype), scales, zeros, groups, *affine.code_range(bits), block
    for fast, slow in zip(quantize_columns(*args), quantize_columns_numpy(*args), strict=True):
        np.testing.assert_array_equal(fast, slow)
