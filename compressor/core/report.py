"""Facts of a run: per tensor, per run, and every degradation as a line of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from compressor.errors import CompressorError

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total); the command line draws it, everything else ignores it."""


def no_progress(stage: str, done: int, total: int) -> None:
    """The progress callback that shows nothing."""


@dataclass(frozen=True)
class Event:
    """One thing that did not go as asked (a fallback, a skip), or that the user should know."""

    message: str
    tensor: str | None = None
    degraded: bool = True


@dataclass
class Report:
    """What happened: ``tensors`` by name, ``facts`` of the run, ``events`` in order.

    With ``strict`` a degradation raises instead of being noted.
    """

    strict: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def degrade(self, message: str, tensor: str | None = None) -> None:
        """Note a fallback, skip or loss of quality.

        Raises:
            CompressorError: the run is strict.
        """
        if self.strict:
            where = f"{tensor}: " if tensor else ""
            raise CompressorError(f"{where}{message}", hint="run without --strict to accept this")
        self.events.append(Event(message, tensor))

    def note(self, message: str, tensor: str | None = None) -> None:
        """Note something the user should know that is no loss."""
        self.events.append(Event(message, tensor, degraded=False))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict, keys in a fixed order."""
        return {
            "facts": self.facts,
            "events": [asdict(event) for event in self.events],
            "tensors": self.tensors,
        }
