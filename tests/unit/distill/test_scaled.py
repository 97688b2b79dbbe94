"""Gradients of scales and inputs against plain autograd, and values as their file will hold them."""

import numpy as np
import pytest
import torch

from compressor.core.spec import Spec
from compressor.core.tensors import QTensor
from compressor.distill import scaled
from compressor.distill.scaled import ScaledLinear, Trained, dequantize

SPECS = [Spec(4, 32), Spec(4, 32, symmetric=False), Spec(8, -1), Spec(8, 0), Spec(8, -1, symmetric=False)]


def a_tensor(spec: Spec) -> QTensor:
    rng = np.random.default_rng(5)
    shape = spec.scales_shape(24, 64)
    codes = rng.integers(spec.qmin, spec.qmax + 1, (24, 64)).astype(np.int8)
    scales = rng.integers(1, 200, shape).astype(np.float32) / 256
    zeros = None if spec.symmetric else rng.integers(spec.qmin, spec.qmax + 1, shape).astype(np.int8)
    return QTensor(codes, scales, zeros, spec)


@pytest.mark.parametrize("spec", SPECS, ids=Spec.label)
def test_a_matrix_is_the_codes_own(spec):
    tensor = a_tensor(spec)
    layer = ScaledLinear(tensor, "cpu", bias=False)
    weight = dequantize(torch.from_numpy(tensor.scales), layer.codes, layer.zeros)
    np.testing.assert_array_equal(weight.numpy(), tensor.dequantize())


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=Spec.label)
def test_gradients_are_those_of_plain_autograd(spec, onednn, monkeypatch):
    if onednn and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN linear")
    monkeypatch.setattr(scaled, "onednn_is_faster", lambda: onednn)
    tensor, generator = a_tensor(spec), torch.Generator().manual_seed(1)
    x = torch.randn(2, 7, 64, generator=generator, requires_grad=True)
    scales = torch.from_numpy(tensor.scales).requires_grad_()
    layer = ScaledLinear(tensor, "cpu", bias=True)
    layer.bias = torch.nn.Parameter(torch.randn(24, generator=generator), requires_grad=False)
    upstream = torch.randn(2, 7, 24, generator=generator)
    found = torch.func.functional_call(layer, {"scales": scales}, (x,))
    found.backward(upstream)

    plain_x, plain_scales = x.detach().clone().requires_grad_(), scales.detach().clone().requires_grad_()
    levels = torch.from_numpy(tensor.codes).float().view(*tensor.scales.shape, -1)
    if tensor.zeros is not None:
        levels = levels - torch.from_numpy(tensor.zeros).float()[..., None]
    weight = (levels * plain_scales[..., None]).view(24, 64)
    expected = torch.nn.functional.linear(plain_x, weight, layer.bias)
    expected.backward(upstream)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(x.grad, plain_x.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(scales.grad, plain_scales.grad, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_values_are_what_the_file_holds(dtype):
    torch_dtype = scaled.TORCH_DTYPES[dtype]
    base = torch.tensor([[0.25, -1.0, 0.0]]).to(torch_dtype).float()
    trained = Trained("x", base, dtype)
    assert torch.equal(trained.value(), base)  # untouched: the very bits
    with torch.no_grad():
        trained.log_factor.fill_(0.0123)
    value = trained.value()
    assert torch.equal(value.detach(), (base * torch.tensor(0.0123).exp()).to(torch_dtype).float())
    value.sum().backward()
    torch.testing.assert_close(trained.log_factor.grad, base * torch.tensor(0.0123).exp())


def test_a_factor_has_a_limit():
    trained = Trained("x", torch.ones(1), "F32")
    with torch.no_grad():
        trained.log_factor.fill_(9.0)
    torch.testing.assert_close(trained.value().detach(), torch.tensor([0.5]).exp())
