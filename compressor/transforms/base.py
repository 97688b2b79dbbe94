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
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

import compressor.transforms as package
from compressor.arch.base import Config, Family
from compressor.checkpoint.base import Checkpoint
from compressor.core.plan import PassCall
from compressor.errors import CompressorError, GateFailed, Problems

if TYPE_CHECKING:
    import torch

VERIFIED_TOKENS = 64
MOST_MOVED = 0.01  # an embedding rounded to bf16 moves them by about 0.001


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


def verify(checkpoint: Checkpoint, family: Family, batches: Sequence[torch.Tensor], device: str) -> None:
    """Run the first and the last block of the model and of its view on a few tokens, and compare.

    A view may turn the stream, so what is compared are the products of all pairs of hidden states.

    Args:
        checkpoint: A view, or an untransformed model (then there is nothing to do).
        family: Its arch data.
        batches: Token ids int64 [b, L]; the first VERIFIED_TOKENS of them are used.
        device: torch device of the computation.

    Raises:
        GateFailed: naming the block whose output moved.
    """
    source = untransformed(checkpoint)
    if source is checkpoint:
        return
    tokens = batches[0][:1, :VERIFIED_TOKENS]
    layers = dict.fromkeys((0, family.dims(source.config)["layers"] - 1))
    before, after = (_products(model, family, tokens, layers, device) for model in (source, checkpoint))
    for layer in layers:
        moved = float((after[layer] - before[layer]).norm() / before[layer].norm())
        if not moved < MOST_MOVED:
            raise GateFailed(
                f"{checkpoint.label}: the transformed model computes something else in block {layer}",
                got=f"hidden states {moved:.2e} apart",
                expected=f"below {MOST_MOVED}",
                hint="leave transforms out of the recipe, and report this model",
            )


def _products(
    model: Checkpoint, family: Family, tokens: torch.Tensor, layers: Iterable[int], device: str
) -> dict[int, torch.Tensor]:
    """By block: float64 [n, n] inner products of its outputs for n embedded tokens."""
    from compressor.calibration.walk import Walk

    walk = Walk(model, family, device)
    found = {}
    for layer in layers:
        streams, block = walk.embed([tokens]), walk.block(layer)
        walk.forward(block, layer, streams)
        walk.release(block)
        states = streams[0][0].double()
        found[layer] = states @ states.T
    return found


def _loaded(call: PassCall) -> tuple[ModuleType, Any]:
    module = load(call.name)
    return module, module.Options(**call.options)


def _refuse(name: str, problems: list[CompressorError], label: str) -> None:
    if problems:
        raise Problems(f"{label}: transform {name} does not fit this model", problems)
