"""Orthogonal matrices: orthogonal, seeded, and applied as the matrix they say they are."""

import numpy as np
import pytest

from compressor.kernels import rotations

KNOWN = [1, 2, 4, 8, 12, 16, 20, 24, 28, 36, 64, 576, 896, 960, 1536]
UNKNOWN = [3, 6, 9, 18, 92, 172]  # 92 and 172 exist, by other constructions


@pytest.mark.parametrize("width", KNOWN)
def test_hadamard_entries_and_angles(width):
    found = rotations.random_hadamard(width, (7, 0)).matrix() * np.sqrt(width)
    np.testing.assert_allclose(np.abs(found), 1.0, atol=1e-12)
    np.testing.assert_allclose(found @ found.T, width * np.eye(width), atol=1e-9)


@pytest.mark.parametrize("width", UNKNOWN)
def test_widths_without_a_known_matrix_are_refused(width):
    assert rotations.hadamard_orders(width) is None
    with pytest.raises(ValueError, match=f"order {width}"):
        rotations.random_hadamard(width, (0,))


@pytest.mark.parametrize("width", [128, 1024, 2048, 2560, 3072, 3584, 4096, 5120, 5376, 8192])
def test_widths_of_real_models_have_one(width):
    orders = rotations.hadamard_orders(width)
    assert orders is not None
    assert np.prod(orders) == width


def test_a_small_hadamard_by_hand():
    found = rotations._hadamard(4)
    assert found.tolist() == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]


@pytest.mark.parametrize("make", [rotations.random_orthogonal, rotations.random_hadamard])
@pytest.mark.parametrize("width", [1, 4, 96, 320])
def test_apply_is_a_product_with_the_matrix(make, width):
    rotation = make(width, (3, 1))
    x = np.random.default_rng(0).standard_normal((5, width)).astype(np.float32)
    np.testing.assert_allclose(rotation.apply(x), x.astype(np.float64) @ rotation.matrix(), atol=1e-12)
    np.testing.assert_allclose(rotation.matrix().T @ rotation.matrix(), np.eye(width), atol=1e-12)
    assert rotation.width == width


def test_several_factors_keep_their_order():
    """Factors of different orders, which an exchange of axes would mix up."""
    rotation = rotations.random_hadamard(36 * 64 * 2, (0,))
    assert [len(f) for f in rotation.factors] == [36, 64, 2]
    x = np.eye(rotation.width)[[0, 1, 700, 4000]]
    np.testing.assert_allclose(rotation.apply(x), rotation.matrix()[[0, 1, 700, 4000]], atol=1e-12)


@pytest.mark.parametrize("make", [rotations.random_orthogonal, rotations.random_hadamard])
def test_seeds(make):
    assert np.array_equal(make(48, (1, 0)).matrix(), make(48, (1, 0)).matrix())
    assert not np.allclose(make(48, (1, 0)).matrix(), make(48, (2, 0)).matrix())
    assert not np.allclose(make(48, (1, 0)).matrix(), make(48, (1, 1)).matrix())


def test_the_input_is_left_alone():
    x = np.ones((2, 12))
    rotations.random_orthogonal(12, (0,)).apply(x)
    assert (x == 1).all()
