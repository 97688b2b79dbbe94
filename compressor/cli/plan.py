"""``compress plan``: what a recipe would do to a model, and what it would cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compressor.arch.base import ROLES
from compressor.cli.console import out, print_json, printable
from compressor.cli.substitutions import parse_substitutions

if TYPE_CHECKING:
    from compressor.core.plan import Plan, PlannedTensor


def plan(
    model: Annotated[str, typer.Argument(help="Directory, .gguf, hub id, `demo`, or a bare config.json.")],
    recipe: Annotated[str, typer.Option(help="Recipe file, or the name of a shipped one.")],
    substitute: Annotated[
        list[str] | None, typer.Option(help="Plan NEW where the recipe says OLD (OLD=NEW); repeatable.")
    ] = None,
    preset: Annotated[str, typer.Option(help="fast, default or best, as for quantize.")] = "default",
    samples: Annotated[
        int | None, typer.Option(min=1, help="Calibration windows (for the memory figure); else the preset's.")
    ] = None,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 512,
    tensors: Annotated[
        bool, typer.Option("--tensors/--summary", help="List every tensor, or one line per role, format and rule.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show tensor, role, rule, format and bytes; totals, peak memory, disk. Reads headers only.

    Examples:

    \b
      compress plan demo --recipe int4
      compress plan Llama-3-70B/config.json --recipe mixed_70b
      compress plan ./Llama-3.2-1B --recipe my.yaml --tensors
      compress plan Llama-3-70B/config.json --recipe mixed_70b --substitute awq=gptq --json
    """
    from compressor.pipeline import Job, plan_model

    found = plan_model(
        Job(
            model,
            recipe,
            Path(),
            preset=preset,
            samples=samples,
            sequence_length=sequence_length,
            substitutions=parse_substitutions(substitute or []),
        )
    )
    show_plan(found, json_output=json_output, tensors=tensors)


def show_plan(plan: Plan, *, json_output: bool, tensors: bool = False) -> None:
    """Print a plan as a table or as JSON."""
    if json_output:
        print_json(plan_json(plan))
        return
    console = out()
    console.print(_table(plan, tensors))
    for line in _totals(plan):
        console.print(printable(line), markup=False, soft_wrap=True)


def _totals(plan: Plan) -> Iterator[str]:
    ratio = plan.source_nbytes / max(1, plan.nbytes)
    yield (
        f"{plan.model}: {plan.nbytes / 1e9:.3f} GB of {plan.source_nbytes / 1e9:.3f} GB (1/{ratio:.2f}),"
        f" {plan.bits_per_weight:.3f} bits per weight over all tensors"
    )
    yield f"predicted peak memory of quantize: {plan.peak_ram_bytes / 1e9:.2f} GB"
    for name, size in plan.peak_parts.items():
        yield f"  {size / 1e9:8.3f} GB  {name}"
    yield f"disk: {plan.disk_bytes / 1e9:.2f} GB"
    for note in plan.notes:
        yield f"note: {note}"


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan, JSON-ready."""
    return {
        "model": plan.model,
        "family": plan.family,
        "bytes": plan.nbytes,
        "source_bytes": plan.source_nbytes,
        "bits_per_weight": plan.bits_per_weight,
        "peak_ram_bytes": plan.peak_ram_bytes,
        "peak_parts": dict(plan.peak_parts),
        "disk_bytes": plan.disk_bytes,
        "notes": list(plan.notes),
        "tensors": [
            {
                "name": t.name,
                "role": t.role,
                "rule": t.rule,
                "format": t.format_label,
                "passes": [call.name for call in t.passes],
                "shape": list(t.shape),
                "bytes": t.nbytes,
                "bits_per_weight": t.bits_per_weight,
            }
            for t in plan.tensors
        ],
    }


def _table(plan: Plan, tensors: bool) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in ("tensors", "role", "format", "passes", "rule"):
        table.add_column(column, overflow="fold")
    for column in ("weights", "bytes", "bits/weight"):
        table.add_column(column, justify="right", no_wrap=True)
    for label, group in _rows(plan, tensors):
        first, nbytes = group[0], sum(t.nbytes for t in group)
        elements = sum(t.elements for t in group)
        passes = "+".join(call.name for call in first.passes) or "-"
        figures = (f"{elements:,}", f"{nbytes:,}", f"{8 * nbytes / max(1, elements):.3f}")
        cells = (label, first.role, first.format_label, passes, first.rule, *figures)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _rows(plan: Plan, tensors: bool) -> list[tuple[str, list[PlannedTensor]]]:
    """One row per tensor, or per (role, format, passes, rule)."""
    if tensors:
        return [(t.name, [t]) for t in plan.tensors]
    groups: dict[tuple[Any, ...], list[PlannedTensor]] = defaultdict(list)
    for t in plan.tensors:
        groups[(t.role, t.format_label, tuple(call.name for call in t.passes), t.rule)].append(t)
    ordered = sorted(groups.values(), key=lambda group: ROLES.index(group[0].role))
    return [(str(len(group)), group) for group in ordered]
