"""``compress quantize``: a float checkpoint in, an artifact directory out."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compressor.cli.console import print_events, print_json, progress_bar, say
from compressor.cli.substitutions import parse_substitutions

if TYPE_CHECKING:
    from compressor.core.report import Report
    from compressor.pipeline import Job, Prepared


def quantize(
    model: Annotated[str, typer.Argument(help="Directory, .gguf file, hub id, or `demo`.")],
    recipe: Annotated[str, typer.Option(help="Recipe file, or the name of a shipped one.")],
    out: Annotated[Path, typer.Option(help="Directory to create.")],
    calibration: Annotated[
        str,
        typer.Option(
            help="Bundled set, `self`, mix (prose:40,self:20), .txt/.jsonl/.parquet file, saved dataset, or"
            " OWNER/NAME on the hub; #FIELD names a column."
        ),
    ] = "default",
    preset: Annotated[
        str, typer.Option(help="How much work to spend: fast, default, or best (trains scales at the end).")
    ] = "default",
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Calibration windows, else the preset's; the bundled text fills 128 of 512."),
    ] = None,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens per calibration window.")] = 512,
    select: Annotated[
        str, typer.Option(help="all, or informative: the windows that stand best for POOL times as many.")
    ] = "all",
    pool: Annotated[int, typer.Option(min=2, help="Candidates per window, for --select informative.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of every random choice.")] = 0,
    device: Annotated[str, typer.Option(help="torch device of the linear algebra.")] = "cpu",
    substitute: Annotated[
        list[str] | None, typer.Option(help="Run NEW where the recipe says OLD (OLD=NEW); repeatable.")
    ] = None,
    export: Annotated[str, typer.Option(help="Also export: gguf, compressed-tensors (comma separated).")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Every fallback is an error.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard an unfinished run of this OUT.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time went, by stage.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Quantize MODEL by a recipe into OUT, block by block; run again, it resumes where it stopped.

    Examples:

    \b
      compress quantize demo --recipe int4 --out out/demo-int4
      compress quantize ./Llama-3.2-1B --recipe int4 --preset best --out out/best
      compress quantize ./Llama-3.2-1B --recipe mixed --out out/mixed --export gguf
      compress quantize ./Llama-3-70B --recipe mixed_70b --out out/70b --dry-run \\
          --substitute kv_cache=fp16
    """
    from compressor.pipeline import Job

    job = Job(
        model=model,
        recipe=recipe,
        out=out,
        calibration=calibration,
        preset=preset,
        samples=samples,
        sequence_length=sequence_length,
        seed=seed,
        select=select,
        pool=pool,
        device=device,
        strict=strict,
        fresh=fresh,
        substitutions=parse_substitutions(substitute or []),
        exports=tuple(name.strip() for name in export.split(",") if name.strip()),
    )
    if dry_run:
        _dry_run(job, json_output)
        return
    run_job(job, json_output, profile=profile)


def _dry_run(job: Job, json_output: bool) -> None:
    """Everything a run checks before work, then the plan."""
    from compressor.cli.plan import show_plan
    from compressor.pipeline import check_runnable, prepare

    ready = prepare(job)
    check_runnable(ready)
    show_plan(ready.plan, json_output=json_output)


def run_job(job: Job, json_output: bool, quiet: bool = False, profile: bool = False) -> dict[str, Any]:
    """Run a job and its exports with progress, print the summary, return it."""
    from compressor.core.profile import Profile
    from compressor.pipeline import export_artifact, export_path
    from compressor.pipeline import quantize as run

    started, timed = time.monotonic(), Profile()
    with progress_bar() as progress:
        try:
            ready, report = run(job, progress, timed)
        except KeyboardInterrupt:
            say("interrupted: finished blocks are kept, the same command goes on from there")
            raise
        exported = {}
        for name in job.exports:
            target = export_path(job.out, name)
            facts, export_report = export_artifact(str(job.out), name, target, strict=job.strict, progress=progress)
            report.events += export_report.events
            exported[name] = {"path": str(target), **facts}
    summary = _summary(job, ready, report, exported, time.monotonic() - started)
    if profile:
        summary["profile"] = timed.shares(time.monotonic() - started, time.process_time())
    if json_output:
        print_json(summary)
    else:
        print_events(report)
        if profile:
            _print_profile(summary["profile"])
        if not quiet:
            _print_summary(summary)
    return summary


def _summary(job: Job, ready: Prepared, report: Report, exported: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {
        "out": str(job.out),
        "tensors_quantized": len(ready.plan.quantized()),
        "bytes": ready.plan.nbytes,
        "source_bytes": ready.plan.source_nbytes,
        "bits_per_weight": round(ready.plan.bits_per_weight, 4),
        "seconds": round(seconds, 2),
        "peak_rss_bytes": peak_rss_bytes(),
        "predicted_peak_bytes": ready.plan.peak_ram_bytes,
        "events": [{"message": e.message, "tensor": e.tensor, "degraded": e.degraded} for e in report.events],
        "exports": exported,
    }


def peak_rss_bytes() -> int:
    """Peak resident memory of this process so far.

    From /proc where there is one: getrusage's figure survives an exec, so that a child of a large process
    would report its parent's.
    """
    status = Path("/proc/self/status")
    if status.exists() and (line := re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(), re.MULTILINE)):
        return int(line[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _print_profile(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(f"{row['share']:7.1%}  {row['wall_s']:8.1f} s  {row['cpu_s']:8.1f} CPU s  {row['stage']}")


def _print_summary(summary: dict[str, Any]) -> None:
    size, source = summary["bytes"] / 1e6, summary["source_bytes"] / 1e6
    print(
        f"{summary['out']}: {summary['tensors_quantized']} tensors quantized, {size:.1f} of {source:.1f} MB"
        f" ({summary['bits_per_weight']:.2f} bits per weight), {summary['seconds']:.0f} s,"
        f" peak memory {summary['peak_rss_bytes'] / 1e6:.0f} MB"
    )
    for name, facts in summary["exports"].items():
        print(f"{facts['path']}: {name}, read back and proved equal")
