"""Number formats by name, as data."""

from __future__ import annotations

from typing import Any

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
}

DEFAULTS: dict[str, Any] = {"group_size": 128, "symmetric": True, "scale_dtype": None}
"""Of a format that is spelled out; scale_dtype None follows the model (BF16, else F16)."""

SCALE_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
