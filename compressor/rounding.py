"""Block by block: statistics, rounding passes, encoded shards; everything outside the blocks last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    from compressor.calibration.walk import Walk

    layers, walked = work.plan.layers, _blocks_to_walk(work.plan)
    start = run.last_stream() or 0
    walk = Walk(work.checkpoint, work.family, work.device) if walked else None
    streams: list[torch.Tensor] = []
    if walk is not None:
        streams = _load_streams(run, start, work.device) if start else walk.embed(tokens.batches)
    for layer in range(start, layers):
        progress("quantizing blocks", layer, layers)
        if walk is not None and layer < walked:
            _round_walked_block(work, run, walk, layer, streams)
            run.save_stream(layer + 1, {str(i): s.cpu().numpy() for i, s in enumerate(streams)})
        elif not run.has_shard(shard_name(layer, layers)):
            planned = [tensor for tensor in work.plan.tensors if tensor.layer == layer]
            run.write_shard(shard_name(layer, layers), *_round_all(work, planned, {}))
    progress("quantizing blocks", layers, layers)
    _write_rest(work, run, walk, streams)


def _blocks_to_walk(plan: Plan) -> int:
    """How many blocks, from the first, must be run: up to the last whose passes want statistics."""
    wanting = [tensor.layer for tensor in plan.tensors if _wants_statistics(tensor)]
    return max((plan.layers if layer is None else layer + 1 for layer in wanting), default=0)


def _load_streams(run: RunDirectory, layer: int, device: str) -> list[torch.Tensor]:
    """Hidden states as they entered ``layer``, in torch's own memory."""
    import torch

    arrays = run.load_stream(layer)
    return [torch.from_numpy(arrays[str(i)]).clone().to(device) for i in range(len(arrays))]


def _round_walked_block(work: Work, run: RunDirectory, walk: Walk, layer: int, streams: list[torch.Tensor]) -> None:
    """One block: statistics on quantized inputs, round, forward with the rounded weights, write."""
    import torch

    prefix = work.family.block(layer) + "."
    planned = [tensor for tensor in work.plan.tensors if tensor.layer == layer]
    wanted = [t.module.removeprefix(prefix) for t in planned if _wants_statistics(t)]
    block = walk.block(layer)
    found = walk.collect(block, layer, streams, wanted) if wanted else {}
    stats = {prefix + local: value for local, value in found.items()}

    def use(tensor: PlannedTensor, rounded: NDArray[np.float32]) -> None:
        with torch.no_grad():
            weight = block.get_submodule(tensor.module.removeprefix(prefix)).weight
            weight.copy_(torch.from_numpy(rounded))  # type: ignore[operator]

    tensors, facts = _round_all(work, planned, stats, use)
    walk.forward(block, layer, streams)
    walk.release(block)
    run.write_shard(shard_name(layer, work.plan.layers), tensors, facts)


def _write_rest(work: Work, run: RunDirectory, walk: Walk | None, streams: list[torch.Tensor]) -> None:
    """Everything outside the blocks: embedding, final norm, head, and tensors no family file names."""
    planned = [tensor for tensor in work.plan.tensors if tensor.layer is None]
    wanting = [tensor.module for tensor in planned if _wants_statistics(tensor)]
    stats = {module: walk.collect_head(streams) for module in wanting} if walk is not None else {}
    run.write_shard(shard_name(work.plan.layers, work.plan.layers), *_round_all(work, planned, stats))


def _round_all(
    work: Work,
    planned: list[PlannedTensor],
    stats: Mapping[str, LayerStats],
    use: Callable[[PlannedTensor, NDArray[np.float32]], None] | None = None,
) -> tuple[dict[str, RawTensor], dict[str, Any]]:
    """Parts for a shard and facts of these tensors; ``use`` gets each rounded weight, dequantized."""
    tensors: dict[str, RawTensor] = {}
    facts: dict[str, Any] = {}
    for tensor in planned:
        if tensor.spec is None:
            tensors[tensor.name] = work.checkpoint.raw(tensor.name)
            continue
        encoded, rounded, facts[tensor.name] = _round(work, tensor, stats.get(tensor.module))
        tensors.update(encoded)
        if use is not None:
            use(tensor, rounded.dequantize())
    return tensors, facts


def _wants_statistics(tensor: PlannedTensor) -> bool:
    """Whether any of its passes declares a need."""
    from compressor.passes import base

    return any(base.load(call.name).NEEDS for call in tensor.passes)


def _round(
    work: Work, tensor: PlannedTensor, stats: LayerStats | None
) -> tuple[dict[str, RawTensor], QTensor, dict[str, Any]]:
    """Round one tensor: its encoded parts, its codes, and facts for the report."""
    from compressor.export import compressed_tensors
    from compressor.passes import base

    assert tensor.spec is not None
    weight = work.checkpoint.read(tensor.name)
    (call,) = tensor.passes
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
