"""``compress distill``: train the scales and norms of an artifact towards the float model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compressor.cli.console import print_json, progress_bar, say

if TYPE_CHECKING:
    from compressor.distill.train import Options


def distill(
    artifact: Annotated[Path, typer.Argument(help="Artifact directory (compressed-tensors).")],
    reference: Annotated[str, typer.Option(help="The float model it was made of: directory, .gguf or `demo`.")],
    out: Annotated[Path, typer.Option(help="Directory to create.")],
    calibration: Annotated[
        str, typer.Option(help="Bundled set, mix (prose:40,code:20), or a .txt/.jsonl file.")
    ] = "default",
    samples: Annotated[int, typer.Option(min=5, help="Windows of text; some are held out to choose by.")] = 48,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 512,
    epochs: Annotated[float, typer.Option(help="Passes over the text; parts of one are allowed.")] = 1.0,
    batch: Annotated[int, typer.Option(min=1, help="Windows per step.")] = 1,
    lr: Annotated[float, typer.Option(help="Peak learning rate: relative change of a scale per step.")] = 2e-3,
    norm_lr: Annotated[float, typer.Option(help="The same for norm weights; 0 leaves them.")] = 1e-3,
    checks: Annotated[int, typer.Option(min=1, help="How often held-out windows are scored.")] = 6,
    patience: Annotated[int, typer.Option(min=1, help="Checks without gain that end training.")] = 3,
    max_seconds: Annotated[
        float | None, typer.Option(help="End training after this time, with the best found.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of every random choice.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
) -> None:
    """Train scales and norm weights of ARTIFACT towards the float model's logits; codes and format stay.

    Held-out windows choose: where nothing beats the artifact, OUT holds the artifact's own weights.

    Examples:

    \b
      compress distill out/int4 --reference demo --out out/int4-distilled
      compress distill out/int4 --reference ./model --calibration text.txt --samples 128 --out out/better
      compress distill out/int4 --reference ./model --max-seconds 300 --out out/better --json
    """
    from compressor.distill.train import Options

    options = Options(
        epochs=epochs,
        batch=batch,
        lr=lr,
        norm_lr=norm_lr,
        checks=checks,
        patience=patience,
        max_seconds=max_seconds,
        seed=seed,
    )
    facts = _run(artifact, reference, out, calibration, samples, sequence_length, options)
    if json_output:
        print_json({"out": str(out), **facts})
    else:
        _print(out, facts)


def _run(
    artifact: Path,
    reference: str,
    out: Path,
    calibration: str,
    samples: int,
    sequence_length: int,
    options: Options,
) -> dict[str, Any]:
    from compressor.calibration.data import load_tokenizer, load_tokens
    from compressor.distill.artifact import check_before_work, distill_scales
    from compressor.models import open_model

    model = open_model(reference)
    check_before_work(artifact, model, out, options)
    tokens = load_tokens(
        calibration,
        load_tokenizer(model),
        samples=samples,
        sequence_length=sequence_length,
        seed=options.seed,
        vocab_size=int(model.config["vocab_size"]),
    )
    for note in tokens.notes:
        say(f"note: {note}")
    with progress_bar() as progress:
        return distill_scales(artifact, model, tokens, out, options, progress)


def _print(out: Path, facts: dict[str, Any]) -> None:
    before, after = facts["kld_before"], facts["kld_after"]
    windows = f"on {facts['held_out']} held-out windows"
    if facts["improved"]:
        print(f"{out}: KLD {before:.5f} -> {after:.5f} {windows} ({facts['trained']} scales and norm weights)")
    else:
        print(f"{out}: nothing beat the artifact {windows} (KLD {before:.5f}): its own weights were copied")
    print(f"{facts['steps']} steps ({facts['ended']}), {facts['seconds']:.0f} s")
