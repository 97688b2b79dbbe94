"""``compress verify``: is this model whole, and true to its source?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compressor.cli.console import out, print_json, printable, progress_bar, say
from compressor.errors import CompressorError, GateFailed, Problems

if TYPE_CHECKING:
    from compressor.eval.tensors import Verification


def verify(
    path: Annotated[str, typer.Argument(help="Artifact, HF directory or .gguf file.")],
    against: Annotated[str | None, typer.Option(help="The original model: compare every tensor.")] = None,
    worst: Annotated[int, typer.Option(min=0, help="Show the N tensors furthest from the source.")] = 10,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Scan every file, re-read every code and scale, compare with the source; exit 1 if damaged.

    Without --against, names and shapes are held against the model's family; with it, kept tensors must be
    the source's and rounded ones within what their format explains. An artifact's files are also held
    against the checksums its manifest recorded.

    Examples:

    \b
      compress verify out/int4
      compress verify out/int4 --against demo --worst 5
      compress verify model.gguf --against ./original --json
    """
    found = _verify(path, against)
    if json_output:
        print_json({"path": path, "against": against, **found.to_json()})
    else:
        _print(path, found, worst)
    if found.problems:
        more = f" (and {len(found.problems) - 1} more)" if len(found.problems) > 1 else ""
        raise GateFailed(f"{path}: verification failed{more}", got=found.problems[0])


def _verify(path: str, against: str | None) -> Verification:
    """Files first: nothing reads weights from a file whose header or checksum is wrong."""
    from compressor.eval.checksums import check_files
    from compressor.eval.tensors import Verification, verify_model
    from compressor.models import open_model

    source = open_model(against) if against else None
    if broken := check_files(Path(path)):
        return Verification(problems=broken)
    try:
        target = open_model(path, exact=True)
    except CompressorError as error:
        if not Path(path).exists() and path != "demo":
            raise
        found = error.problems if isinstance(error, Problems) else [error]
        return Verification(problems=[str(problem).replace("\n ", ";") for problem in found])
    with progress_bar() as progress:
        return verify_model(target, source, progress)


def _print(path: str, found: Verification, worst: int) -> None:
    for note in found.notes:
        say(f"note: {note}")
    for problem in found.problems:
        say(f"problem: {printable(problem)}")
    compared = found.worst_first()
    if compared and worst:
        from rich.table import Table
        from rich.text import Text

        table = Table("tensor", "format", "relative error", box=None, pad_edge=False)
        for check in compared[:worst]:
            table.add_row(Text(printable(check.name)), check.format, f"{check.relative_error:.5f}")
        out().print(table)
    verdict = "damaged" if found.problems else "whole"
    print(f"{path}: {len(found.checks)} tensors re-read, {len(compared)} compared with the source: {verdict}")
