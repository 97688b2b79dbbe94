"""The plan of a run: what happens to every tensor, decided from headers before any work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compressor.core.spec import Spec


@dataclass(frozen=True)
class PassCall:
    """One pass with its options, as the recipe spells them (defaults filled in)."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedTensor:
    """What will happen to one tensor.

    Attributes:
        name: Checkpoint name, e.g. ``model.layers.0.mlp.up_proj.weight``.
        module: Module path (name without ``.weight``/``.bias``).
        role: One of arch.base.ROLES.
        layer: Block number or None.
        shape, dtype: As the source presents it.
        source_nbytes: Its size in the source.
        spec: Its format, or None when it is kept as stored.
        passes: Passes in order; empty when kept.
        rule: Where that was decided, e.g. ``rule 2 (recipes/int4.yaml:14)``, or ``no rule``.
        nbytes: Its size in the artifact (codes, scales, zero points and shape record).
    """

    name: str
    module: str
    role: str
    layer: int | None
    shape: tuple[int, ...]
    dtype: str
    source_nbytes: int
    spec: Spec | None
    passes: tuple[PassCall, ...]
    rule: str
    nbytes: int

    @property
    def elements(self) -> int:
        """Number of weights."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bits_per_weight(self) -> float:
        """Artifact bits over elements, scales included."""
        return 8 * self.nbytes / max(1, self.elements)

    @property
    def format_label(self) -> str:
        """``int4 g128``, or the stored dtype when kept."""
        return self.spec.label() if self.spec else self.dtype.lower()


@dataclass(frozen=True)
class Plan:
    """Every tensor's fate and the run's totals. Drives dry run, run, resume and report alike.

    Attributes:
        model: Label of the source.
        family: Name of the arch file.
        tensors: In walk order (embedding, blocks, final norm, head).
        layers: Number of blocks.
        peak_ram_bytes: Predicted peak resident memory of ``quantize``.
        disk_bytes: Predicted disk need (artifact plus run state).
        peak_parts: The prediction's parts, by name.
        notes: Facts to show (fp16 keeps bf16 as stored, substitutions made ...).
    """

    model: str
    family: str
    tensors: tuple[PlannedTensor, ...]
    layers: int
    peak_ram_bytes: int
    disk_bytes: int
    notes: tuple[str, ...] = ()
    peak_parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the artifact."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def source_nbytes(self) -> int:
        """Bytes of all tensors in the source."""
        return sum(t.source_nbytes for t in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Bits over all weights of the model, scales included."""
        return 8 * self.nbytes / max(1, sum(t.elements for t in self.tensors))

    def quantized(self) -> tuple[PlannedTensor, ...]:
        """The tensors that get codes."""
        return tuple(t for t in self.tensors if t.spec is not None)
