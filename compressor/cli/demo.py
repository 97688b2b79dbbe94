"""``compress demo``: the whole way on the embedded model, ending in one table."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from compressor.cli.console import out, print_json, progress_bar, say
from compressor.cli.quantize import peak_rss_bytes, run_job
from compressor.errors import GateFailed


def demo(
    out_dir: Annotated[Path, typer.Option("--out", help="Directory to create.")] = Path("out/demo"),
    recipe: Annotated[str, typer.Option(help="Recipe file, or the name of a shipped one.")] = "demo",
    samples: Annotated[int, typer.Option(min=1, help="Calibration windows of 512 tokens.")] = 32,
    chunks: Annotated[int, typer.Option(min=1, help="Evaluation windows of 512 tokens.")] = 20,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard what an earlier demo left in OUT.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Quantize, export, verify and score the embedded SmolLM2-135M-Instruct; ends with one table.

    The text scored is this project's own held-out set; nothing of it is in the calibration sets.

    Examples:

    \b
      compress demo
      compress demo --out out/try --recipe int8 --chunks 4
    """
    from compressor.pipeline import Job, export_path

    started = time.monotonic()
    say("1/4 quantize and 2/4 export: SmolLM2-135M-Instruct, calibrated on the bundled text")
    job = Job("demo", recipe, out_dir, samples=samples, fresh=fresh, exports=("gguf",))
    summary = run_job(job, json_output=False, quiet=True)
    say("3/4 verify: every code and scale re-read, every tensor against the source")
    worst = _verify(out_dir)
    say("4/4 evaluate: perplexity and divergence on held-out text")
    scores = _scores(out_dir, chunks)
    result = {
        "rows": _rows(summary, scores, export_path(out_dir, "gguf")),
        "evaluation": {key: scores[key] for key in ("protocol", "context", "chunks", "tokens", "seconds")},
        "worst_tensor": worst,
        "quantize_seconds": summary["seconds"],
        "seconds": round(time.monotonic() - started, 1),
        "peak_rss_bytes": peak_rss_bytes(),
    }
    if json_output:
        print_json(result)
    else:
        _print(result)


def _verify(artifact: Path) -> str:
    """The tensor furthest from its source, as a sentence.

    Raises:
        GateFailed: anything is damaged.
    """
    from compressor.eval.tensors import verify_model
    from compressor.models import open_model

    with progress_bar() as progress:
        found = verify_model(open_model(str(artifact)), open_model("demo"), progress)
    if found.problems:
        raise GateFailed(f"{artifact}: {found.problems[0]}")
    worst = found.worst()
    return f"{worst.name} ({worst.format}): relative error {worst.relative_error:.4f}" if worst else "none"


def _scores(artifact: Path, chunks: int) -> dict[str, Any]:
    from compressor.calibration.data import bundled_text, load_tokenizer
    from compressor.eval.score import evaluate
    from compressor.eval.windows import encode_text, make_windows
    from compressor.models import open_model

    model, reference = open_model(str(artifact)), open_model("demo")
    ids, bos = encode_text(load_tokenizer(reference), bundled_text("held_out"))
    windows = make_windows(ids, context=512, chunks=chunks, protocol="llama.cpp", bos=bos, label="held_out")
    with progress_bar() as progress:
        return evaluate(model, reference, windows, progress=progress)


def _rows(summary: dict[str, Any], scores: dict[str, Any], gguf_file: Path) -> list[dict[str, Any]]:
    """The table: original, artifact, GGUF."""
    quality = {
        "perplexity": scores["perplexity"],
        "kld": scores["kld"]["mean"],
        "kld_error": scores["kld"]["mean_error"],
        "top1": scores["top1"],
    }
    original = {"perplexity": scores["reference_perplexity"], "kld": 0.0, "kld_error": 0.0, "top1": 1.0}
    bits = summary["bits_per_weight"]
    weights = 8 * summary["bytes"] / bits
    gguf_bytes = gguf_file.stat().st_size
    return [
        {"model": "original (bf16)", "bytes": summary["source_bytes"], "bits_per_weight": 16.0, **original},
        {"model": "compressed-tensors", "bytes": summary["bytes"], "bits_per_weight": bits, **quality},
        {"model": "GGUF (same codes)", "bytes": gguf_bytes, "bits_per_weight": 8 * gguf_bytes / weights, **quality},
    ]


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title="SmolLM2-135M-Instruct", title_justify="left")
    for column in ("model", "MB", "bits/weight", "perplexity", "KLD", "top-1"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in result["rows"]:
        table.add_row(
            row["model"],
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['bits_per_weight']:.2f}",
            f"{row['perplexity']:.3f}",
            f"{row['kld']:.4f} ± {row['kld_error']:.4f}",
            f"{100 * row['top1']:.1f} %",
        )
    out().print(table)
    scored = result["evaluation"]
    print(
        f"scored: {scored['tokens']} tokens of held-out text ({scored['protocol']} protocol,"
        f" {scored['chunks']} windows of {scored['context']}). The GGUF carries the same codes, proved equal."
    )
    print(f"worst tensor: {result['worst_tensor']}")
    print(
        f"time: {result['quantize_seconds']:.0f} s quantize and export, {result['seconds']:.0f} s in all;"
        f" peak memory {result['peak_rss_bytes'] / 1e6:.0f} MB"
    )
