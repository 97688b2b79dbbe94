import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from compressor.kernels import fp8
from compressor.kernels.floats import round_to_dtype
from compressor.kernels.tiles import Tile

few = settings(max_examples=60, deadline=None)
numbers = (
    st.floats(-1000, 1000, width=32)
    | st.floats(-(2**-10), 2**-10, width=32)
    | st.floats(width=32, allow_nan=False, allow_infinity=False)
)
weights = hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 12)), elements=numbers)
tiles = st.builds(Tile, st.integers(1, 6), st.integers(1, 12))
dtypes = st.sampled_from(["F16", "BF16", "F32"])


@few
@given(hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32, allow_nan=False)))
def test_encoding_equals_its_definition(x):
    np.testing.assert_array_equal(fp8.encode(x), fp8.encode_numpy(x))


@few
@given(hnp.arrays(np.float32, 20, elements=st.floats(-448, 448, width=32)))
def test_no_value_is_nearer_than_the_one_chosen(x):
    values = fp8.VALUES[~np.isnan(fp8.VALUES)].astype(np.float64)
    nearest = np.abs(x[:, None].astype(np.float64) - values).min(axis=1)
    np.testing.assert_array_equal(np.abs(x.astype(np.float64) - fp8.decode(fp8.encode(x))), nearest)


@few
@given(weights, tiles, dtypes, st.sampled_from(["absmax", "mse"]))
def test_scales_are_storable_and_no_weight_becomes_nan(weight, tile, dtype, search):
    scales = fp8.choose_scales(weight, tile, scale_dtype=dtype, search=search)
    assert scales.shape == (-(-weight.shape[0] // tile.rows), -(-weight.shape[1] // tile.columns))
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    np.testing.assert_array_equal(round_to_dtype(scales, dtype), scales)
    codes = fp8.round_codes(weight, scales, tile)
    assert ((codes & 0x7F) != 0x7F).all()


@few
@given(weights, tiles, dtypes)
def test_the_search_is_never_worse_than_absmax(weight, tile, dtype):
    importance = np.linspace(0, 2, weight.shape[1], dtype=np.float32)
    errors = [
        fp8.moments_numpy(weight, importance, scales, tile)[0]
        for scales in (
            fp8.choose_scales(weight, tile, scale_dtype=dtype, search="mse", importance=importance),
            fp8.choose_scales(weight, tile, scale_dtype=dtype),
        )
    ]
    assert (errors[0] <= errors[1]).all()


@few
@given(weights, tiles)
def test_moments_equal_their_definition(weight, tile):
    importance = np.linspace(0, 2, weight.shape[1], dtype=np.float32)
    scales = fp8.choose_scales(weight, tile)
    found = fp8.moments(weight, importance, scales, tile)
    np.testing.assert_array_equal(found, fp8.moments_numpy(weight, importance, scales, tile))
