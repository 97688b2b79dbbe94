"""What was done to an artifact's weights before and after rounding, as its report tells it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.checkpoint.base import Checkpoint
from compressor.checkpoint.safetensors import REPORT
from compressor.core.plan import PassCall

_ROUNDS = 6


@dataclass(frozen=True)
class History:
    """Why a tensor may differ from its source by more than rounding.

    Attributes:
        transforms: Done to the whole model first.
        moved: By tensor name, ||W* - W|| / ||W|| of the weight that was rounded in place of W.
        rescaled: Tensors whose rows or columns were multiplied by scales.
        distilled: Scales and norms were trained afterwards.
    """

    transforms: tuple[PassCall, ...] = ()
    moved: Mapping[str, float] = field(default_factory=dict)
    rescaled: frozenset[str] = frozenset()
    distilled: bool = False


def history_of(target: Checkpoint) -> History:
    """The history in an artifact's report.json; an empty one for anything else."""
    path = Path(target.path) / REPORT
    try:
        report: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        facts, tensors = report.get("facts", {}), report.get("tensors", {})
        written = facts.get("recipe", {}).get("transforms", [])
        return History(
            tuple(PassCall(name, options) for item in written for name, options in item.items()),
            {name: float(f["moved"]) for name, f in tensors.items() if f.get("moved")},
            frozenset(name for name, f in tensors.items() if f.get("rescaled")),
            "distill_scales" in facts,
        )
    except (ValueError, AttributeError, TypeError, KeyError, OSError):
        return History()


def rescaled_like(source: NDArray[np.float32], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Source float32 [out, in] with rows and columns scaled to lie as near to values as can be.

    Alternating least squares; a tensor that is no rescaled source stays far from every such fit.
    """
    rows = np.ones((source.shape[0], 1), np.float32)
    columns = np.ones((1, source.shape[1]), np.float32)
    for _ in range(_ROUNDS):
        columns = _ratio(values, source * rows, axis=0)
        rows = _ratio(values, source * columns, axis=1)
    fitted: NDArray[np.float32] = source * rows * columns
    return fitted


def _ratio(values: NDArray[np.float32], basis: NDArray[np.float32], axis: int) -> NDArray[np.float32]:
    """Least squares scale of basis towards values along an axis; 1 where basis is zero."""
    cross = (values * basis).sum(axis=axis, keepdims=True)
    power = np.square(basis).sum(axis=axis, keepdims=True)
    scale: NDArray[np.float32] = np.divide(cross, power, out=np.ones_like(cross), where=power > 0)
    return scale
