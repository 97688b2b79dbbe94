"""One tensor: its weight and statistics in, its codes, encoded parts and facts out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor.arch.base import Family
from compressor.checkpoint.base import Checkpoint
from compressor.core.plan import Plan, PlannedTensor
from compressor.core.profile import Profile
from compressor.core.tensors import QTensor, RawTensor
from compressor.errors import CompressorError

if TYPE_CHECKING:
    from compressor.calibration.stats import LayerStats


@dataclass(frozen=True)
class Work:
    """What rounding needs to know of a run."""

    checkpoint: Checkpoint
    family: Family
    plan: Plan
    device: str
    strict: bool
    profile: Profile = field(default_factory=Profile)


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
