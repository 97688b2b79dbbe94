"""``compress eval``: perplexity, and divergence from a reference."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from compressor import __version__
from compressor.cli.console import print_json, progress_bar, say
from compressor.errors import CompressorError, GateFailed


def evaluate(
    target: Annotated[str, typer.Argument(help="Model to score: directory, artifact, .gguf, or `demo`.")],
    text: Annotated[str, typer.Option(help="UTF-8 text file, or `held_out` (bundled).")],
    reference: Annotated[str | None, typer.Option(help="The original model: adds divergence from it.")] = None,
    context: Annotated[
        int | None, typer.Option(min=4, help="Tokens per window; 512, or 2048 with --protocol gptq.")
    ] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help="Score only the first N windows.")] = None,
    protocol: Annotated[str, typer.Option(help="llama.cpp (second half scored) or gptq (all).")] = "llama.cpp",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here (- for stdout).")] = None,
    device: Annotated[str, typer.Option(help="torch device.")] = "cpu",
    batch: Annotated[int, typer.Option(min=1, help="Windows per forward.")] = 4,
    max_kld: Annotated[float | None, typer.Option(help="Gate: fail (exit 1) when mean KLD is above.")] = None,
    max_ppl_increase: Annotated[
        float | None, typer.Option(help="Gate: fail when PPL/PPL(reference) - 1 is above (0.05 = 5 %).")
    ] = None,
) -> None:
    """Score TARGET by llama.cpp's perplexity protocol, and against a reference if one is given.

    Evaluation walks block by block as well: a model larger than memory can be scored.

    Examples:

    \b
      compress eval demo --text held_out
      compress eval out/int4 --reference demo --text wiki.test.raw --chunks 40 --json scores.json
      compress eval out/int4.gguf --reference demo --text held_out --max-kld 0.1
    """
    if reference is None and (max_kld is not None or max_ppl_increase is not None):
        raise CompressorError("--max-kld and --max-ppl-increase compare with a reference", hint="add --reference")
    if json_path is not None and str(json_path) != "-" and not json_path.absolute().parent.is_dir():
        raise CompressorError(f"--json {json_path}: its directory does not exist")
    result = _run(target, reference, text, context or _context(protocol), chunks, protocol, device, batch)
    if json_path is None:
        _print(result)
    elif str(json_path) == "-":
        print_json(result)
    else:
        json_path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
        _print(result)
    _gate(result, max_kld, max_ppl_increase)


def _context(protocol: str) -> int:
    return 2048 if protocol == "gptq" else 512


def _run(
    target: str,
    reference: str | None,
    text: str,
    context: int,
    chunks: int | None,
    protocol: str,
    device: str,
    batch: int,
) -> dict[str, Any]:
    from compressor.calibration.data import load_tokenizer
    from compressor.calibration.linear import check_device
    from compressor.eval.score import evaluate as score
    from compressor.eval.windows import encode_text, make_windows
    from compressor.models import open_model

    check_device(device)
    content = read_text(text)
    model = open_model(target, exact=True)
    base = open_model(reference) if reference else None
    ids, bos = encode_text(load_tokenizer(base or model), content)
    windows = make_windows(ids, context=context, chunks=chunks, protocol=protocol, bos=bos, label=text)
    with progress_bar() as progress:
        result = score(model, base, windows, device=device, batch=batch, progress=progress)
    result["text"] = text
    result["text_sha256"] = hashlib.sha256(content.encode()).hexdigest()
    notes = [f"{m.label}: {note}" for m in (model, base) if m for note in m.notes]
    result["notes"] = list(dict.fromkeys(notes))
    result.update(_overlap(target, windows.tokens.tolist(), result["notes"]))
    result["versions"] = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    result["versions"] = {"compressor": __version__, **result["versions"]}
    return result


def _overlap(target: str, rows: list[list[int]], notes: list[str]) -> dict[str, float]:
    """The share of the scored text that an artifact was calibrated on, where its report tells; a warning too."""
    from compressor.calibration.overlap import WARN_SHARE, overlap_share, stored_sketch

    found = stored_sketch(Path(target))
    if found is None:
        return {}
    share = overlap_share(found, rows)
    if share >= WARN_SHARE:
        notes.append(
            f"about {100 * share:.0f} % of this text was in the calibration text of {target}:"
            " the score flatters it, use another text"
        )
    return {"calibration_overlap": round(share, 4)}


def read_text(source: str) -> str:
    """A UTF-8 file's text, newlines untouched; ``held_out`` is the bundled evaluation set.

    Raises:
        CompressorError: missing or not UTF-8.
    """
    from compressor.calibration.data import bundled_text

    path = Path(source)
    if source == "held_out" and not path.exists():
        return bundled_text("held_out")
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise CompressorError(f"--text {source}: cannot be read", got=error.strerror) from error
    except UnicodeDecodeError as error:
        raise CompressorError(f"--text {source}: not UTF-8", got=f"byte {error.start}") from error


def _print(result: dict[str, Any]) -> None:
    for note in result["notes"]:
        say(f"note: {note}")
    where = f"{result['protocol']} protocol, {result['chunks']} windows of {result['context']}"
    print(f"{result['target']}: {result['tokens']} tokens scored ({where})")
    print(f"perplexity      {result['perplexity']:.4f} ± {result['perplexity_error']:.4f}")
    if result["reference"] is None:
        return
    print(f"  reference     {result['reference_perplexity']:.4f} ± {result['reference_perplexity_error']:.4f}")
    print(f"ln PPL ratio    {result['ln_ppl_ratio']:+.5f} ± {result['ln_ppl_ratio_error']:.5f} (paired)")
    kld = result["kld"]
    print(f"KLD mean        {kld['mean']:.5f} ± {kld['mean_error']:.5f}")
    print(f"    median      {kld['median']:.5f}   99 % {kld['p99']:.4f}   99.9 % {kld['p999']:.4f}")
    print(f"top-1 agreement {100 * result['top1']:.2f} % ± {100 * result['top1_error']:.2f}")


def _gate(result: dict[str, Any], max_kld: float | None, max_ppl_increase: float | None) -> None:
    """Refuse a model that is worse than allowed.

    Raises:
        GateFailed: exit code 1.
    """
    if max_kld is not None and not result["kld"]["mean"] <= max_kld:
        raise GateFailed("mean KLD above the limit", got=f"{result['kld']['mean']:.5f}", expected=f"<= {max_kld}")
    increase = result["perplexity"] / result.get("reference_perplexity", 1.0) - 1
    if max_ppl_increase is not None and not increase <= max_ppl_increase:
        raise GateFailed(
            "perplexity increase above the limit", got=f"{increase:.4f}", expected=f"<= {max_ppl_increase}"
        )
