"""Block by block: statistics, rounding passes, encoded shards; everything outside the blocks last."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor.arch.base import Family
from compressor.checkpoint.base import Checkpoint
from compressor.checkpoint.writer import RunDirectory
from compressor.core.plan import Plan, PlannedTensor
from compressor.core.report import Progress
from compressor.core.tensors import QTensor, RawTensor
from compressor.errors import CompressorError
from compressor.kernels.floats import FLOAT_BYTES, all_finite

_EXACT = "exact "

if TYPE_CHECKING:
    import torch

    from compressor.calibration.data import TokenSet
    from compressor.calibration.stats import LayerStats
    from compressor.calibration.walk import Walk


@dataclass(frozen=True)
class Work:
    """What rounding needs to know of a run."""

    checkpoint: Checkpoint
    family: Family
    plan: Plan
    device: str
    strict: bool


@dataclass
class Streams:
    """Hidden states on their way through the blocks, float32 [b, L, hidden] per batch.

    Attributes:
        rounded: Behind blocks that are rounded already.
        exact: Of the float model, or None where no pass compares with it.
    """

    rounded: list[torch.Tensor]
    exact: list[torch.Tensor] | None = None

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """For the run directory, by name."""
        found = {str(i): hidden for i, hidden in enumerate(self.rounded)}
        found |= {f"{_EXACT}{i}": hidden for i, hidden in enumerate(self.exact or ())}
        return {name: hidden.cpu().numpy() for name, hidden in found.items()}


def check_finite(checkpoint: Checkpoint, progress: Progress) -> None:
    """Read every float once: a NaN in the last block must not surface after hours.

    Raises:
        CompressorError: naming the tensor.
    """
    floats = [name for name, info in checkpoint.tensors.items() if info.dtype in FLOAT_BYTES]
    for done, name in enumerate(floats, start=1):
        raw = checkpoint.raw(name)
        if not all_finite(raw.data, raw.dtype):
            checkpoint.read(name)  # raises, naming the place
        progress("checking weights", done, len(floats))


def round_blocks(work: Work, run: RunDirectory, tokens: TokenSet, progress: Progress) -> None:
    """Walk the blocks that are not written yet, then write everything outside the blocks.

    The model is run only as far as some pass still wants statistics: not at all for round-to-nearest.
    """
    from compressor.blockwise import BlockRounding
    from compressor.calibration.walk import Walk

    layers, walked = work.plan.layers, _blocks_to_walk(work.plan)
    start = run.last_stream() or 0
    walk = Walk(work.checkpoint, work.family, work.device) if walked else None
    streams = Streams([])
    if walk is not None:
        streams = _load_streams(run, start, work.device) if start else _first_streams(work.plan, walk, tokens)
    for layer in range(start, layers):
        progress("quantizing blocks", layer, layers)
        if walk is not None and layer < walked:
            BlockRounding(work, walk, layer, streams).write(run)
            run.save_stream(layer + 1, streams.arrays())
        elif not run.has_shard(shard_name(layer, layers)):
            planned = [tensor for tensor in work.plan.tensors if tensor.layer == layer]
            run.write_shard(shard_name(layer, layers), *_round_all(work, planned))
    progress("quantizing blocks", layers, layers)
    _write_rest(work, run, walk, streams)


def _first_streams(plan: Plan, walk: Walk, tokens: TokenSet) -> Streams:
    """The embedded tokens; twice where some pass compares with the float model."""
    hidden = walk.embed(tokens.batches)
    beside = any("cross" in needs(tensor) for tensor in plan.tensors if tensor.layer is not None)
    return Streams(hidden, list(hidden) if beside else None)


def _blocks_to_walk(plan: Plan) -> int:
    """How many blocks, from the first, must be run: up to the last whose passes want statistics."""
    wanting = [tensor.layer for tensor in plan.tensors if needs(tensor)]
    return max((plan.layers if layer is None else layer + 1 for layer in wanting), default=0)


def _load_streams(run: RunDirectory, layer: int, device: str) -> Streams:
    """Hidden states as they entered ``layer``, in torch's own memory."""
    import torch

    arrays = {key: torch.from_numpy(a).clone().to(device) for key, a in run.load_stream(layer).items()}
    exact = [arrays[key] for key in _numbered(arrays, _EXACT)]
    return Streams([arrays[key] for key in _numbered(arrays, "")], exact or None)


def _numbered(arrays: Mapping[str, Any], prefix: str) -> list[str]:
    """Keys ``prefix0``, ``prefix1`` ... that are there."""
    return list(itertools.takewhile(arrays.__contains__, (f"{prefix}{i}" for i in itertools.count())))


def _write_rest(work: Work, run: RunDirectory, walk: Walk | None, streams: Streams) -> None:
    """Everything outside the blocks: embedding, final norm, head, and tensors no family file names."""
    planned = [tensor for tensor in work.plan.tensors if tensor.layer is None]
    wanting = [tensor.module for tensor in planned if needs(tensor)]
    stats = {m: walk.collect_head(streams.rounded, streams.exact) for m in wanting} if walk is not None else {}
    run.write_shard(shard_name(work.plan.layers, work.plan.layers), *_round_all(work, planned, stats))


def _round_all(
    work: Work, planned: list[PlannedTensor], stats: Mapping[str, LayerStats] | None = None
) -> tuple[dict[str, RawTensor], dict[str, Any]]:
    """Parts for a shard and facts of these tensors, by the statistics of their modules."""
    tensors: dict[str, RawTensor] = {}
    facts: dict[str, Any] = {}
    for tensor in planned:
        if tensor.spec is None:
            tensors[tensor.name] = work.checkpoint.raw(tensor.name)
            continue
        weight = work.checkpoint.read(tensor.name)
        encoded, _, facts[tensor.name] = round_tensor(work, tensor, weight, (stats or {}).get(tensor.module))
        tensors.update(encoded)
    return tensors, facts


def needs(tensor: PlannedTensor) -> frozenset[str]:
    """The statistics its passes want."""
    from compressor.passes import base

    return frozenset[str]().union(*(base.needs(call) for call in tensor.passes))


def round_tensor(
    work: Work, tensor: PlannedTensor, weight: NDArray[np.float32], stats: LayerStats | None
) -> tuple[dict[str, RawTensor], QTensor, dict[str, Any]]:
    """Round one weight: its encoded parts, its codes, and facts for the report.

    Raises:
        CompressorError: the pass failed, or fell back under --strict.
    """
    from compressor.export import compressed_tensors
    from compressor.passes import base

    assert tensor.spec is not None
    (call,) = (call for call in tensor.passes if base.kind(call) == "round")
    module = base.load(call.name)
    options = module.Options(**call.options)
    try:
        rounded = module.run(weight, tensor.spec, stats, options, work.device)
    except ValueError as error:
        raise CompressorError(f"{tensor.name}: {call.name} failed", got=str(error)) from error
    facts = {
        "pass": call.name,
        "format": tensor.spec.label(),
        "rule": tensor.rule,
        **rounded.facts,
        "damp_asked": call.options.get("damp", 0),
        "degraded": list(rounded.degraded),
    }
    if rounded.degraded and work.strict:
        raise CompressorError(f"{tensor.name}: {rounded.degraded[0]}", hint="run without --strict to accept this")
    encoded = compressed_tensors.encode(tensor.module, rounded.tensor)
    return encoded, rounded.tensor, facts


def shard_name(index: int, layers: int) -> str:
    """File of block ``index``; index == layers is the file of everything outside the blocks."""
    return f"model-{index + 1:05d}-of-{layers + 1:05d}.safetensors"
