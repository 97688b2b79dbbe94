"""A recipe once it is understood: ordered rules, and what it asks for that cannot run yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compressor.core.plan import PassCall
from compressor.errors import CompressorError
from compressor.recipe.written import Layers

LATER = {"kv_cache": "KV-cache calibration"}
"""What recipes may already say and no code does yet."""

INSTEAD = {"kv_cache": "fp16"}
"""What ``--substitute`` may put in its place."""


@dataclass(frozen=True)
class Rule:
    """One rule, resolved.

    Attributes:
        where: ``rule 2 (x.yaml:14)``.
        roles: Roles it applies to, or None for every quantizable one.
        modules: Globs or ``re:`` patterns over module paths, or None.
        layers: ``Layers``, a number, a list, ``"10-20"``, or None.
        format: Bits, group_size, symmetric, scale_dtype; None = kept as stored.
        passes: Passes in order; empty when kept.
        kept_as: The word that keeps it (``fp16``, ``keep`` ...), empty when it is quantized.
        short: It is a section of the short form: matching nothing is a note, not an error.
    """

    where: str
    roles: tuple[str, ...] | None
    modules: tuple[str, ...] | None
    layers: Layers | int | str | list[int] | None
    format: Mapping[str, Any] | None
    passes: tuple[PassCall, ...]
    kept_as: str = ""
    short: bool = False

    def canonical(self) -> dict[str, Any]:
        """JSON-ready, without file names or line numbers."""
        layers = self.layers.model_dump(exclude_none=True) if isinstance(self.layers, Layers) else self.layers
        return {
            "role": list(self.roles) if self.roles else None,
            "modules": list(self.modules) if self.modules else None,
            "layers": layers,
            "format": self.format,
            "passes": [{call.name: dict(call.options)} for call in self.passes],
        }


@dataclass(frozen=True)
class Recipe:
    """Ordered rules, first match wins.

    Attributes:
        name: Its name, or its file's.
        source: Its file.
        rules: In order.
        missing: (name, file:line) of everything it asks for that is not available yet.
        notes: Facts to show (substitutions made).
        transforms: What is done to the whole model before any rule, in order.
        finish: What is done to the rounded artifact as a whole, in order.
    """

    name: str
    source: str
    rules: tuple[Rule, ...]
    missing: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    transforms: tuple[PassCall, ...] = ()
    finish: tuple[PassCall, ...] = ()

    def canonical(self) -> dict[str, Any]:
        """What the bytes of an artifact depend on."""
        transforms = [{call.name: dict(call.options)} for call in self.transforms]
        finish = [{call.name: dict(call.options)} for call in self.finish]
        found = {"transforms": transforms} if transforms else {}
        found |= {"finish": finish} if finish else {}
        return {**found, "rules": [rule.canonical() for rule in self.rules]}


def unavailable(recipe: Recipe) -> list[CompressorError]:
    """What the recipe asks for that cannot run yet; empty when it can run."""
    return [
        CompressorError(
            f"{where}: {LATER[name]} is not available yet",
            hint=f"--substitute {name}={INSTEAD[name]} runs without it",
        )
        for name, where in recipe.missing
    ]
