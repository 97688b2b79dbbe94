"""llama.cpp and transformers judge what ``compress demo`` wrote: ``python -m tests.oracle.judge DIR``.

DIR is the artifact, DIR.gguf its export. Four prompts, 16 greedy tokens each, by llama.cpp and by
transformers holding our dequantized codes in float32. Where they part (llama.cpp quantizes activations
as well), the gap between the two candidates' logits, in our model, must be under 0.5. Then 4 x 256 tokens
of held-out text teacher forced: perplexities within 1 %. Last, transformers loads the artifact with
compressed-tensors, in float32: its logits equal our dequantized model's to float tolerance.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village,",
    "def fibonacci(n):",
)
WINDOWS = 4
"""llama.cpp rounds activations to int8: on one window of 256 tokens that alone moves ln PPL by 0.005 (1 sigma)."""
MAX_GAP, MAX_PPL_RATIO, MAX_LOGIT_DIFFERENCE = 0.5, 0.01, 1e-4


@dataclass
class Verdict:
    """What was compared and what came out."""

    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def check(self, holds: bool, line: str) -> None:
        self.lines.append(("ok    " if holds else "FAIL  ") + line)
        if not holds:
            self.failures.append(line)


def float_model(artifact: Path) -> Any:
    """transformers' model with our dequantized weights in float32, without its quantization code."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from compressor.models import open_model

    checkpoint = open_model(str(artifact))
    config = AutoConfig.for_model(**checkpoint.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {name: torch.from_numpy(checkpoint.read(name)) for name in checkpoint.tensors}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model


def logits_of(model: Any, tokens: list[int]) -> np.ndarray:
    """Float32 [n, vocab] of a transformers model."""
    import torch

    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def greedy(model: Any, tokens: list[int], n: int) -> list[int]:
    """n tokens, always the likeliest, without a cache."""
    found: list[int] = []
    for _ in range(n):
        found.append(int(logits_of(model, tokens + found)[-1].argmax()))
    return found


def negative_log_likelihood(logits: np.ndarray, tokens: list[int]) -> float:
    """Its mean over tokens[1:]."""
    rows = logits[:-1].astype(np.float64)
    peak = rows.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(rows - peak).sum(axis=1)) + peak[:, 0]
    return float((log_sum - rows[np.arange(len(rows)), tokens[1:]]).mean())


def judge(artifact: Path, gguf_file: Path, text: str) -> Verdict:
    """Run every comparison."""
    from tests.oracle.llamacpp import LlamaCpp

    verdict, model = Verdict(), float_model(artifact)
    with LlamaCpp(gguf_file) as engine:
        for prompt in PROMPTS:
            _continuations(verdict, model, engine, prompt)
        tokens = engine.tokenize(text)
        windows = [tokens[start : start + 257] for start in range(0, WINDOWS * 257, 257)]
        runs = functools.partial(logits_of, model), engine.logits
        losses = ([negative_log_likelihood(run(window), window) for window in windows] for run in runs)
        ours, theirs = (math.exp(sum(each) / len(each)) for each in losses)
        ratio = abs(theirs / ours - 1)
        verdict.check(
            ratio < MAX_PPL_RATIO,
            f"teacher forced, {WINDOWS} x 256 tokens: perplexity {ours:.4f} ours,"
            f" {theirs:.4f} llama.cpp ({100 * ratio:.3f} % apart)",
        )
    return verdict


def judge_transformers(artifact: Path, tokens: list[int]) -> Verdict:
    """Load the artifact as any user would and compare logits with our dequantized codes."""
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(artifact, dtype=torch.float32).eval()
    expected, verdict = logits_of(float_model(artifact), tokens), Verdict()
    difference = float(np.abs(logits_of(theirs, tokens) - expected).max())
    verdict.check(
        difference < MAX_LOGIT_DIFFERENCE * float(np.abs(expected).max()),
        f"transformers + compressed-tensors: logits of {len(tokens)} tokens differ by at most {difference:.2e}"
        f" (largest logit {np.abs(expected).max():.1f})",
    )
    return verdict


def _continuations(verdict: Verdict, model: Any, engine: Any, prompt: str) -> None:
    tokens = engine.tokenize(prompt)
    theirs, ours = engine.greedy(tokens, 16), greedy(model, tokens, 16)
    parted = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
    line = f"{prompt!r} -> {engine.text(theirs)!r}"
    if prompt == PROMPTS[0]:
        verdict.check("Paris" in engine.text(theirs), "llama.cpp says Paris")
    if parted is None:
        verdict.check(True, f"{line}: 16 of 16 tokens equal")
        return
    logits = logits_of(model, tokens + ours[:parted])[-1]
    gap = float(logits[ours[parted]] - logits[theirs[parted]])
    verdict.check(gap < MAX_GAP, f"{line}: {parted} tokens equal, then a logit gap of {gap:.3f}")


def judge_all(artifact: Path) -> Verdict:
    """Both judges; llama.cpp only where it is available."""
    from compressor.calibration.data import bundled_text, load_tokenizer
    from compressor.models import open_model
    from tests.oracle.llamacpp import Unavailable

    text = bundled_text("held_out")
    tokens = load_tokenizer(open_model(str(artifact))).encode(text[:2000]).ids[:256]
    verdict = judge_transformers(artifact, tokens)
    try:
        engine = judge(artifact, artifact.with_name(artifact.name + ".gguf"), text)
    except Unavailable as missing:
        verdict.check(False, f"llama.cpp is not available here ({missing}): not judged")
        return verdict
    return Verdict(verdict.lines + engine.lines, verdict.failures + engine.failures)


def main() -> int:
    """Judge the demo's output directory; 1 when anything fails."""
    verdict = judge_all(Path(sys.argv[1]))
    print("judged by llama.cpp (xllamacpp) and transformers:")
    print("\n".join(verdict.lines))
    return 1 if verdict.failures else 0


if __name__ == "__main__":
    sys.exit(main())
