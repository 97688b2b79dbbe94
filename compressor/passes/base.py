"""What a pass module exports, and how it is found.

A rounding pass ``passes/NAME.py`` exports::

    NEEDS: frozenset[str]             # statistics it wants: {"hessian"} or empty
    KIND: str                         # "round" (rescaling passes come later)
    SYMMETRIC_ONLY: bool              # plans refuse asymmetric formats for it
    FLOATS: bool                      # it rounds float formats too (left out: it does not)
    class Options(PassOptions): ...   # its options with defaults and help, strict
    def run(weight, spec, stats, options, device) -> Rounded

``weight`` is float32 [out, in], ``stats`` a calibration.stats.LayerStats or None, ``device`` a torch
device name. It returns codes; it never runs the model and opens no files.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict

import compressor.passes as package
from compressor.core.tensors import QTensor


class PassOptions(BaseModel):
    """Base of every pass's options: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


@dataclass(frozen=True)
class Rounded:
    """What a rounding pass returns.

    Attributes:
        tensor: The codes.
        facts: JSON-ready facts for the report (``damp``, ``dead_columns``, ``error`` ...).
        degraded: Fallbacks taken, one sentence each; the report shows them, ``--strict`` refuses them.
    """

    tensor: QTensor
    facts: dict[str, Any] = field(default_factory=dict)
    degraded: tuple[str, ...] = ()


def available() -> list[str]:
    """Names of the passes that exist: the directory listing."""
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name != "base")


def load(name: str) -> ModuleType:
    """The module of a pass.

    Raises:
        KeyError: no such file.
    """
    if name not in available():
        raise KeyError(name)
    return importlib.import_module(f"{package.__name__}.{name}")
