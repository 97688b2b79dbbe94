"""``compress inspect``: what is in this model or file."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from compressor.cli.console import out, print_json
from compressor.errors import CompressorError


@dataclass(frozen=True)
class Row:
    """One tensor as the file stores it."""

    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        """Number of values."""
        count = 1
        for size in self.shape:
            count *= size
        return count


def inspect(
    path: Annotated[str, typer.Argument(help="HF directory, artifact, .safetensors or .gguf file, or `demo`.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Show formats, shapes, bits per weight and metadata. Reads headers only; hostile files are refused.

    Examples:

    \b
      compress inspect demo
      compress inspect out/int4 --tensors
      compress inspect model.gguf --json
    """
    facts, rows = _facts(path)
    total, elements = sum(row.nbytes for row in rows), sum(row.elements for row in rows)
    facts |= {"tensors": len(rows), "weights": elements, "bytes": total}
    facts["bits_per_weight"] = round(8 * total / max(1, elements), 4)
    if json_output:
        listed = [{"name": r.name, "format": r.format, "shape": list(r.shape), "bytes": r.nbytes} for r in rows]
        print_json({**facts, "formats": _formats(rows), "list": listed if tensors else None})
        return
    _print(facts, rows, tensors)


def _facts(path: str) -> tuple[dict[str, Any], list[Row]]:
    """Metadata and tensors of whatever the path is."""
    source = Path(path)
    if source.suffix == ".safetensors" and source.is_file():
        return _safetensors_file(source)
    if path == "demo" or (source.is_file() and source.suffix == ".gguf"):
        return _gguf_file(path)
    return _model(path)


def _safetensors_file(path: Path) -> tuple[dict[str, Any], list[Row]]:
    from compressor.checkpoint.integrity import scan_safetensors

    rows = [Row(t.name, t.dtype, t.shape, t.end - t.start) for t in scan_safetensors(path).values()]
    return {"path": str(path), "kind": "safetensors file"}, rows


def _gguf_file(path: str) -> tuple[dict[str, Any], list[Row]]:
    from compressor.checkpoint.gguf_header import scan_gguf
    from compressor.checkpoint.reader import demo_file

    file = demo_file() if path == "demo" else Path(path)
    header = scan_gguf(file)
    rows = [Row(t.name, t.type_name, t.shape, t.nbytes) for t in header.tensors.values()]
    metadata = {name: _short(value) for name, value in header.fields.items()}
    return {"path": str(file), "kind": f"GGUF v{header.version}", "metadata": metadata}, rows


def _model(path: str) -> tuple[dict[str, Any], list[Row]]:
    from compressor.models import open_model

    model = open_model(path)
    facts: dict[str, Any] = {"path": path, "kind": "Hugging Face directory"}
    stored = getattr(model, "source", model)
    section = getattr(model, "quantization_config", None)
    if section is not None:
        facts["kind"] = f"{section['quant_method']} ({section.get('format')})"
    keys = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    more = ("intermediate_size", "vocab_size", "max_position_embeddings", "tie_word_embeddings")
    facts["metadata"] = {key: model.config[key] for key in (*keys, *more) if key in model.config}
    facts["files"] = sorted(model.side_files())
    rows = []
    for name, info in model.tensors.items():
        parts = model.stored_names(name) if hasattr(model, "stored_names") else [name]
        nbytes = sum(stored.tensors[part].nbytes for part in parts)
        rows.append(Row(name, info.stored_as or info.dtype, info.shape, nbytes))
    return facts, rows


def _short(value: Any) -> Any:
    """A metadata value fit for a screen."""
    if isinstance(value, list | tuple):
        return f"[{len(value)} items]"
    if isinstance(value, str) and len(value) > 80:
        return value[:77] + "..."
    if isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _formats(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Count, bytes and bits per weight by format."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.format].append(row)
    found = {}
    for name, group in groups.items():
        nbytes, elements = sum(r.nbytes for r in group), sum(r.elements for r in group)
        bits = round(8 * nbytes / max(1, elements), 4)
        found[name] = {"tensors": len(group), "bytes": nbytes, "bits_per_weight": bits}
    return found


def _print(facts: dict[str, Any], rows: list[Row], tensors: bool) -> None:
    from rich.table import Table

    if not rows:
        raise CompressorError(f"{facts['path']}: holds no tensors")
    print(f"{facts['path']}: {facts['kind']}")
    for key, value in facts.get("metadata", {}).items():
        print(f"  {key}: {value}")
    if facts.get("files"):
        print(f"  files: {', '.join(facts['files'])}")
    table = Table("format", "tensors", "bytes", "bits/weight", box=None, pad_edge=False)
    for name, group in _formats(rows).items():
        table.add_row(name, str(group["tensors"]), f"{group['bytes']:,}", f"{group['bits_per_weight']:.3f}")
    console = out()
    console.print(table)
    if tensors:
        listing = Table("tensor", "format", "shape", "bytes", box=None, pad_edge=False)
        for row in rows:
            listing.add_row(row.name, row.format, str(list(row.shape)), f"{row.nbytes:,}")
        console.print(listing)
    print(
        f"{facts['tensors']} tensors, {facts['weights']:,} weights, {facts['bytes']:,} bytes,"
        f" {facts['bits_per_weight']:.3f} bits per weight"
    )
