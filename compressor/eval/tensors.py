"""Is this file whole, and how far is each tensor from its source?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compressor.checkpoint.base import Checkpoint
from compressor.core.report import Progress, no_progress
from compressor.core.tensors import QTensor
from compressor.errors import CompressorError

# Relative error ||W - Q|| / ||W|| that round-to-nearest stays below even on heavy-tailed weights: above
# it the tensor is damaged, not coarse. Gaussian weights in groups of 128 give about half of each.
ERROR_LIMITS = {2: 1.0, 3: 0.6, 4: 0.3, 5: 0.15, 6: 0.08, 7: 0.04, 8: 0.02}


@dataclass(frozen=True)
class TensorCheck:
    """One tensor: its format, and its relative error ||W - Q|| / ||W|| to the source (None: not compared)."""

    name: str
    format: str
    relative_error: float | None = None


@dataclass
class Verification:
    """Checks in the target's order, and every problem as a sentence naming its tensor."""

    checks: list[TensorCheck] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def worst(self) -> TensorCheck | None:
        """The tensor furthest from its source."""
        compared = [check for check in self.checks if check.relative_error is not None]
        return max(compared, key=lambda check: check.relative_error or 0.0, default=None)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "ok": not self.problems,
            "problems": self.problems,
            "tensors": [
                {"name": c.name, "format": c.format, "relative_error": c.relative_error} for c in self.checks
            ],
        }


def verify_model(
    target: Checkpoint, against: Checkpoint | None = None, progress: Progress = no_progress
) -> Verification:
    """Re-read every tensor: legal codes, finite values; with a source, compare each with it.

    Kept tensors must equal the source (byte for byte where the dtype is the same); rounded ones must lie
    within what their bit width explains (ERROR_LIMITS).
    """
    found = Verification()
    if against is not None:
        found.problems += _name_problems(target, against)
    for done, name in enumerate(target.tensors, start=1):
        source = against if against is not None and name in against.tensors else None
        try:
            found.checks.append(_check(target, source, name, found.problems))
        except CompressorError as error:
            text = str(error).replace("\n", ";")
            found.problems.append(text if name in text else f"{name}: {text}")
        progress("verifying tensors", done, len(target.tensors))
    return found


def _name_problems(target: Checkpoint, against: Checkpoint) -> list[str]:
    """Tensors one side has and the other lacks; a tied head may be left out."""
    tied = {"lm_head.weight"} if target.config.get("tie_word_embeddings") else set()
    missing = against.tensors.keys() - target.tensors.keys() - tied
    extra = target.tensors.keys() - against.tensors.keys() - tied
    problems = [f"{name}: missing, the source has it" for name in sorted(missing)]
    return problems + [f"{name}: not in the source" for name in sorted(extra)]


def _check(target: Checkpoint, source: Checkpoint | None, name: str, problems: list[str]) -> TensorCheck:
    info = target.tensors[name]
    codes: QTensor | None = target.qtensor(name) if hasattr(target, "qtensor") else None
    label = codes.spec.label() if codes else (info.stored_as or info.dtype)
    if info.dtype not in ("F64", "F32", "F16", "BF16"):
        return TensorCheck(name, label)
    values = target.read(name)
    if source is None:
        return TensorCheck(name, label)
    if source.tensors[name].shape != info.shape:
        problems.append(f"{name}: shape {list(info.shape)}, the source has {list(source.tensors[name].shape)}")
        return TensorCheck(name, label)
    if codes is None and info.stored_as is None and info.dtype == source.tensors[name].dtype:
        same = np.array_equal(target.raw(name).data, source.raw(name).data)
        if not same:
            problems.append(f"{name}: kept as stored, but its bytes differ from the source's")
    error = relative_error(source.read(name), values)
    limit = ERROR_LIMITS[codes.spec.bits] if codes else ERROR_LIMITS[2]
    if codes is None and info.stored_as is None:
        limit = 0.01  # a float in another dtype
    if not error <= limit:
        problems.append(f"{name}: relative error {error:.3f}, {label} explains at most {limit}")
    return TensorCheck(name, label, error)


def relative_error(source: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> float:
    """||source - values|| / ||source|| (Frobenius), 0 for two zero tensors, in float64."""
    reference = float(np.linalg.norm(source.astype(np.float64)))
    distance = float(np.linalg.norm(source.astype(np.float64) - values))
    if reference == 0.0:
        return 0.0 if distance == 0.0 else float("inf")
    return distance / reference
