"""What a pass module exports, and how it is found.

Every pass ``passes/NAME.py`` exports::

    KIND: str                         # "rescale" or "round"; a weight may be rescaled often, rounded once
    NEEDS: frozenset[str]             # statistics it may want, see below
    class Options(PassOptions): ...   # its options with defaults and help, strict
    def needs(options) -> frozenset[str]      # optional: what it wants with these options

A rounding pass (KIND "round") also exports::

    SYMMETRIC_ONLY: bool              # plans refuse asymmetric formats for it
    def run(weight, spec, stats, options, device) -> Rounded

A rescaling pass (KIND "rescale") also exports::

    PAIRS: tuple[str, ...]            # kinds of arch.base.Pair it works on: "norm", "linear"
    def run(consumers, stats, source_of, options, device) -> Rescaled

``weight`` is float32 [out, in], ``stats`` a calibration.stats.LayerStats or None, ``device`` a torch
device name. Passes return codes or scales; they never run the model and open no files.

Needs: ``hessian`` (second moments of the inputs), ``cross`` (how the inputs differ from the float model's:
a second forward pass), ``held_out`` (the same of tokens kept apart). A linear's statistics are taken once
the linears before it in the block are rounded.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

import compressor.passes as package
from compressor.core.plan import PassCall
from compressor.core.spec import Spec
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


@dataclass(frozen=True)
class Consumer:
    """A linear that reads what a pair's source writes.

    Attributes:
        weight: float32 [out, in].
        spec: The format it will be rounded to.
        feedback: Whether its rounding makes up for errors in later columns (a pass that wants Hessians).
    """

    weight: NDArray[np.float32]
    spec: Spec
    feedback: bool = False


@dataclass(frozen=True)
class Rescaled:
    """What a rescaling pass returns.

    Attributes:
        scales: float32 [channels of the source], positive: the source's output is divided by them, the
            consumers' columns are multiplied; None leaves everything as it is.
        facts: JSON-ready facts for the report.
    """

    scales: NDArray[np.float32] | None
    facts: dict[str, Any] = field(default_factory=dict)


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


def needs(call: PassCall) -> frozenset[str]:
    """The statistics a pass wants with these options."""
    module = load(call.name)
    wanted = getattr(module, "needs", None)
    found: frozenset[str] = module.NEEDS if wanted is None else wanted(module.Options(**call.options))
    return found


def kind(call: PassCall) -> str:
    """``rescale`` or ``round``."""
    return str(load(call.name).KIND)
