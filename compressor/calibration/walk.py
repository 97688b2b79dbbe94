"""The model, block by block from disk: one block's weights in memory, hidden states kept per batch.

The modules are transformers' own, built on the meta device; weights arrive one block at a time.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from compressor.arch.base import Family
from compressor.calibration.activations import fake_quantize, input_kind, quantize_inputs
from compressor.calibration.linear import bf16_products, fast_linears, fix_threads, linear
from compressor.calibration.stats import LayerStats
from compressor.checkpoint.base import Checkpoint
from compressor.errors import CompressorError
from compressor.kernels.floats import decode_float


class _FarEnough(Exception):
    """Ends a block's forward once the last input of interest is there."""


@dataclass
class FloatModel:
    """The unrounded model beside the walk.

    Attributes:
        block: The block with its float weights.
        streams: Its hidden states per batch, float32 [b, L, hidden].
        advance: Whether ``collect`` replaces them by the output of the block, or of the step.
    """

    block: nn.Module
    streams: list[torch.Tensor]
    advance: bool


class _Recorder(nn.Module):
    """Stands in for a block: returns its input and keeps the keyword arguments it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.kwargs: dict[str, Any] = {}

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.kwargs = kwargs
        return hidden_states


def _owned(array: NDArray[np.float32], device: str) -> torch.Tensor:
    """A copy in torch's own (64-byte aligned) memory: matrix products then repeat bit for bit."""
    return torch.from_numpy(array).clone().to(device)


class Walk:
    """Runs a checkpoint block by block in float32.

    Args:
        checkpoint: Where the weights come from (float, artifact or GGUF: anything that reads floats).
        family: Its arch data.
        device: torch device of the computation.
        bf16: Whether ``forward`` and ``collect`` may multiply in bfloat16 where the processor does that faster.

    Attributes:
        layers: Number of blocks.
    """

    def __init__(self, checkpoint: Checkpoint, family: Family, device: str = "cpu", *, bf16: bool = False) -> None:
        fix_threads()
        self.checkpoint, self.family, self.device, self.bf16 = checkpoint, family, device, bf16
        self.model = _skeleton(checkpoint)
        self._inner = self.model.get_submodule(family.blocks.rpartition(".")[0])
        self._blocks = cast(nn.ModuleList, self.model.get_submodule(family.blocks))
        self.layers = len(self._blocks)
        self._rotary()
        self._kwargs: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._head: torch.Tensor | None = None

    def _rotary(self) -> None:
        """Rotary tables are buffers, not weights: build them again off the meta device."""
        for name, module in list(self._inner.named_children()):
            if "rotary" in name:
                rebuilt = type(module)(config=self.model.config).to(self.device)
                setattr(self._inner, name, rebuilt)

    @torch.inference_mode()
    def embed(self, batches: list[torch.Tensor]) -> list[torch.Tensor]:
        """Token ids int64 [b, L] per batch -> hidden states float32 [b, L, hidden] per batch.

        Only the rows in use are decoded, so a large table costs its rows, not its size.
        """
        name = f"{self.family.embedding}.weight"
        vocab = self.checkpoint.tensors[name].shape[0]
        used = torch.unique(torch.cat([ids.reshape(-1) for ids in batches])).numpy()
        if used.size and used[-1] >= vocab:
            got = int(used[-1])
            raise CompressorError(f"{name}: token id out of range", got=got, expected=f"< {vocab}")
        raw = self.checkpoint.raw(name)
        rows = decode_float(np.ascontiguousarray(raw.data.reshape(vocab, -1)[used]).reshape(-1), raw.dtype)
        table = _owned(rows.reshape(len(used), -1), self.device)
        if not torch.isfinite(table).all():
            raise CompressorError(f"{name}: values are NaN or infinite", hint="the checkpoint is damaged")
        lookup = torch.from_numpy(used)
        return [table[torch.searchsorted(lookup, ids).to(self.device)] for ids in batches]

    def block(self, layer: int) -> nn.Module:
        """Block ``layer`` with its float32 weights, read now from the checkpoint."""
        block = self._blocks[layer]
        prefix = self.family.block(layer) + "."
        names = [n for n in block.state_dict() if prefix + n in self.checkpoint.tensors]
        state = {n: _owned(self.checkpoint.read(prefix + n), self.device) for n in names}
        block.load_state_dict(state, assign=True)
        fast_linears(block)
        quantize_inputs(block, prefix, self.checkpoint)
        return block.eval()

    def release(self, block: nn.Module) -> None:
        """Drop a block's weights and give the memory back to the system."""
        block.to("meta")
        _trim()

    @torch.inference_mode()
    def forward(self, block: nn.Module, layer: int, streams: list[torch.Tensor], step: int | None = None) -> None:
        """Replace each hidden state float32 [b, L, hidden] in the list by the block's output for it.

        With ``step``, by what that one of ``Family.residuals`` makes of it.
        """
        with bf16_products(self.bf16):
            for index, hidden in enumerate(streams):
                streams[index] = self._call(block, layer, hidden, step)

    @torch.inference_mode()
    def output(self, block: nn.Module, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The block's output float32 [b, L, hidden] for one batch."""
        return self._call(block, layer, hidden)

    @torch.inference_mode()
    def collect(
        self,
        block: nn.Module,
        layer: int,
        streams: list[torch.Tensor],
        wanted: Collection[str] | None = None,
        *,
        step: int | None = None,
        exact: FloatModel | None = None,
        held_out: int = 0,
    ) -> dict[str, LayerStats]:
        """Input statistics of linears of a block, by name inside it (``self_attn.q_proj``).

        Linears that read the same tensor (``Family.inputs``) share one LayerStats object. The block (or its
        step) runs only as far as the last of them; the streams are not advanced. Batches carry no padding,
        so every position counts.

        Args:
            block, layer, streams, step: What ``forward`` takes.
            wanted: The linears named, or None for all.
            exact: The float model at the same place: ``cross`` is then kept too.
            held_out: How many batches, from the first, go into ``held_out`` instead.
        """
        groups = [g for g in self.family.inputs if wanted is None or set(g) & set(wanted)]
        firsts = [group[0] for group in groups]
        sums = {name: self._empty(block, name, exact is not None, held_out > 0) for name in firsts}
        for index, hidden in enumerate(streams):
            with bf16_products(self.bf16):
                floats = self._exact_inputs(exact, layer, step, index, firsts) if exact else {}
                inputs, _ = self._inputs(block, layer, step, hidden, firsts)
            for name, stats in sums.items():
                chosen = stats.held_out if stats.held_out is not None and index < held_out else stats
                chosen.add(inputs[name], floats.get(name), bf16=self.bf16, settle=False)
        for stats in sums.values():
            stats.settle()
        return {name: sums[group[0]] for group in groups for name in group}

    def _empty(self, block: nn.Module, name: str, cross: bool, held_out: bool) -> LayerStats:
        width = int(block.get_submodule(name).in_features)  # type: ignore[arg-type]
        stats = LayerStats.empty(width, self.device, cross=cross)
        if held_out:
            stats.held_out = LayerStats.empty(width, self.device, cross=cross)
        return stats

    def _exact_inputs(
        self, exact: FloatModel, layer: int, step: int | None, index: int, names: list[str]
    ) -> dict[str, torch.Tensor]:
        """The float model's inputs of these linears for one batch; advances its stream where asked."""
        hidden = exact.streams[index]
        inputs, output = self._inputs(exact.block, layer, step, hidden, names, to_the_end=exact.advance)
        if output is not None:
            exact.streams[index] = output
        return inputs

    def _inputs(
        self,
        block: nn.Module,
        layer: int,
        step: int | None,
        hidden: torch.Tensor,
        names: list[str],
        to_the_end: bool = False,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """What each linear reads, float32 [b, L, in], and the output where block or step runs to the end."""
        inputs: dict[str, torch.Tensor] = {}
        hooks = [
            block.get_submodule(name).register_forward_pre_hook(
                _keeper(inputs, name, stop=name == names[-1] and not to_the_end)
            )
            for name in names
        ]
        try:
            return inputs, self._call(block, layer, hidden, step)
        except _FarEnough:
            return inputs, None
        finally:
            for hook in hooks:
                hook.remove()

    @torch.inference_mode()
    def collect_head(self, streams: list[torch.Tensor], exact: list[torch.Tensor] | None = None) -> LayerStats:
        """Input statistics of the head: the streams (after the last block) through the final norm."""
        norm = self._final_norm()
        stats = LayerStats.empty(streams[0].shape[-1], self.device, cross=exact is not None)
        for index, hidden in enumerate(streams):
            stats.add(norm(hidden), norm(exact[index]) if exact is not None else None, settle=False)
        stats.settle()
        return stats

    @property
    def head_name(self) -> str:
        """The tensor the head multiplies with: its own, or the embedding where tied."""
        name = f"{self.family.head}.weight"
        tied = self.family.tied(self.checkpoint.config) or name not in self.checkpoint.tensors
        return f"{self.family.embedding}.weight" if tied else name

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states float32 [..., hidden] -> logits float32 [..., vocab]: final norm, then head."""
        if self._head is None:
            self._head = _owned(self.checkpoint.read(self.head_name), self.device)
        final = self._final_norm()(hidden)
        kind = input_kind(self.checkpoint, self.family.head)
        return linear(fake_quantize(final, kind) if kind else final, self._head)

    def _final_norm(self) -> nn.Module:
        """The final norm, its weight read on first use."""
        norm = self.model.get_submodule(self.family.final_norm)
        if any(parameter.is_meta for parameter in norm.parameters()):
            weight = self.checkpoint.read(f"{self.family.final_norm}.weight")
            norm.load_state_dict({"weight": _owned(weight, self.device)}, assign=True)
        return norm

    def _call(self, block: nn.Module, layer: int, hidden: torch.Tensor, step: int | None = None) -> torch.Tensor:
        if step is not None:
            return self._step(block, layer, hidden, step)
        output = block(hidden, **self._block_kwargs(hidden)[layer])
        return cast(torch.Tensor, output[0] if isinstance(output, tuple) else output)

    def _step(self, block: nn.Module, layer: int, hidden: torch.Tensor, step: int) -> torch.Tensor:
        """One residual step: h + module(norm(h))."""
        norm, name = self.family.residuals[step]
        module = block.get_submodule(name)
        kwargs = self._block_kwargs(hidden)[layer]
        accepted = _accepted(module)
        given = kwargs if accepted is None else {key: value for key, value in kwargs.items() if key in accepted}
        output = module(block.get_submodule(norm)(hidden), **given)
        return hidden + cast(torch.Tensor, output[0] if isinstance(output, tuple) else output)

    def _block_kwargs(self, hidden: torch.Tensor) -> list[dict[str, Any]]:
        """What the model passes to each block for hidden states of this shape (masks, rotary tables)."""
        shape = (hidden.shape[0], hidden.shape[1])
        if shape not in self._kwargs:
            recorders = nn.ModuleList(_Recorder() for _ in range(self.layers))
            norm_name = self.family.final_norm.rpartition(".")[2]
            parts = {self.family.blocks.rpartition(".")[2]: recorders, norm_name: nn.Identity()}
            kept = {name: getattr(self._inner, name) for name in parts}
            try:
                for name, module in parts.items():
                    setattr(self._inner, name, module)
                self._inner(inputs_embeds=hidden, use_cache=False)
            finally:
                for name, module in kept.items():
                    setattr(self._inner, name, module)
            self._kwargs[shape] = [recorder.kwargs for recorder in recorders]  # type: ignore[misc]
        return self._kwargs[shape]


def _accepted(module: nn.Module) -> frozenset[str] | None:
    """Keyword arguments a module's forward takes; None for any."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def _keeper(inputs: dict[str, torch.Tensor], name: str, stop: bool) -> Any:
    def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        inputs[name] = args[0]
        if stop:
            raise _FarEnough

    return hook


@functools.cache
def _libc() -> Any:
    """The C library where it can give freed memory back (glibc), else None."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        return libc if hasattr(libc, "malloc_trim") else None
    except OSError:
        return None


def _trim() -> None:
    """Return freed heap pages: without it a block's worth of fragments stays behind every few blocks."""
    if (libc := _libc()) is not None:
        libc.malloc_trim(0)


def check_config(checkpoint: Checkpoint) -> None:
    """Build the model's structure once, before any work.

    Raises:
        CompressorError: transformers refuses the config, with its reason.
    """
    try:
        _skeleton(checkpoint)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise CompressorError(
            f"{checkpoint.label}: transformers cannot build this config.json", got=reason
        ) from error


def _skeleton(checkpoint: Checkpoint) -> nn.Module:
    """The transformers model of a config on the meta device: structure, no weights."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=torch.float32, attn_implementation="sdpa"
        )
    return model.eval()  # type: ignore[no-any-return]
