"""Perplexity and divergence from per-token scores, with their standard errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_NLL = 300.0
"""A mean nll above this (perplexity 1e130) is a ruined model, and its figures would overflow."""


@dataclass(frozen=True)
class TokenScores:
    """Per scored token, float64 [n]: negative log-likelihoods, and against the reference if there is one.

    Attributes:
        nll: Of the target, in nats.
        reference_nll: Of the reference.
        kld: KL(reference || target), in nats.
        same_top: 1.0 where both put the same token first.
    """

    nll: Floats
    reference_nll: Floats | None = None
    kld: Floats | None = None
    same_top: Floats | None = None


def score_logits(logits: torch.Tensor, reference: torch.Tensor | None, targets: torch.Tensor) -> TokenScores:
    """Float32 logits [n, vocab] of both models and target ids int64 [n] -> scores per token.

    Both logits are overwritten: no second copy of them is made but one buffer for exponentials. Rows are
    summed in float32 (pairwise, relative error below 1e-6, ten times the speed of float64), logs and all
    that follows are float64. A divergence that rounds below zero is zero.
    """
    exponentials = torch.empty_like(logits)
    log_sum, top = _normalize(logits, exponentials)
    nll = log_sum - _pick(logits, targets)
    if reference is None:
        return TokenScores(_numpy(nll))
    base_log_sum, base_top = _normalize(reference, exponentials)
    base_nll = base_log_sum - _pick(reference, targets)
    mean_gap = exponentials.mul_(reference.sub_(logits)).sum(-1).double() / base_log_sum.exp()
    kld = (mean_gap - base_log_sum + log_sum).clamp_(min=0.0)
    return TokenScores(_numpy(nll), _numpy(base_nll), _numpy(kld), _numpy(top == base_top))


def _normalize(logits: torch.Tensor, exponentials: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shift each row to a maximum of 0 in place and fill exponentials.

    Returns the logs of the rows' sums, float64 [n], and where the maxima are, int64 [n].
    """
    highest, top = logits.max(-1, keepdim=True)
    logits.sub_(highest)
    torch.exp(logits, out=exponentials)
    return exponentials.sum(-1).double().log_(), top.squeeze(-1)


def _pick(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.gather(-1, targets[:, None]).squeeze(-1).double()


def _numpy(values: torch.Tensor) -> Floats:
    found: Floats = values.double().cpu().numpy()
    return found


def join(parts: list[TokenScores]) -> TokenScores:
    """Scores of all windows in one."""

    def joined(name: str) -> Floats | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else np.concatenate(values)

    nll = joined("nll")
    assert nll is not None
    return TokenScores(nll, joined("reference_nll"), joined("kld"), joined("same_top"))


def summarize(scores: TokenScores) -> dict[str, Any]:
    """Figures with errors.

    ``perplexity_error`` as llama-perplexity: PPL * sqrt((E[v^2] - E[v]^2) / (n - 1)). ``ln_ppl_ratio`` is
    the paired difference of mean nll to the reference. Errors treat tokens as independent.
    """
    perplexity, error = _perplexity(scores.nll)
    found: dict[str, Any] = {"perplexity": perplexity, "perplexity_error": error}
    if scores.kld is None or scores.reference_nll is None or scores.same_top is None:
        return found
    found["reference_perplexity"], found["reference_perplexity_error"] = _perplexity(scores.reference_nll)
    difference = scores.nll - scores.reference_nll
    found["ln_ppl_ratio"], found["ln_ppl_ratio_error"] = float(difference.mean()), _error(difference)
    found["kld"] = {
        "mean": float(scores.kld.mean()),
        "mean_error": _error(scores.kld),
        "median": float(np.median(scores.kld)),
        "p99": float(np.quantile(scores.kld, 0.99)),
        "p999": float(np.quantile(scores.kld, 0.999)),
        "max": float(scores.kld.max()),
    }
    found["top1"], found["top1_error"] = float(scores.same_top.mean()), _error(scores.same_top)
    return found


def _perplexity(nll: Floats) -> tuple[float, float]:
    """Perplexity and its error: the mean's error through exp's derivative."""
    perplexity = math.exp(nll.mean())
    return perplexity, perplexity * _error(nll)


def _error(values: Floats) -> float:
    """Standard error of the mean."""
    return float(np.sqrt(values.var() / max(1, len(values) - 1)))
