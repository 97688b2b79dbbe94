import numpy as np
import pytest

from compressor.kernels.bitpack import (
    pack_rows,
    pack_rows_numpy,
    unpack_rows,
    unpack_rows_numpy,
    words_per_row,
)

GOLDEN = [
    (4, list(range(8)), [0x76543210]),
    (8, [0, 1, 2, 255], [0xFF020100]),
    (4, [7] * 8, [0x77777777]),
    (1, [1, 0, 0, 0, 1, 1], [0b110001]),
    (5, [31, 0, 0, 0, 0, 0, 0b10101], [0x4000001F, 0b101]),
]


@pytest.mark.parametrize("pack", [pack_rows, pack_rows_numpy])
@pytest.mark.parametrize(("bits", "codes", "words"), GOLDEN)
def test_golden_words(pack, bits, codes, words):
    packed = pack(np.array([codes], dtype=np.uint8), bits)
    assert packed.dtype == np.uint32
    assert packed.tolist() == [words]


@pytest.mark.parametrize("pack", [pack_rows, pack_rows_numpy])
def test_three_bits_straddle_words(pack):
    codes = np.array([[*range(8)] * 4], dtype=np.uint8)
    assert pack(codes, 3).tolist() == [[0x88FAC688, 0xC688FAC6, 0xFAC688FA]]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("n", [0, 1, 3, 4, 8, 31, 32, 33, 40, 65])
def test_fast_equals_definition_and_comes_back(bits, n):
    codes = np.random.default_rng(n).integers(0, 1 << bits, (5, n), dtype=np.uint8)
    words = pack_rows(codes, bits)
    assert words.shape == (5, words_per_row(n, bits))
    np.testing.assert_array_equal(words, pack_rows_numpy(codes, bits))
    np.testing.assert_array_equal(unpack_rows(words, bits, n), codes)
    np.testing.assert_array_equal(unpack_rows_numpy(words, bits, n), codes)


def test_strided_codes_pack_like_their_copy():
    codes = np.random.default_rng(0).integers(0, 16, (16, 24), dtype=np.uint8)
    np.testing.assert_array_equal(pack_rows(codes.T, 4), pack_rows(codes.T.copy(), 4))
    words = pack_rows(codes, 4)
    np.testing.assert_array_equal(unpack_rows(words[::2], 4, 24), codes[::2])


def test_results_do_not_share_memory():
    codes = np.full((1, 8), 3, dtype=np.uint8)
    words = pack_rows(codes, 8)
    back = unpack_rows(words, 8, 8)
    codes[:], words[:] = 0, 0
    assert back.tolist() == [[3] * 8]


def test_bad_input_is_refused():
    codes = np.zeros((1, 8), dtype=np.uint8)
    with pytest.raises(ValueError, match=r"1\.\.8"):
        pack_rows(codes, 9)
    with pytest.raises(ValueError, match="does not fit into 3 bits"):
        pack_rows(codes + np.uint8(8), 3)
    with pytest.raises(ValueError, match="uint8"):
        pack_rows(codes.astype(np.int8), 4)
    with pytest.raises(ValueError, match="words must be"):
        unpack_rows(np.zeros((1, 2), dtype=np.uint32), 4, 8)
