"""Inputs rounded token by token: against compressed-tensors' own function, and through the walk."""

import numpy as np
import pytest
import torch
from torch import nn

from compressor.calibration.activations import fake_quantize, quantize_inputs
from compressor.errors import CompressorError

KINDS = {"int8": "int", "fp8": "float"}


def theirs(x, kind):
    """compressed-tensors' dynamic quantization of a linear's input [b, L, n]."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize as foreign
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    args = QuantizationArgs(num_bits=8, type=KINDS[kind], symmetric=True, strategy="token", dynamic=True)
    scale, zero = compute_dynamic_scales_and_zp(x, args, nn.Identity())
    return foreign(x, scale, zero, args)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6])
def test_equal_to_compressed_tensors(kind, size):
    x = torch.randn(3, 17, 64, generator=torch.Generator().manual_seed(0)) * size
    x[1, 2] = 0
    x[0, 0, 5] = 100 * size
    kept = x.clone()
    assert torch.equal(fake_quantize(x, kind), theirs(x, kind))
    assert torch.equal(x, kept)  # the input is not touched


def test_by_hand():
    x = torch.tensor([[[127.5, -1.0, 0.4, 0.6, -127.5], [255.0, -4.0, 0.0, 1.2, 2.0]]])
    assert fake_quantize(x, "int8").tolist() == [[[127.0, -1.0, 0.0, 1.0, -128.0], [254.0, -4.0, 0.0, 2.0, 2.0]]]
    x = torch.tensor([[[448.0, 17.0, 0.0], [2 * 448.0, 2 * 19.0, -1.0]]])
    assert fake_quantize(x, "fp8").tolist() == [[[448.0, 16.0, 0.0], [896.0, 40.0, -1.0]]]


class Asking:
    """A checkpoint that quantizes some inputs."""

    def __init__(self, **kinds):
        self.kinds = kinds

    def activations(self, module):
        return self.kinds.get(module.removeprefix("block."))


def test_hooks_round_inputs_once_however_often_a_block_is_loaded():
    block = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})
    x = torch.randn(2, 3, 8)
    plain = {name: module(x) for name, module in block.items()}
    for _ in range(3):
        quantize_inputs(block, "block.", Asking(a="int8"))
    assert torch.equal(
        block["a"](x), nn.functional.linear(fake_quantize(x, "int8"), block["a"].weight, block["a"].bias)
    )
    assert torch.equal(block["b"](x), plain["b"])
    assert len(block["a"]._forward_pre_hooks) == 1


def test_a_float_checkpoint_asks_for_nothing():
    block = nn.ModuleDict({"a": nn.Linear(8, 4)})
    quantize_inputs(block, "block.", object())
    assert not block["a"]._forward_pre_hooks


def test_an_unknown_kind_is_refused():
    with pytest.raises(CompressorError, match="unknown activations"):
        quantize_inputs(nn.ModuleDict({"a": nn.Linear(8, 4)}), "block.", Asking(a="int3"))


def test_half_steps_go_to_even():
    x = torch.tensor(np.float32([[[127.5, 0.5, 1.5, 2.5]]]))
    assert fake_quantize(x, "int8").tolist() == [[[127.0, 0.0, 2.0, 2.0]]]
