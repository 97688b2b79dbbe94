"""What a transform module exports, how it is found, and how several are put on a model.

A transform ``transforms/NAME.py`` exports::

    class Options(TransformOptions): ...            # its options with defaults and help, strict
    def problems(config, family, options) -> list[CompressorError]      # why this model cannot have it
    def present(config, family, options) -> dict                        # config.json as it will be
    def notes(config, family, options) -> list[str]                     # what it does to the model
    def view(checkpoint, family, options) -> TransformedCheckpoint      # the model with it, tensor by tensor
    def memory(config, family, options) -> int                          # bytes it keeps and works in

A transform leaves the model's function as it was. Nothing is computed before a tensor is asked for.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict

import compressor.transforms as package
from compressor.arch.base import Config, Family
from compressor.checkpoint.base import Checkpoint
from compressor.core.plan import PassCall
from compressor.errors import CompressorError, Problems


class TransformOptions(BaseModel):
    """Base of every transform's options: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TransformedCheckpoint(Checkpoint):
    """A view: another checkpoint with changed tensors.

    Attributes:
        source: What it is a view of.
    """

    source: Checkpoint

    @property
    def pretokenizer(self) -> str | None:
        """GGUF's name of the tokenizer's splitting, where the source recorded it."""
        return getattr(self.source, "pretokenizer", None)

    def side_files(self) -> dict[str, Path | bytes]:
        """The source's."""
        return self.source.side_files()


def available() -> list[str]:
    """Names of the transforms that exist: the directory listing."""
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name != "base")


def load(name: str) -> ModuleType:
    """The module of a transform.

    Raises:
        KeyError: no such file.
    """
    if name not in available():
        raise KeyError(name)
    return importlib.import_module(f"{package.__name__}.{name}")


def apply(calls: Iterable[PassCall], checkpoint: Checkpoint, family: Family) -> Checkpoint:
    """The checkpoint seen through each transform in turn (itself when there is none).

    Raises:
        Problems: the model cannot have one of them.
    """
    for call in calls:
        module, options = _loaded(call)
        _refuse(call.name, module.problems(checkpoint.config, family, options), checkpoint.label)
        checkpoint = module.view(checkpoint, family, options)
    return checkpoint


def present(calls: Iterable[PassCall], config: Config, family: Family, label: str) -> dict[str, Any]:
    """A bare config.json as the transforms would leave it.

    Raises:
        Problems: the model cannot have one of them.
    """
    found = dict(config)
    for call in calls:
        module, options = _loaded(call)
        _refuse(call.name, module.problems(found, family, options), label)
        found = module.present(found, family, options)
    return found


def notes(calls: Iterable[PassCall], config: Config, family: Family) -> tuple[str, ...]:
    """What the transforms do to a model of this (untransformed) config."""
    lines: list[str] = []
    for call in calls:
        module, options = _loaded(call)
        lines += module.notes(config, family, options)
        config = module.present(config, family, options)
    return tuple(lines)


def memory(calls: Iterable[PassCall], config: Config, family: Family) -> int:
    """Bytes the transforms keep and work in."""
    loaded = [_loaded(call) for call in calls]
    return sum(module.memory(config, family, options) for module, options in loaded)


def untransformed(checkpoint: Checkpoint) -> Checkpoint:
    """The model under all views."""
    while isinstance(checkpoint, TransformedCheckpoint):
        checkpoint = checkpoint.source
    return checkpoint


def _loaded(call: PassCall) -> tuple[ModuleType, Any]:
    module = load(call.name)
    return module, module.Options(**call.options)


def _refuse(name: str, problems: list[CompressorError], label: str) -> None:
    if problems:
        raise Problems(f"{label}: transform {name} does not fit this model", problems)
