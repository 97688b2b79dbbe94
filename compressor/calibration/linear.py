"""Float32 matrix products through the fastest of torch's CPU back ends.

torch sends float32 products to MKL, which takes a slow path on AMD processors (75 GFLOP/s where
oneDNN reaches 170 to 220 on the same two cores). The choice is by processor vendor, not by timing,
so that a resumed run computes the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compressor.errors import CompressorError


@functools.cache
def onednn_is_faster() -> bool:
    """Whether float32 linears should go through oneDNN: an AMD x86 processor, and torch has the call."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    vendor = cpuinfo.read_text(errors="replace")[:400] if cpuinfo.exists() else platform.processor()
    return "AuthenticAMD" in vendor and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Product of x float32 [..., in] with weight float32 [out, in] transposed, plus bias [out]."""
    if x.device.type == "cpu" and x.dtype == torch.float32 and onednn_is_faster():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return nn.functional.linear(x, weight, bias)


class _FastLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


def fast_linears(block: nn.Module) -> None:
    """Route every plain nn.Linear of a block through ``linear``."""
    if onednn_is_faster():
        for module in block.modules():
            if type(module) is nn.Linear:
                module.__class__ = _FastLinear


@functools.cache
def bf16_is_faster() -> bool:
    """Whether this CPU multiplies bfloat16 pairs into float32 sums (AMX, AVX-512 BF16), and torch lets us ask."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    known = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return hasattr(matmul, "fp32_precision") and bool(known())


@contextlib.contextmanager
def bf16_products(wanted: bool = True) -> Iterator[None]:
    """Inside, float32 products on such a CPU round their factors to bfloat16 (sums stay float32).

    For forward passes of calibration and training, where an error of 2^-9 per factor is far below that of the
    quantization. Not for sums of x x^T: made from rounded inputs, their factor loses what rounding needs.
    """
    if not (wanted and bf16_is_faster()):
        yield
        return
    setting: Any = getattr(torch.backends.mkldnn, "matmul", None)
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before


def fix_threads() -> None:
    """Let no product run on fewer threads than torch has: MKL may choose to, and then other bits come out.

    Setting the number, even to what it is, switches that choice off (torch calls mkl_set_dynamic(false)).
    """
    torch.set_num_threads(torch.get_num_threads())


def check_device(device: str) -> None:
    """Refuse a device this torch cannot compute on.

    Raises:
        CompressorError: naming the device and torch's reason.
    """
    try:
        torch.zeros(1, device=device).add_(1).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise CompressorError(f"--device {device}: torch cannot compute on it", got=reason, hint="cpu") from error
