"""Moving scales between a block's modules: what rescaling passes ask for is folded, proved, or taken back.

A pair (arch.base.Pair) is a norm or linear and the linears that read it. Dividing its output channels by s
and multiplying the readers' columns by s changes nothing but which weights are large (SmoothQuant,
arXiv 2211.10438; AWQ, arXiv 2306.00978).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from compressor.arch.base import Family, Pair
from compressor.core.plan import PassCall, PlannedTensor
from compressor.kernels.floats import round_to_dtype
from compressor.passes import base

if TYPE_CHECKING:
    from compressor.calibration.stats import LayerStats

TOLERANCE = 1e-3
"""How far a fold may move the block's output, as a part of its norm: float32 rounding is below 1e-5."""


@dataclass
class Folds:
    """What rescaling did to a block.

    Attributes:
        changed: Float tensors that are stored but not rounded and have new values, by local name.
        stats: Statistics of every linear's input after the folds, by local name.
        touched: By local module name, the pairs that were folded into its weight.
        facts: Facts of the report by pair (``input_layernorm -> q_proj, k_proj, v_proj``).
        notes: Sentences about folds that were taken back or not tried.
    """

    changed: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    stats: dict[str, LayerStats] = field(default_factory=dict)
    touched: dict[str, list[str]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Rescaler:
    """Runs the rescaling passes of one block.

    Args:
        family: Its arch data.
        block: The block with its float weights; they are changed in place.
        planned: The block's planned tensors by local module name.
        stats: Input statistics by local linear name.
        heads: Query heads per value head.
        head_dim: Channels of a head.
        device: torch device name.
    """

    def __init__(
        self,
        family: Family,
        block: nn.Module,
        planned: Mapping[str, PlannedTensor],
        stats: Mapping[str, LayerStats],
        heads: int,
        head_dim: int,
        device: str,
    ) -> None:
        self.family, self.block, self.planned, self.device = family, block, planned, device
        self.heads, self.head_dim = heads, head_dim
        self.folds = Folds(stats=dict(stats))

    def run(self) -> Folds:
        """Every pair that a pass is listed for, in the family's order."""
        for pair in self.family.pairs:
            for call in self._calls(pair):
                self._rescale(pair, call)
        return self.folds

    def _calls(self, pair: Pair) -> list[PassCall]:
        """Rescaling passes listed for all readers of a pair; where only some list one, none runs."""
        lists = [rescaling(self.planned[name]) for name in pair.consumers]
        if any(found != lists[0] for found in lists):
            self.folds.notes.append(f"{label(pair)}: not rescaled, its readers list different passes")
            return []
        calls = [call for call in lists[0] if pair.kind in base.load(call.name).PAIRS]
        source = self.planned.get(pair.source)
        if calls and pair.kind == "linear" and (source is None or source.spec is None):
            self.folds.notes.append(f"{label(pair)}: not rescaled, {pair.source} is kept as stored")
            return []
        return calls

    def _rescale(self, pair: Pair, call: PassCall) -> None:
        module = base.load(call.name)
        consumers = [self._consumer(name) for name in pair.consumers]
        stats = self.folds.stats[pair.consumers[0]]
        found: base.Rescaled = module.run(
            consumers, stats, self._source_of(pair), module.Options(**call.options), self.device
        )
        self.folds.facts[label(pair)] = {"pass": call.name, **found.facts}
        if found.scales is not None:
            self._fold(pair, found.scales)
            for name in (pair.source, *pair.consumers):
                self.folds.touched.setdefault(name, []).append(label(pair))

    def _consumer(self, name: str) -> base.Consumer:
        planned = self.planned[name]
        assert planned.spec is not None
        weight = _weight(self.block, name)
        feedback = any(base.kind(call) == "round" and "hessian" in base.needs(call) for call in planned.passes)
        return base.Consumer(weight.detach().cpu().numpy(), planned.spec, feedback)

    def _source_of(self, pair: Pair) -> NDArray[np.int64]:
        """int64 [in]: the source channel that every input channel of the readers comes from."""
        channels = np.arange(_weight(self.block, pair.consumers[0]).shape[1], dtype=np.int64)
        if not pair.heads:
            return channels
        head, inside = np.divmod(channels, self.head_dim)
        sources: NDArray[np.int64] = head // self.heads * self.head_dim + inside
        return sources

    @torch.no_grad()
    def _fold(self, pair: Pair, scales: NDArray[np.float32]) -> None:
        """Divide the source, multiply the readers, and carry the statistics along."""
        effective = scales
        if pair.kind == "norm":
            effective = self._fold_norm(pair.source, scales)
        else:
            self._divide_linear(pair.source, torch.from_numpy(scales).to(self.device))
        columns = torch.from_numpy(effective[self._source_of(pair)]).to(self.device)
        stats = self.folds.stats[pair.consumers[0]].divided(columns)
        for name in pair.consumers:
            _weight(self.block, name).mul_(columns)
            self.folds.stats[name] = stats

    def _divide_linear(self, name: str, by: torch.Tensor) -> None:
        """Divide a linear's output rows, and its bias, which is stored as a float."""
        _weight(self.block, name).div_(by[:, None])
        bias = getattr(self.block.get_submodule(name), "bias", None)
        if bias is not None:
            bias.div_(by)
            self.folds.changed[f"{name}.bias"] = bias.detach().cpu().numpy()

    def _fold_norm(self, name: str, scales: NDArray[np.float32]) -> NDArray[np.float32]:
        """Divide a norm's weight, as it will be stored; returns the scales that really came about.

        Rounding the quotient to the stored dtype changes it a little, and the readers make up for that
        exactly: they are multiplied by old weight / stored weight.
        """
        planned = self.planned[name]
        weight = _weight(self.block, name)
        old = weight.cpu().numpy().copy()
        stored = round_to_dtype((old / scales).astype(np.float32), planned.dtype)
        usable = (stored != 0) & np.isfinite(stored)
        stored = np.where(usable, stored, old)
        effective: NDArray[np.float32] = np.divide(old, stored, out=np.ones_like(old), where=stored != 0)
        weight.copy_(torch.from_numpy(stored))
        self.folds.changed[f"{name}.weight"] = stored
        return effective


def _weight(block: nn.Module, name: str) -> torch.Tensor:
    return block.get_submodule(name).weight.detach()  # type: ignore[operator]


def rescaling(tensor: PlannedTensor) -> list[PassCall]:
    """The rescaling passes of a tensor, in order."""
    return [call for call in tensor.passes if base.kind(call) == "rescale"]


def label(pair: Pair) -> str:
    """``input_layernorm -> q_proj, k_proj, v_proj``."""
    readers = ", ".join(name.rpartition(".")[2] for name in pair.consumers)
    return f"{pair.source.rpartition('.')[2]} -> {readers}"


def moved(before: torch.Tensor, after: torch.Tensor) -> float:
    """How far a fold moved the block's output, as a part of its norm."""
    return float((after - before).norm() / before.norm().clamp_min(1e-30))
