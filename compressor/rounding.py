"""Block by block: statistics, rounding passes, encoded shards; everything outside the blocks last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compressor.arch.base import Family
from compressor.checkpoint.base import Checkpoint
from compressor.checkpoint.writer import RunDirectory
from compressor.core.plan import Plan, PlannedTensor
from compressor.core.report import Progress
from compressor.core.tensors import RawTensor
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
    """Walk the blocks that are not written yet, then write everything outside the blocks."""
    from compressor.calibration.walk import Walk

    walk = Walk(work.checkpoint, work.family, work.device)
    start = run.last_stream() or 0
    streams = _load_streams(run, start, work.device) if start else walk.embed(tokens.batches)
    for layer in range(start, walk.layers):
        progress("quantizing blocks", layer, walk.layers)
        _round_block(work, run, walk, layer, streams)
        run.save_stream(layer + 1, {str(i): s.cpu().numpy() for i, s in enumerate(streams)})
    progress("quantizing blocks", walk.layers, walk.layers)
    _write_rest(work, run, walk, streams)


def _load_streams(run: RunDirectory, layer: int, device: str) -> list[torch.Tensor]:
    """Hidden states as they entered ``layer``, in torch's own memory."""
    import torch

    arrays = run.load_stream(layer)
    return [torch.from_numpy(arrays[str(i)]).clone().to(device) for i in range(len(arrays))]


def _round_block(work: Work, run: RunDirectory, walk: Walk, layer: int, streams: list[torch.Tensor]) -> None:
    """One block: statistics on quantized inputs, round, forward with the rounded weights, write."""
    import torch

    planned = [tensor for tensor in work.plan.tensors if tensor.layer == layer]
    block = walk.block(layer)
    stats = walk.collect(block, layer, streams) if _wants_statistics(planned) else {}
    tensors: dict[str, RawTensor] = {}
    facts: dict[str, Any] = {}
    for tensor in planned:
        if tensor.spec is None:
            tensors[tensor.name] = work.checkpoint.raw(tensor.name)
            continue
        local = tensor.module.removeprefix(work.family.block(layer) + ".")
        encoded, rounded, facts[tensor.name] = _round(work, tensor, stats.get(local))
        tensors.update(encoded)
        with torch.no_grad():
            block.get_submodule(local).weight.copy_(torch.from_numpy(rounded))  # type: ignore[operator]
    walk.forward(block, layer, streams)
    walk.release(block)
    run.write_shard(shard_name(layer, work.plan.layers), tensors, facts)


def _write_rest(work: Work, run: RunDirectory, walk: Walk, streams: list[torch.Tensor]) -> None:
    """Everything outside the blocks: embedding, final norm, head, and tensors no family file names."""
    planned = [tensor for tensor in work.plan.tensors if tensor.layer is None]
    head_stats = walk.collect_head(streams) if _wants_statistics(planned) else None
    tensors: dict[str, RawTensor] = {}
    facts: dict[str, Any] = {}
    for tensor in planned:
        if tensor.spec is None:
            tensors[tensor.name] = work.checkpoint.raw(tensor.name)
        else:
            encoded, _, facts[tensor.name] = _round(work, tensor, head_stats)
            tensors.update(encoded)
    run.write_shard(shard_name(work.plan.layers, work.plan.layers), tensors, facts)


def _wants_statistics(planned: list[PlannedTensor]) -> bool:
    """Whether any pass of these tensors declares a need."""
    from compressor.passes import base

    return any(base.load(call.name).NEEDS for tensor in planned for call in tensor.passes)


def _round(
    work: Work, tensor: PlannedTensor, stats: LayerStats | None
) -> tuple[dict[str, RawTensor], Any, dict[str, Any]]:
    """Round one tensor: its encoded parts, the weight the next block sees, and facts for the report."""
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
        "degraded": list(rounded.degraded),
    }
    if rounded.degraded and work.strict:
        raise CompressorError(f"{tensor.name}: {rounded.degraded[0]}", hint="run without --strict to accept this")
    encoded = compressed_tensors.encode(tensor.module, rounded.tensor)
    return encoded, rounded.tensor.dequantize(), facts


def shard_name(index: int, layers: int) -> str:
    """File of block ``index``; index == layers is the file of everything outside the blocks."""
    return f"model-{index + 1:05d}-of-{layers + 1:05d}.safetensors"
