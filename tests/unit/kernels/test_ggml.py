"""ggml blocks: the vectorised packers against a block-by-block twin, exact inverses, a foreign reader."""

import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.kernels import ggml

RANGES = {"Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}
PACK = {"Q4_0": ggml.pack_q4_0, "Q5_0": ggml.pack_q5_0, "Q8_0": ggml.pack_q8_0}
UNPACK = {"Q4_0": ggml.unpack_q4_0, "Q5_0": ggml.unpack_q5_0, "Q8_0": ggml.unpack_q8_0}


def twin(kind, codes, d, m=0.0):
    """One block by the letter of the layout: 32 Python ints and a scale -> bytes."""
    if kind == "Q8_0":
        return struct.pack("<e32b", d, *codes)
    q = [c + {"Q4_0": 8, "Q4_1": 0, "Q5_0": 16}[kind] for c in codes]
    nibbles = bytes((q[j] & 15) | ((q[j + 16] & 15) << 4) for j in range(16))
    if kind == "Q4_0":
        return struct.pack("<e", d) + nibbles
    if kind == "Q4_1":
        return struct.pack("<ee", d, m) + nibbles
    return struct.pack("<eI", d, sum((q[j] >> 4) << j for j in range(32))) + nibbles


def half_scales(rng, shape):
    return rng.uniform(1e-4, 3, shape).astype(np.float16).astype(np.float32)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(RANGES)), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_symmetric_types_equal_the_twin_and_invert(kind, rows, blocks, seed):
    rng = np.random.default_rng(seed)
    low, high = RANGES[kind]
    codes = rng.integers(low, high + 1, (rows, blocks * 32)).astype(np.int8)
    scales = half_scales(rng, (rows, blocks))
    packed = PACK[kind](codes, scales)
    assert packed.shape == (rows, blocks * ggml.BLOCK_BYTES[kind])
    expected = b"".join(
        twin(kind, codes[r, 32 * b : 32 * b + 32].tolist(), float(scales[r, b]))
        for r in range(rows)
        for b in range(blocks)
    )
    assert packed.tobytes() == expected
    back, d = UNPACK[kind](packed)
    assert back.dtype == np.int8
    assert d.dtype == np.float16
    np.testing.assert_array_equal(back, codes)
    np.testing.assert_array_equal(d.astype(np.float32), scales)


def test_q4_1_equals_the_twin_and_inverts():
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 16, (3, 64)).astype(np.uint8)
    scales, offsets = half_scales(rng, (3, 2)), -half_scales(rng, (3, 2))
    packed = ggml.pack_q4_1(codes, scales, offsets)
    expected = b"".join(
        twin("Q4_1", codes[r, 32 * b : 32 * b + 32].tolist(), float(scales[r, b]), float(offsets[r, b]))
        for r in range(3)
        for b in range(2)
    )
    assert packed.tobytes() == expected
    back, d, m = ggml.unpack_q4_1(packed)
    np.testing.assert_array_equal(back, codes)
    np.testing.assert_array_equal(d.astype(np.float32), scales)
    np.testing.assert_array_equal(m.astype(np.float32), offsets)


@pytest.mark.parametrize("kind", sorted(RANGES))
def test_gguf_package_dequantizes_to_code_times_scale(kind):
    rng = np.random.default_rng(2)
    low, high = RANGES[kind]
    codes = rng.integers(low, high + 1, (5, 96)).astype(np.int8)
    codes[0, :2] = low, high
    scales = half_scales(rng, (5, 3))
    theirs = gguf.quants.dequantize(PACK[kind](codes, scales), gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(theirs, codes.astype(np.float32) * np.repeat(scales, 32, axis=1))


@pytest.mark.parametrize(("kind", "value"), [("Q4_0", 8), ("Q4_0", -9), ("Q5_0", 16), ("Q5_0", -17)])
def test_codes_out_of_range_are_refused(kind, value):
    codes = np.zeros((1, 32), np.int8)
    codes[0, 7] = value
    with pytest.raises(ValueError, match="codes must lie in"):
        PACK[kind](codes, np.ones((1, 1), np.float32))


def test_scales_that_would_be_rounded_are_refused():
    with pytest.raises(ValueError, match="fp16"):
        ggml.pack_q8_0(np.zeros((1, 32), np.int8), np.full((1, 1), 0.1, np.float32))


def test_ragged_shapes_are_refused():
    with pytest.raises(ValueError, match="blocks of 32"):
        ggml.pack_q4_0(np.zeros((1, 40), np.int8), np.ones((1, 1), np.float32))
    with pytest.raises(ValueError, match="expected uint8"):
        ggml.unpack_q4_0(np.zeros((1, 19), np.uint8))


@pytest.mark.parametrize(
    ("value", "exact"),
    [(0.5, True), (65504.0, True), (65536.0, False), (2.0**-24, True), (2.0**-25, False)],
)
def test_is_half(value, exact):
    assert ggml.is_half(np.array([[1.0, value]], np.float32)) is exact


def test_spread_scales_repeats_a_group_over_its_blocks():
    groups = np.array([[1, 2], [3, 4]], np.float32)
    expected = [[1, 1, 2, 2], [3, 3, 4, 4]]
    np.testing.assert_array_equal(ggml.spread_scales(groups, 2, 128), expected)
    np.testing.assert_array_equal(ggml.spread_scales(np.full((1, 1), 7, np.float32), 2, 64), np.full((2, 2), 7))
    with pytest.raises(ValueError, match="whole blocks"):
        ggml.spread_scales(np.ones((1, 4), np.float32), 1, 64)
