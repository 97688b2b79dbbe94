"""16-bit floats against torch's own conversions, bit for bit."""

import numpy as np
import pytest
import torch

from compressor.kernels.floats import (
    all_finite,
    bf16_to_f32,
    decode_float,
    encode_float,
    f32_to_bf16,
    round_to_dtype,
)

BITS = np.concatenate(
    [
        np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32),
        np.array([0, 1, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7F7FFFFF, 0x00008000], np.uint32),
        (np.arange(4096, dtype=np.uint32) << 16) | np.uint32(0x8000),  # exact ties
    ]
)


def test_bf16_equals_torch():
    x = BITS.view(np.float32)
    ours = f32_to_bf16(x)
    theirs = torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(x)
    assert np.array_equal(ours[~nan], theirs[~nan])
    assert np.isnan(bf16_to_f32(ours[nan])).all()


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16)])
def test_rounding_equals_torch(dtype, torch_dtype):
    x = np.random.default_rng(1).normal(0, 1000, (33, 7)).astype(np.float32)
    expected = torch.from_numpy(x).to(torch_dtype).float().numpy()
    assert np.array_equal(round_to_dtype(x, dtype), expected)
    assert round_to_dtype(x, dtype).shape == (33, 7)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_single_bad_value_is_seen(dtype, bad):
    x = np.linspace(-60000, 60000, 3_000_001, dtype=np.float32)
    encode = (lambda a: a.astype("<f8").view(np.uint8)) if dtype == "F64" else (lambda a: encode_float(a, dtype))
    assert all_finite(encode(x), dtype)
    assert np.isfinite(decode_float(encode(x), dtype)).all()
    x[2_500_000] = bad
    assert not all_finite(encode(x), dtype)
