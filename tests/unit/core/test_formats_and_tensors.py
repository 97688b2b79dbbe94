"""Spec and QTensor: what constructs, what does not, and what it means."""

import numpy as np
import pytest

from compressor.core.spec import Spec
from compressor.core.tensors import QTensor
from compressor.kernels.tiles import Tile

FP8, BLOCK = Spec(8, -1, kind="float"), Spec(8, 0, kind="float", block=(2, 3))


def ones(*shape):
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("spec", "label", "strategy", "scales", "tile"),
    [
        (FP8, "fp8 channel", "channel", (5, 1), Tile(1, 8)),
        (Spec(8, 0, kind="float"), "fp8 tensor", "tensor", (1, 1), Tile(5, 8)),
        (BLOCK, "fp8 2x3", "block", (3, 3), Tile(2, 3)),
        (Spec(8, -1, kind="float", activations="fp8"), "fp8 channel a8", "channel", (5, 1), Tile(1, 8)),
    ],
)
def test_float_formats(spec, label, strategy, scales, tile):
    assert (spec.label(), spec.strategy) == (label, strategy)
    assert spec.scales_shape(5, 8) == scales
    assert spec.tile(5, 8) == tile
    assert spec.layout == "float-quantized"


def test_integer_formats_keep_their_names():
    assert Spec(4, 32).label() == "int4 g32"
    assert Spec(4, 32, symmetric=False).label() == "int4 g32 asym"
    assert Spec(8, -1, activations="int8").label() == "int8 channel a8"
    assert Spec(8, -1) != Spec(8, -1, activations="int8")
    assert (Spec(8, -1).layout, Spec(8, -1, activations="int8").layout) == ("pack-quantized", "int-quantized")


@pytest.mark.parametrize(
    "parts",
    [
        {"bits": 4, "group_size": -1, "kind": "float"},
        {"bits": 8, "group_size": -1, "symmetric": False, "kind": "float"},
        {"bits": 8, "group_size": 64, "kind": "float"},
        {"bits": 8, "group_size": -1, "kind": "float", "block": (128, 128)},
        {"bits": 8, "group_size": 0, "kind": "float", "block": (0, 128)},
        {"bits": 8, "group_size": 0, "block": (128, 128)},
        {"bits": 8, "group_size": -1, "kind": "double"},
        {"bits": 8, "group_size": -1, "activations": "fp8"},
        {"bits": 8, "group_size": -1, "activations": "int4"},
        {"bits": 8, "group_size": -1, "symmetric": False, "activations": "int8"},
        {"bits": 8, "group_size": 0, "kind": "float", "block": (128, 128), "activations": "fp8"},
    ],
    ids=str,
)
def test_illegal_formats_do_not_construct(parts):
    with pytest.raises(ValueError):
        Spec(**parts)


def test_dequantize_by_hand():
    codes = np.array([[0x38, 0xB8, 0x7E], [0x01, 0x80, 0x40]], np.uint8)  # 1, -1, 448; 2^-9, -0, 2
    scales = np.array([[0.5], [4.0]], np.float32)
    expected = [[0.5, -0.5, 224.0], [2.0**-7, 0.0, 8.0]]
    assert QTensor(codes, scales, None, FP8).dequantize().tolist() == expected


def test_dequantize_blocks_with_smaller_ones_at_the_edges():
    codes = np.full((5, 8), 0x38, np.uint8)  # 1.0
    scales = np.arange(1, 10, dtype=np.float32).reshape(3, 3)
    found = QTensor(codes, scales, None, BLOCK).dequantize()
    for row in range(5):
        for column in range(8):
            assert found[row, column] == scales[row // 2, column // 3]


@pytest.mark.parametrize(
    ("codes", "scales", "zeros", "spec", "why"),
    [
        (np.zeros((5, 8), np.int8), ones(5, 1), None, FP8, "codes must be uint8"),
        (np.zeros((5, 8), np.uint8), ones(5, 1), None, Spec(8, -1), "codes must be int8"),
        (np.full((5, 8), 0x7F, np.uint8), ones(5, 1), None, FP8, "NaN"),
        (np.full((5, 8), 0xFF, np.uint8), ones(5, 1), None, FP8, "NaN"),
        (np.zeros((5, 8), np.uint8), ones(5, 1), None, BLOCK, r"\(3, 3\)"),
        (np.zeros((5, 8), np.uint8), ones(5, 1), np.zeros((5, 1), np.int8), FP8, "zeros must be None"),
        (np.zeros((5, 8), np.uint8), ones(5, 1) / 3, None, FP8, "rounded to BF16"),
    ],
)
def test_illegal_tensors_do_not_construct(codes, scales, zeros, spec, why):
    with pytest.raises(ValueError, match=why):
        QTensor(codes, scales, zeros, spec)
