"""``compress demo``: the whole way on the embedded model, ending in one table."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compressor.cli.console import print_json, say
from compressor.cli.quantize import peak_rss_bytes, run_job

if TYPE_CHECKING:
    pass


def demo(
    out_dir: Annotated[Path, typer.Option("--out", help="Directory to create.")] = Path("out/demo"),
    recipe: Annotated[str, typer.Option(help="Recipe file, or the name of a shipped one.")] = "demo",
    samples: Annotated[int, typer.Option(min=1, help="Calibration windows of 512 tokens.")] = 32,
    chunks: Annotated[int, typer.Option(min=1, help="Evaluation windows of 512 tokens.")] = 20,
    json_output: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Quantize, export, verify and score the embedded SmolLM2-135M-Instruct, then print one table.

    The text scored is this project's own held-out set; nothing of it is in the calibration sets.

    Examples:

    \b
      compress demo
      compress demo --out out/try --recipe int8 --chunks 4
    """
    from compressor.eval.tensors import verify_model
    from compressor.models import open_model
    from compressor.pipeline import Job

    started = time.monotonic()
    say("1/4 quantize: SmolLM2-135M-Instruct, GPTQ, calibrated on the bundled text")
    job = Job("demo", recipe, out_dir, samples=samples, exports=("gguf",))
    summary = run_job(job, json_output=False, quiet=json_output)
    quantized_seconds = time.monotonic() - started
    say("2/4 export: gguf written, every tensor read back")
    say("3/4 verify: codes re-read, errors against the source")
    verified = verify_model(open_model(str(out_dir)), open_model("demo"))
    say("4/4 evaluate: perplexity and divergence on held-out text")
    scores = _scores(out_dir, chunks)
    rows = _rows(summary, scores, quantized_seconds, out_dir)
    result = {
        "rows": rows,
        "worst_tensor": verified.worst_line(),
        "seconds": round(time.monotonic() - started, 1),
        "peak_rss_bytes": peak_rss_bytes(),
    }
    if json_output:
        print_json(result)
    else:
        _print_table(result)
