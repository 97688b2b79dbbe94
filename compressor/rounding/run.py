"""Block by block: statistics, rounding passes, encoded shards; everything outside the blocks last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from compressor.checkpoint.base import Checkpoint
from compressor.checkpoint.writer import RunDirectory
from compressor.core.plan import Plan, PlannedTensor
from compressor.core.report import Progress
from compressor.core.tensors import RawTensor
from compressor.kernels.floats import FLOAT_BYTES, all_finite
from compressor.rounding.streams import Streams, load_streams
from compressor.rounding.tensor import Work, needs, round_tensor, shard_name

if TYPE_CHECKING:
    from compressor.calibration.data import TokenSet
    from compressor.calibration.stats import LayerStats
    from compressor.calibration.walk import Walk


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
    from compressor.rounding.block import BlockRounding

    layers, walked = work.plan.layers, _blocks_to_walk(work.plan)
    start = run.last_stream() or 0
    walk = Walk(work.checkpoint, work.family, work.device, bf16=True) if walked else None
    streams = Streams([])
    if walk is not None:
        streams = load_streams(run, start, work.device) if start else _first_streams(work.plan, walk, tokens)
    for layer in range(start, layers):
        progress("quantizing blocks", layer, layers)
        if walk is not None and layer < walked:
            BlockRounding(work, walk, layer, streams).write(run)
            with work.profile.stage("writing"):
                run.save_stream(layer + 1, streams.arrays())
        elif not run.has_shard(shard_name(layer, layers)):
            planned = [tensor for tensor in work.plan.tensors if tensor.layer == layer]
            with work.profile.stage("rounding and writing"):
                run.write_shard(shard_name(layer, layers), *_round_all(work, planned))
    progress("quantizing blocks", layers, layers)
    with work.profile.stage("embedding, head and norms"):
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
