"""Is this model whole, and how far is each tensor from its source?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.arch import find_family
from compressor.checkpoint.base import Checkpoint, TensorInfo
from compressor.checkpoint.reader import check_against_family
from compressor.core.report import Progress, no_progress
from compressor.core.spec import CHANNEL, TENSOR, Spec
from compressor.core.tensors import QTensor
from compressor.errors import CompressorError, Problems
from compressor.eval.history import History, history_of, rescaled_like
from compressor.kernels.floats import FLOAT_BYTES
from compressor.transforms import base as transforms

SLACK = 5.0
"""How many times the error of rounding to nearest is still healthy: GPTQ lowers the error of the outputs
at the price of the weights' own, by up to 3.7 times on ill-conditioned inputs and weights with outliers."""

CEILING = 1.2
"""No healthy tensor is further from its source; one of zeros has 1.0, an unrelated one about 1.4."""

FLOAT_LIMIT = 0.01
"""A float tensor in another float dtype."""

FP8_ERROR = 0.0236
"""Relative error of E4M3, root mean square, mantissas evenly spread: (1/8) / sqrt(12) over sqrt(7/3)."""

DISTILLED = 0.1
"""Trained scales may stand this far from those that were rounded with."""

_BLOCK = 1 << 22
"""Elements compared at once: bounds the float64 temporaries of a large embedding."""


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
    notes: list[str] = field(default_factory=list)

    def worst_first(self) -> list[TensorCheck]:
        """The tensors that were compared, furthest from their source first."""
        compared = [check for check in self.checks if check.relative_error is not None]
        return sorted(compared, key=lambda check: -(check.relative_error or 0.0))

    def worst(self) -> TensorCheck | None:
        """The tensor furthest from its source."""
        return next(iter(self.worst_first()), None)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "ok": not self.problems,
            "problems": self.problems,
            "notes": self.notes,
            "tensors": [
                {"name": c.name, "format": c.format, "relative_error": c.relative_error} for c in self.checks
            ],
        }


def verify_model(
    target: Checkpoint, against: Checkpoint | None = None, progress: Progress = no_progress
) -> Verification:
    """Re-read every tensor: legal codes, finite values; with a source, compare each with it.

    Kept tensors must equal the source (byte for byte where the dtype is the same); rounded ones must lie
    within what their format explains (``error_limit``). Without a source, names and shapes are held
    against the model's family.
    """
    found, history = Verification(notes=list(target.notes)), history_of(target)
    if against is not None and history.transforms:
        against = transforms.apply(history.transforms, against, find_family(against.config, against.label))
    found.problems += _family_problems(target, found.notes) if against is None else _name_problems(target, against)
    for done, name in enumerate(target.tensors, start=1):
        try:
            found.checks.append(_check(target, against, name, found.problems, history))
        except CompressorError as error:
            text = str(error).replace("\n ", ";")
            found.problems.append(text if name.removesuffix(".weight") in text else f"{name}: {text}")
        progress("verifying tensors", done, len(target.tensors))
    return found


def _family_problems(target: Checkpoint, notes: list[str]) -> list[str]:
    """Tensors that are missing or misshapen; a model of a family we do not know is only noted."""
    try:
        family = find_family(target.config, target.label)
    except CompressorError:
        notes.append(f"model_type {target.config.get('model_type')!r} is not known: names and shapes not checked")
        return []
    try:
        check_against_family(target, family)
    except Problems as error:
        return [str(problem).replace("\n ", ";") for problem in error.problems]
    return []


def _name_problems(target: Checkpoint, against: Checkpoint) -> list[str]:
    """Tensors one side has and the other lacks; a tied head may be left out."""
    tied = {"lm_head.weight"} if target.config.get("tie_word_embeddings") else set()
    missing = against.tensors.keys() - target.tensors.keys() - tied
    extra = target.tensors.keys() - against.tensors.keys() - tied
    problems = [f"{name}: missing, the source has it" for name in sorted(missing)]
    return problems + [f"{name}: not in the source" for name in sorted(extra)]


def _check(
    target: Checkpoint, against: Checkpoint | None, name: str, problems: list[str], history: History
) -> TensorCheck:
    """Read one tensor and compare it; what is wrong with it goes to problems."""
    info = target.tensors[name]
    codes: QTensor | None = target.qtensor(name) if hasattr(target, "qtensor") else None
    label = codes.spec.label() if codes else (info.stored_as or info.dtype)
    if info.dtype not in FLOAT_BYTES:
        return TensorCheck(name, label)
    values = target.read(name)
    if against is None or name not in against.tensors:
        return TensorCheck(name, label)
    source = against.tensors[name]
    if source.shape != info.shape:
        problems.append(f"{name}: shape {list(info.shape)}, the source has {list(source.shape)}")
        return TensorCheck(name, label)
    in_gguf = info.file.endswith(".gguf") and len(info.shape) == 2
    is_norm = len(info.shape) == 1 and (name in history.rescaled or history.distilled)
    if codes is None and is_norm:
        return TensorCheck(name, f"{label} rescaled")
    if codes is None and not in_gguf and _is_kept(info, source.dtype):
        if np.array_equal(target.raw(name).data, against.raw(name).data):
            return TensorCheck(name, label, 0.0)
        problems.append(f"{name}: kept as stored, but its bytes differ from the source's")
    original = against.read(name)
    if name in history.rescaled and original.ndim == 2:
        original, label = rescaled_like(original, values), f"{label} rescaled"
    error, limit = relative_error(original, values), error_limit(original, codes, info.stored_as, in_gguf)
    limit += 2 * history.moved.get(name, 0.0) + (DISTILLED if history.distilled and codes is not None else 0.0)
    if not error <= limit:
        problems.append(f"{name}: relative error {error:.3f}, {label} explains at most {limit:.3f}")
    return TensorCheck(name, label, error)


def _is_kept(info: TensorInfo, source_dtype: str) -> bool:
    """Whether the bytes must be the source's: the same dtype, stored without rounding."""
    return info.dtype == source_dtype and info.stored_as in (None, "F32", "F64")


def error_limit(
    source: NDArray[np.float32], codes: QTensor | None, stored_as: str | None, in_gguf: bool = False
) -> float:
    """The largest relative error that is explained by a tensor's format.

    Of codes, SLACK times that of rounding the source to nearest. A GGUF's block type does not tell the bits
    and groups its codes came from (int2 may lie in Q4_0, and in F16 where no block fits): only CEILING
    binds its matrices; Q8_0 is held to 4 bits per channel.
    """
    if codes is not None:
        return min(CEILING, SLACK * rounding_error(source, codes.spec))
    if source.ndim != 2 or (not in_gguf and (stored_as is None or stored_as in FLOAT_BYTES)):
        return FLOAT_LIMIT
    return min(CEILING, SLACK * rounding_error(source, Spec(4, CHANNEL))) if stored_as == "Q8_0" else CEILING


def rounding_error(source: NDArray[np.float32], spec: Spec) -> float:
    """Expected relative error of rounding float32 [out, in] to nearest: step / sqrt(12) per weight.

    A group's step is its largest magnitude over spec.qmax; at most 1.0, the error of all zeros. FP8's steps
    follow the weights, so that their error is FP8_ERROR whatever the scales (subnormals weigh too little).
    """
    if spec.kind == "float":
        return FP8_ERROR
    width = spec.columns_per_scale(source.shape[1])
    square, peaks = 0.0, []
    for rows in _row_blocks(source):
        square += float(np.square(rows, dtype=np.float64).sum())
        peaks.append(np.abs(rows).reshape(-1, width).max(axis=1).astype(np.float64))
    peak = np.concatenate(peaks)
    if spec.group_size == TENSOR:
        peak = np.full_like(peak, peak.max())
    noise = float(np.square(peak / spec.qmax).sum()) * width / 12
    return min(1.0, (noise / square) ** 0.5) if square else 1.0


def relative_error(source: NDArray[np.float32], values: NDArray[np.float32]) -> float:
    """||source - values|| / ||source|| (Frobenius) in float64; 0 for two zero tensors."""
    distance, reference = 0.0, 0.0
    for one, other in zip(_row_blocks(source), _row_blocks(values), strict=True):
        exact = one.astype(np.float64)
        reference += float(np.square(exact).sum())
        distance += float(np.square(exact - other).sum())
    if reference == 0.0:
        return 0.0 if distance == 0.0 else float("inf")
    return float((distance / reference) ** 0.5)


def _row_blocks(array: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """A tensor in runs of whole rows, about _BLOCK elements each."""
    rows = array.reshape(array.shape[0], -1) if array.ndim > 1 else array.reshape(1, -1)
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]
