"""Text to windows of calibration tokens, whatever the text's source.

Documents are tokenized, shuffled by seed, joined, and cut into windows of exactly the sequence length:
there is no padding that could enter statistics. sources.py knows where text comes from, packing.py how it
is cut, selfgen.py how the model writes it, select.py which windows are worth their time.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compressor.calibration.chat import renderer_of, special_token, tokenizer_settings
from compressor.calibration.packing import Marks, added_bos, pack
from compressor.calibration.sources import HELD_OUT, Part, bundled_names, bundled_text, parts_of
from compressor.core.report import Progress, no_progress
from compressor.errors import CompressorError

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from compressor.checkpoint.base import Checkpoint

__all__ = ["HELD_OUT", "Choice", "TokenSet", "bundled_names", "bundled_text", "load_tokenizer", "load_tokens"]

SELECTIONS = ("all", "informative")
CHARACTERS_PER_TOKEN = 8
"""More than any tokenizer packs on average: how much of a dataset is worth reading."""


@dataclass(frozen=True)
class TokenSet:
    """Calibration tokens.

    Attributes:
        batches: int64 [b, L] each, L the sequence length (shorter only when the text is).
        tokens: How many tokens in all.
        sha256: Over the tokens and the parameters that made them.
        description: For the report.
        notes: What the user should know (less text than asked for).
    """

    batches: list[torch.Tensor]
    tokens: int
    sha256: str
    description: str
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Choice:
    """Which windows to keep: ``all`` takes the first, ``informative`` chooses among ``pool`` times as many."""

    method: str = "all"
    pool: int = 4

    @property
    def factor(self) -> int:
        """Candidates per window kept."""
        return 1 if self.method == "all" else self.pool


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The model's tokenizer.json as a fast tokenizer, without truncation or padding.

    Raises:
        CompressorError: there is none, or it cannot be read.
    """
    from tokenizers import Tokenizer

    source = checkpoint.side_files().get("tokenizer.json")
    if source is None:
        raise CompressorError(
            f"{checkpoint.label}: has no tokenizer.json",
            hint="save the fast tokenizer beside the weights (tokenizer.save_pretrained)",
        )
    text = source if isinstance(source, bytes) else source.read_bytes()
    try:
        tokenizer = Tokenizer.from_str(text.decode("utf-8"))
    except Exception as error:
        raise CompressorError(f"{checkpoint.label}: tokenizer.json cannot be read", got=str(error)[:200]) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def load_tokens(
    source: str,
    tokenizer: Tokenizer,
    *,
    samples: int,
    sequence_length: int,
    seed: int,
    batch_tokens: int = 2048,
    vocab_size: int | None = None,
    checkpoint: Checkpoint | None = None,
    choice: Choice | None = None,
    device: str = "cpu",
    progress: Progress = no_progress,
) -> TokenSet:
    """At most ``samples`` windows of exactly ``sequence_length`` tokens, in batches of about ``batch_tokens``.

    Args:
        source: ``default``, a bundled name, ``self``, a mix ``prose:40,self:20``, a .txt, .jsonl or .parquet
            file, a directory saved by ``datasets``, or a dataset of the hub; ``#FIELD`` names a column.
        tokenizer: The model's.
        samples, sequence_length: Windows and tokens in each.
        seed: Order of documents, and every other choice.
        batch_tokens: Tokens per batch.
        vocab_size: Refuse ids the model does not have.
        checkpoint: The model: its chat template and end token are used; ``self`` and selecting need it.
        choice: Which windows to keep.
        device: torch device where the model runs for ``self`` and for selecting.
        progress: Told how sampling and selecting advance.

    Too little text gives fewer windows and a note; less than one window gives one shorter window.

    Raises:
        CompressorError: no such source, unreadable, no text in it, a token id the model does not have,
            or a model too large to write text of its own here.
    """
    import torch

    _check_positive(samples=samples, sequence_length=sequence_length, batch_tokens=batch_tokens)
    choice = _checked_choice(choice or Choice(), checkpoint)
    render, marks = renderer_of(checkpoint), marks_of(tokenizer, checkpoint)
    budget = samples * choice.factor * sequence_length * CHARACTERS_PER_TOKEN
    windows: list[list[int]] = []
    notes: list[str] = []
    for part in parts_of(source, samples, render, budget=budget, seed=seed):
        maker = _Maker(tokenizer, marks, sequence_length, seed, checkpoint, device, progress)
        windows += _kept(maker.windows(part, choice.factor), part, choice, maker, notes)
    if render.refused:
        notes.append(f"the chat template refused {len(render.refused)} dialogues ({render.refused[0]}): plain text")
    windows = [w for w in windows if len(w) == sequence_length] or windows[:1]
    _check_vocabulary(windows, vocab_size)
    per_batch = max(1, batch_tokens // sequence_length)
    batches = list(torch.tensor(windows, dtype=torch.int64).split(per_batch))  # type: ignore[no-untyped-call]
    digest = hashlib.sha256(json.dumps([sequence_length, seed, batch_tokens, windows]).encode()).hexdigest()
    count = sum(map(len, windows))
    return TokenSet(batches, count, digest, f"{source}: {len(windows)} windows, {count} tokens", notes)


def marks_of(tokenizer: Tokenizer, checkpoint: Checkpoint | None) -> Marks:
    """BOS where the tokenizer adds one; the end token that the model's tokenizer_config.json names."""
    name = special_token(tokenizer_settings(checkpoint), "eos_token") if checkpoint is not None else None
    return Marks(added_bos(tokenizer), tokenizer.token_to_id(name) if name is not None else None)


@dataclass(frozen=True)
class _Maker:
    """Makes the windows of a part."""

    tokenizer: Tokenizer
    marks: Marks
    length: int
    seed: int
    checkpoint: Checkpoint | None
    device: str
    progress: Progress

    def windows(self, part: Part, factor: int) -> list[list[int]]:
        """At most ``factor`` times as many as the part is to give."""
        wanted = part.wanted * factor
        if part.documents is not None:
            marks = self.marks if part.separate else Marks(self.marks.bos)
            return pack(
                part.documents,
                self.tokenizer,
                marks,
                wanted=wanted,
                length=self.length,
                seed=self.seed,
                label=part.label,
            )
        from compressor.calibration.selfgen import sample_self

        if self.checkpoint is None:
            raise CompressorError("--calibration self: needs the model")
        return sample_self(
            self.checkpoint,
            self.tokenizer,
            self.marks,
            count=wanted,
            length=self.length,
            seed=self.seed,
            device=self.device,
            progress=self.progress,
        )


def _kept(found: list[list[int]], part: Part, choice: Choice, maker: _Maker, notes: list[str]) -> list[list[int]]:
    """The windows of a part that stay, and what there is to say about them."""
    if len(found) < part.wanted or len(found[0]) < maker.length:
        notes.append(
            f"calibration {part.label}: {len(found)} windows of {len(found[0])} tokens,"
            f" {part.wanted} of {maker.length} were asked for"
        )
    if choice.method == "all":
        return found
    if len(found) <= part.wanted:
        notes.append(f"calibration {part.label}: only {len(found)} candidates, nothing to select from")
        return found
    from compressor.calibration.select import select_windows

    assert maker.checkpoint is not None
    picked = select_windows(maker.checkpoint, found, part.wanted, maker.seed, maker.device, maker.progress)
    notes.append(f"calibration {part.label}: {len(picked)} windows selected from {len(found)}")
    return [found[index] for index in picked]


def _checked_choice(choice: Choice, checkpoint: Checkpoint | None) -> Choice:
    if choice.method not in SELECTIONS:
        raise CompressorError("--select", got=repr(choice.method), expected=" or ".join(SELECTIONS))
    if choice.method != "all" and checkpoint is None:
        raise CompressorError(f"--select {choice.method}: needs the model")
    if choice.method != "all" and choice.pool < 2:
        raise CompressorError("--pool", got=choice.pool, expected="at least 2 candidates per window kept")
    return choice


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise CompressorError(f"{name.replace('_', '-')} must be at least 1", got=value)


def _check_vocabulary(windows: list[list[int]], vocab_size: int | None) -> None:
    largest = max(map(max, windows))
    if vocab_size is not None and largest >= vocab_size:
        raise CompressorError(
            "tokenizer and model do not belong together: token id outside the vocabulary",
            got=largest,
            expected=f"< {vocab_size}",
        )
