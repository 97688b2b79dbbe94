"""``compress inspect``: what is in this model or file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from compressor.cli.console import out, print_json, printable, say

if TYPE_CHECKING:
    from compressor.eval.contents import Contents


def inspect(
    path: Annotated[str, typer.Argument(help="HF directory, artifact, .safetensors or .gguf file, or `demo`.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Show formats, shapes, bits per weight, metadata, tokenizer. Reads headers; hostile files are refused.

    Examples:

    \b
      compress inspect demo
      compress inspect out/int4 --tensors
      compress inspect model.gguf --json
    """
    from compressor.eval.contents import read_contents, totals

    found = read_contents(path)
    if json_output:
        listed = [{"name": t.name, "format": t.format, "shape": t.shape, "bytes": t.nbytes} for t in found.tensors]
        facts = {"path": found.path, "kind": found.kind, **totals(found.tensors)}
        details = {"metadata": found.metadata, "tokenizer": found.tokenizer, "files": found.files}
        rest = {"notes": found.notes, "formats": found.formats(), "list": listed if tensors else None}
        print_json({**facts, **details, **rest})
        return
    _print(found, tensors)


def _print(found: Contents, tensors: bool) -> None:
    from compressor.eval.contents import totals

    for note in found.notes:
        say(f"note: {note}")
    print(f"{found.path}: {found.kind}")
    for title, facts in (("metadata", found.metadata), ("tokenizer", found.tokenizer)):
        if facts:
            print(f"{title}:")
        for key, value in facts.items():
            print(f"  {printable(key)}: {printable(str(value))}")
    if found.files:
        print(f"files: {printable(', '.join(found.files))}")
    _print_tables(found, tensors)
    whole = totals(found.tensors)
    print(
        f"{whole['tensors']} tensors, {whole['weights']:,} weights, {whole['bytes']:,} bytes,"
        f" {whole['bits_per_weight']:.3f} bits per weight"
    )


def _print_tables(found: Contents, tensors: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("format", "tensors", "bytes", "bits/weight", box=None, pad_edge=False)
    for name, group in found.formats().items():
        figures = (str(group["tensors"]), f"{group['bytes']:,}", f"{group['bits_per_weight']:.3f}")
        table.add_row(Text(printable(name)), *figures)
    console = out()
    console.print(table)
    if not tensors:
        return
    listing = Table("tensor", "format", "shape", "bytes", box=None, pad_edge=False)
    for tensor in found.tensors:
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        listing.add_row(Text(printable(tensor.name)), Text(printable(tensor.format)), shape, f"{tensor.nbytes:,}")
    console.print(listing)
