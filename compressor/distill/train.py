"""Scale distillation: the scales and norm weights of a rounded model, trained towards the float model's logits.

Loss: forward KL(teacher || student) of next-token distributions, T = 1, mean over all positions. Codes and
zero points never change. Adam over log factors (s = s0 exp(u)); the forward always reads values as they
will be stored. Source: EfficientQAT's end-to-end phase (arXiv 2407.11062), which trains scales alone, with
the loss of quantization-aware distillation.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch

from compressor.calibration.data import TokenSet
from compressor.calibration.linear import bf16_products
from compressor.core.report import Progress
from compressor.distill.loss import Heads, divergence, divergence_gradient
from compressor.distill.student import Student, Teacher, head_matrix, same_head
from compressor.errors import CompressorError

HELD_OUT_PART, FEWEST_HELD_OUT, MOST_HELD_OUT = 8, 4, 8
"""One window of 8 is held out for validation, at least 4 and at most 8 in all."""

BETAS, EPSILON, CLIP = (0.9, 0.95), 1e-12, 1.0


@dataclass(frozen=True)
class Options:
    """How to train.

    Attributes:
        epochs: Passes over the training windows.
        batch: Windows per step.
        lr: Peak learning rate: the largest relative change of a scale in one step.
        norm_lr: The same for norm weights.
        warmup: Part of the steps in which the rate rises from 0; it then falls as a cosine to 0.
        checks: How often held-out windows are scored in all.
        patience: Checks in a row without gain that end training.
        max_seconds: Wall time after which training ends with the best found, or None.
        seed: Draws the held-out windows and the order of the others.
    """

    epochs: float = 1.0
    batch: int = 1
    lr: float = 2e-3
    norm_lr: float = 1e-3
    warmup: float = 0.1
    checks: int = 6
    patience: int = 3
    max_seconds: float | None = None
    seed: int = 0


@dataclass
class History:
    """What training did: KLD in nats per token on the held-out windows at each check, with its step."""

    steps: int = 0
    checks: list[tuple[int, float]] = field(default_factory=list)
    best: int = 0
    ended: str = "all steps done"


@dataclass(frozen=True)
class Windows:
    """Token ids int64 [n, L] with the teacher's final states float32 [n, L, hidden]."""

    tokens: torch.Tensor
    states: torch.Tensor

    def part(self, index: torch.Tensor) -> Windows:
        """Some of the windows."""
        return Windows(self.tokens[index], self.states[index])


def split(tokens: TokenSet, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows [n, L] to train on and to validate on, drawn by seed.

    Raises:
        CompressorError: too few windows.
    """
    windows = torch.cat(tokens.batches)
    held_out = min(MOST_HELD_OUT, max(FEWEST_HELD_OUT, len(windows) // HELD_OUT_PART))
    if len(windows) <= held_out:
        raise CompressorError(
            "too little calibration text to distil",
            got=f"{len(windows)} windows",
            expected=f"at least {held_out + 1}: {held_out} are held out for validation",
            hint="a longer text, more --samples, or a smaller --sequence-length",
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(windows), generator=generator)
    return windows[order[held_out:]], windows[order[:held_out]]


def teach(teacher: Teacher, tokens: torch.Tensor, progress: Progress) -> Windows:
    """Run the float model once over windows [n, L], block by block."""
    streams = teacher.embed(list(tokens.split(4)))  # type: ignore[no-untyped-call]
    for layer in range(teacher.layers):
        progress("teacher blocks", layer, teacher.layers)
        block = teacher.block(layer)
        teacher.forward(block, layer, streams)
        teacher.release(block)
    progress("teacher blocks", teacher.layers, teacher.layers)
    with torch.no_grad():
        return Windows(tokens, torch.cat([teacher.normed(hidden) for hidden in streams]).clone())


class Trainer:
    """One training: student, heads, optimizer and the best values so far."""

    def __init__(self, student: Student, teacher: Teacher, options: Options) -> None:
        self.student, self.options = student, options
        self.trained = list(student.trained.values())
        self.teacher_head = self.student_head = head_matrix(teacher)
        if student.head is None and not same_head(student, teacher):
            self.student_head = head_matrix(student)
        self.optimizer = torch.optim.Adam(
            [
                {"params": [t.log_factor for t in self.trained if t.base.ndim == 2], "peak": options.lr},
                {"params": [t.log_factor for t in self.trained if t.base.ndim == 1], "peak": options.norm_lr},
            ],
            betas=BETAS,
            eps=EPSILON,
            foreach=False,
        )
        self.history = History()
        self._best = self._values()
        self._started = time.monotonic()

    def _values(self) -> list[torch.Tensor]:
        return [t.log_factor.detach().clone() for t in self.trained]

    def _heads(self) -> Heads:
        if self.student.head is None:
            return Heads(self.student_head, self.teacher_head)
        return Heads(self.student.head_weight(), self.teacher_head)

    @torch.no_grad()
    def check(self, held_out: Windows) -> float:
        """KLD in nats per token on held-out windows with the values as stored; keeps the best values."""
        total, heads = 0.0, self._heads()
        for start in range(0, len(held_out.tokens), 4):
            part = held_out.part(torch.arange(start, min(start + 4, len(held_out.tokens))))
            hidden = self.student.embedded(part.tokens)
            for layer in range(self.student.layers):
                hidden = self.student.step_block(layer, hidden)
            states = self.student.normed(hidden)
            total += divergence(states.flatten(0, 1), part.states.flatten(0, 1), heads)
        kld = total / held_out.tokens.numel()
        self.history.checks.append((self.history.steps, kld))
        if not math.isfinite(kld):
            self.history.ended = "the divergence was no longer finite"
        elif kld < self.history.checks[self.history.best][1]:
            self.history.best, self._best = len(self.history.checks) - 1, self._values()
        return kld

    def step(self, batch: Windows, part_done: float) -> float:
        """One update from a batch; returns its KLD before the update, in nats per token."""
        student, inputs = self.student, []
        hidden = student.embedded(batch.tokens)
        with torch.no_grad():
            for layer in range(student.layers):
                inputs.append(hidden)
                hidden = student.step_block(layer, hidden)
        loss, gradient = self._backward_head(hidden, batch.states)
        for layer in reversed(range(student.layers)):
            gradient = student.backward_block(layer, inputs.pop(), gradient)
        self._update(part_done)
        self.history.steps += 1
        return loss

    def _backward_head(self, hidden: torch.Tensor, states: torch.Tensor) -> tuple[float, torch.Tensor]:
        """KLD in nats per token and its gradient by the last block's output."""
        hidden = hidden.clone().requires_grad_()
        normed, heads = self.student.normed(hidden), self._heads()
        flat = normed.detach().flatten(0, 1)
        total, gradient, for_head = divergence_gradient(flat, states.flatten(0, 1), heads)
        normed.backward(gradient.view_as(normed))  # type: ignore[no-untyped-call]
        if for_head is not None:
            heads.student.backward(for_head)  # type: ignore[no-untyped-call]
        assert hidden.grad is not None
        return total / len(flat), hidden.grad

    def _update(self, part_done: float) -> None:
        """One Adam step at the rate of this moment, gradients clipped."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * rate(part_done, self.options.warmup)
        torch.nn.utils.clip_grad_norm_([t.log_factor for t in self.trained], CLIP, foreach=False)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, training: Windows, held_out: Windows, progress: Progress) -> History:
        """Train until all steps are done, nothing is gained any more, or time is up; then take the best."""
        options, history = self.options, self.history
        batches = schedule(len(training.tokens), options)
        every = max(1, math.ceil(len(batches) / options.checks))
        self.check(held_out)
        for number, index in enumerate(batches, start=1):
            progress("distilling", number - 1, len(batches))
            with bf16_products():
                self.step(training.part(index), max((number - 0.5) / len(batches), self._time_used()))
            late = self._time_used() >= 1
            if number % every == 0 or number == len(batches) or late:
                self.check(held_out)
            if late:
                history.ended = "time was up"
            elif len(history.checks) - 1 - history.best >= options.patience:
                history.ended = "no gain on held-out windows"
            if history.ended != "all steps done":
                break
        progress("distilling", len(batches), len(batches))
        self._take_best()
        return history

    def _time_used(self) -> float:
        """Part of the time limit that has passed; 0 without one."""
        limit = self.options.max_seconds
        return (time.monotonic() - self._started) / limit if limit else 0.0

    @torch.no_grad()
    def _take_best(self) -> None:
        for trained, best in zip(self.trained, self._best, strict=True):
            trained.log_factor.copy_(best)


def rate(part_done: float, warmup: float) -> float:
    """The learning rate's share of its peak: linear up to 1 over ``warmup``, then half a cosine to 0."""
    if part_done < warmup:
        return part_done / warmup
    left = min(1.0, (part_done - warmup) / (1 - warmup))
    return 0.5 * (1 + math.cos(math.pi * left))


def schedule(windows: int, options: Options) -> list[torch.Tensor]:
    """Window numbers of each step: every epoch in an order of its own; the last epoch may be cut short."""
    generator = torch.Generator().manual_seed(options.seed + 1)
    wanted = max(1, round(windows * options.epochs))
    orders = [torch.randperm(windows, generator=generator) for _ in range(math.ceil(wanted / windows))]
    return list(torch.cat(orders)[:wanted].split(options.batch))  # type: ignore[no-untyped-call]
