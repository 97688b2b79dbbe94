"""``compress export``: repack an artifact (or write a float model) for an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compressor.cli.console import print_events, print_json, progress_bar


def export(
    source: Annotated[str, typer.Argument(help="Artifact directory (or a float model for gguf).")],
    format_name: Annotated[str, typer.Option("--format", help="gguf or compressed-tensors.")],
    out: Annotated[Path, typer.Option(help="File (gguf) or directory to create.")],
    pretokenizer: Annotated[
        str | None, typer.Option(help="gguf: tokenizer.ggml.pre, where it cannot be recognised.")
    ] = None,
    float_type: Annotated[
        str | None, typer.Option(help="gguf: F32, F16 or BF16 for tensors without codes.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Every fallback is an error.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
) -> None:
    """Write SOURCE in another format. Codes are repacked, never rounded again, and read back as proof.

    Examples:

    \b
      compress export out/demo-int4 --format gguf --out out/demo-int4.gguf
      compress export out/demo-int4 --format compressed-tensors --out out/for-vllm
    """
    from compressor.pipeline import export_artifact

    with progress_bar() as progress:
        facts, report = export_artifact(
            source,
            format_name,
            out,
            pretokenizer=pretokenizer,
            float_type=float_type,
            strict=strict,
            progress=progress,
        )
    if json_output:
        print_json({"out": str(out), "format": format_name, **facts, **report.to_json()})
        return
    print_events(report)
    print(f"{out}: {format_name}, read back and proved equal")
