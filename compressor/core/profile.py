"""Where a run's time goes, by stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Profile:
    """Seconds by stage, wall and processor (all threads of this process); stages do not nest.

    Attributes:
        wall, cpu: Seconds by stage, in the order in which stages first began.
    """

    wall: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time spent inside counts for this stage."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.wall[name] = self.wall.get(name, 0.0) + time.perf_counter() - wall
            self.cpu[name] = self.cpu.get(name, 0.0) + time.process_time() - cpu

    def shares(self, wall: float, cpu: float) -> list[dict[str, Any]]:
        """JSON-ready rows ``stage, wall_s, cpu_s, share`` (of wall); what no stage covers is ``other``.

        Args:
            wall, cpu: Seconds of the whole run.
        """
        rows = [(name, self.wall[name], self.cpu[name]) for name in self.wall]
        rows.append(("other", max(0.0, wall - sum(self.wall.values())), max(0.0, cpu - sum(self.cpu.values()))))
        return [
            {
                "stage": name,
                "wall_s": round(seconds, 2),
                "cpu_s": round(used, 2),
                "share": round(seconds / wall if wall else 0.0, 4),
            }
            for name, seconds, used in rows
        ]
