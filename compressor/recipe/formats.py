"""Number formats by name, as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compressor.core.spec import Spec

KEEP = ("fp16", "bf16", "float", "keep")
"""Kept as stored: a 16-bit float stays the 16-bit float it is, byte for byte."""

PRESETS: dict[str, dict[str, Any]] = {
    "int2": {"bits": 2, "group_size": 64},
    "int3": {"bits": 3, "group_size": 64},
    "int4": {"bits": 4, "group_size": 128},
    "int4_asym": {"bits": 4, "group_size": 128, "symmetric": False},
    "int5": {"bits": 5, "group_size": 128},
    "int6": {"bits": 6, "group_size": 128},
    "int7": {"bits": 7, "group_size": 128},
    "int8": {"bits": 8, "group_size": -1},
    "w4a16": {"bits": 4, "group_size": 128},
    "w8a16": {"bits": 8, "group_size": -1},
    "w8a8": {"bits": 8, "group_size": -1, "activations": "int8"},
    "fp8": {"bits": 8, "group_size": -1, "kind": "float"},
    "fp8_tensor": {"bits": 8, "group_size": 0, "kind": "float"},
    "fp8_block": {"bits": 8, "group_size": 0, "kind": "float", "block": [128, 128]},
    "fp8_dynamic": {"bits": 8, "group_size": -1, "kind": "float", "activations": "fp8"},
}

DEFAULTS: dict[str, Any] = {"group_size": 128, "symmetric": True, "scale_dtype": None}
"""Of a format that is spelled out; scale_dtype None follows the model (BF16, else F16, for FP8 else F32)."""

FLOAT_DEFAULTS: dict[str, Any] = {"bits": 8, "group_size": -1}
"""Of one that is spelled out with ``kind: float``."""

SCALE_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


def to_spec(written: Mapping[str, Any], dtype: str) -> Spec:
    """The format a rule asks for, for a tensor stored in dtype (F32, F16, BF16).

    Raises:
        ValueError: its parts do not go together.
    """
    fallback = "F32" if written.get("kind") == "float" else "F16"  # fp16 has too few exponents for max / 448
    scale_dtype = written["scale_dtype"] or ("BF16" if dtype == "BF16" else fallback)
    block = written.get("block")
    return Spec(**{**written, "scale_dtype": scale_dtype, "block": tuple(block) if block else None})
