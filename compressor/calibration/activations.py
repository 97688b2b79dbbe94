"""Inputs of linear layers rounded as they run: what an engine does to a format that quantizes activations.

Per token and symmetric: a token's scale is its largest magnitude over 127.5 (``int8``, codes -128..127) or
over 448 (``fp8``, E4M3), found anew for every token. The numerics are compressed-tensors', in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from compressor.checkpoint.base import Checkpoint
from compressor.errors import CompressorError

_STEPS = {"int8": 127.5, "fp8": 448.0}
_NO_SCALE = float(torch.finfo(torch.float32).eps)
"""The scale of a token of zeros."""


def fake_quantize(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Float32 [..., n] -> float32 alike: every token (last dimension) rounded on its own scale.

    Args:
        x: Finite values.
        kind: ``int8`` or ``fp8``.
    """
    scale = x.abs().amax(dim=-1, keepdim=True) / _STEPS[kind]
    scale = torch.where(scale == 0, _NO_SCALE, scale)
    ratio = x / scale
    if kind == "int8":
        return ratio.clamp_(-128, 127).round_() * scale
    return ratio.clamp_(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def input_kind(checkpoint: Checkpoint, module: str) -> str | None:
    """How a checkpoint asks engines to quantize a module's input, or None (the default of every float model).

    Raises:
        CompressorError: in a way that is not known here.
    """
    tell = getattr(checkpoint, "activations", None)
    kind = tell(module) if tell is not None else None
    if kind is not None and kind not in _STEPS:
        raise CompressorError(f"{module}: unknown activations", got=kind, expected=", ".join(_STEPS))
    return kind


def quantize_inputs(block: nn.Module, prefix: str, checkpoint: Checkpoint) -> None:
    """Make a block's linears round their inputs where the checkpoint asks for it; once is enough.

    Args:
        block: Its linears keep the hook: call it again for the same module and nothing changes.
        prefix: What comes before the names of its modules in the checkpoint, with the last dot.
        checkpoint: Any; only artifacts ask.
    """
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear) and not hasattr(module, "_quantizes_inputs"):
            kind = input_kind(checkpoint, prefix + name)
            module._quantizes_inputs = kind  # type: ignore[assignment]
            if kind is not None:
                module.register_forward_pre_hook(_rounder(kind))


def _rounder(kind: str) -> Any:
    def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        return (fake_quantize(args[0], kind),)

    return hook
