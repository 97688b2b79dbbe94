"""The console shared by all commands: results to stdout, progress and errors to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from compressor.core.report import Progress, Report, no_progress


def print_json(data: Any) -> None:
    """Pure JSON on stdout (no NaN, stable key order as given)."""
    sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")


def out() -> Any:
    """A rich Console on stdout."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 180, highlight=False)


def err() -> Any:
    """A rich Console on stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(message: str) -> None:
    """One plain line on stderr."""
    sys.stderr.write(message + "\n")


def printable(text: str) -> str:
    """A name or value from a file, safe for a terminal: control characters shown as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def print_events(report: Report) -> None:
    """Every degradation and note of a report, one line each on stderr."""
    for event in report.events:
        where = f"{event.tensor}: " if event.tensor else ""
        say(f"{'degraded' if event.degraded else 'note'}: {where}{event.message}")


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A Progress callback that draws bars with ETA on stderr; silent when that is no terminal."""
    if not sys.stderr.isatty():
        yield no_progress
        return
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
    )
    times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
    with progress.Progress(*columns, *times, console=err()) as bars:
        tasks: dict[str, Any] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield update
