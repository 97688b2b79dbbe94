"""Forward KL of a student's distribution from its teacher's, a few positions' logits at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compressor.calibration.linear import linear
from compressor.distill.scaled import input_gradient, weight_gradient

MAX_LOGITS = 5 << 20
"""Logits in one buffer of 20 MB; there are three buffers, and a fourth for a moment."""


@dataclass(frozen=True)
class Heads:
    """Both models' heads, float32 [vocab, hidden] each; one tensor twice where they are the same bytes.

    Attributes:
        student: May require grad (a quantized head's scales are trained).
        teacher: Never does.
    """

    student: torch.Tensor
    teacher: torch.Tensor


def divergence(student: torch.Tensor, teacher: torch.Tensor, heads: Heads) -> float:
    """Sum over positions of KL(teacher || student), in nats, T = 1.

    Args:
        student, teacher: float32 [n, hidden], what the heads read.
        heads: The two heads.
    """
    total = 0.0
    for start, stop in _chunks(len(student), heads):
        total += _divergence(student[start:stop], teacher[start:stop], heads)[0]
    return total


def divergence_gradient(
    student: torch.Tensor, teacher: torch.Tensor, heads: Heads
) -> tuple[float, torch.Tensor, torch.Tensor | None]:
    """The mean over positions of KL(teacher || student) and its gradients.

    Returns:
        The sum (not the mean) in nats; the mean's gradient float32 [n, hidden] for ``student``; and the
        mean's gradient like ``heads.student`` where that requires one, else None.
    """
    total, weight = 0.0, heads.student.detach()
    gradient = torch.empty_like(student)
    for_head = torch.zeros_like(weight) if heads.student.requires_grad else None
    for start, stop in _chunks(len(student), heads):
        part, excess = _divergence(student[start:stop], teacher[start:stop], heads)
        excess.div_(len(student))
        gradient[start:stop] = input_gradient(excess, weight)
        if for_head is not None:
            for_head += weight_gradient(excess, student[start:stop])
        total += part
    return total, gradient, for_head


@torch.no_grad()
def _divergence(student: torch.Tensor, teacher: torch.Tensor, heads: Heads) -> tuple[float, torch.Tensor]:
    """Sum of KL in nats, and q - p float32 [n, vocab]: its derivative by the student's logits.

    With log p and log q normalized in place, KL is the sum of p (log p - log q).
    """
    ours, theirs = linear(student, heads.student.detach()), linear(teacher, heads.teacher)
    ours.sub_(torch.logsumexp(ours, -1, keepdim=True))
    theirs.sub_(torch.logsumexp(theirs, -1, keepdim=True))
    gap = theirs - ours
    theirs.exp_()
    total = float(gap.mul_(theirs).sum(-1).double().sum())
    return total, ours.exp_().sub_(theirs)


def _chunks(positions: int, heads: Heads) -> list[tuple[int, int]]:
    rows = max(1, MAX_LOGITS // heads.student.shape[0])
    return [(start, min(start + rows, positions)) for start in range(0, positions, rows)]
