"""Text to windows of calibration tokens: bundled sets, mixes of them, or a local file.

Documents are tokenized, shuffled by seed, joined, and cut into windows of exactly the sequence length:
there is no padding that could enter statistics.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import CompressorError, Problems
from compressor.shipped import shipped_folder

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from compressor.checkpoint.base import Checkpoint

HELD_OUT = "held_out"
"""The bundled evaluation set: never part of calibration."""


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


def bundled_names() -> list[str]:
    """Names of the bundled calibration sets (the evaluation set is not among them)."""
    return sorted(path.stem for path in shipped_folder("calibration_data").glob("*.txt") if path.stem != HELD_OUT)


def bundled_text(name: str) -> str:
    """A bundled set's text.

    Raises:
        CompressorError: no such set.
    """
    path = shipped_folder("calibration_data") / f"{name}.txt"
    if not path.is_file():
        raise CompressorError(f"{name}: no such bundled text", expected=", ".join([*bundled_names(), HELD_OUT]))
    return path.read_bytes().decode("utf-8")


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
) -> TokenSet:
    """Tokens of ``source``: ``default``, a bundled name, a mix ``prose:40,code:20``, or a .txt/.jsonl file.

    At most ``samples`` windows of exactly ``sequence_length``, in batches of about ``batch_tokens``.
    Too little text gives fewer windows and a note; less than one window gives one shorter window.

    Raises:
        CompressorError: no such source, unreadable, no text in it, or (with ``vocab_size``) a token id
            the model does not have.
    """
    import torch

    _check_positive(samples=samples, sequence_length=sequence_length, batch_tokens=batch_tokens)
    windows: list[list[int]] = []
    notes: list[str] = []
    for documents, wanted, label in _shares(source, samples):
        found = _windows(documents, tokenizer, wanted, sequence_length, seed, label)
        if len(found) < wanted or len(found[0]) < sequence_length:
            notes.append(
                f"calibration {label}: {len(found)} windows of {len(found[0])} tokens,"
                f" {wanted} of {sequence_length} were asked for"
            )
        windows += found
    windows = [w for w in windows if len(w) == sequence_length] or windows[:1]
    _check_vocabulary(windows, vocab_size)
    per_batch = max(1, batch_tokens // sequence_length)
    batches = list(torch.tensor(windows, dtype=torch.int64).split(per_batch))  # type: ignore[no-untyped-call]
    digest = hashlib.sha256(json.dumps([sequence_length, seed, batch_tokens, windows]).encode()).hexdigest()
    count = sum(map(len, windows))
    return TokenSet(batches, count, digest, f"{source}: {len(windows)} windows, {count} tokens", notes)


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


def _shares(source: str, samples: int) -> list[tuple[list[str], int, str]]:
    """(documents, windows wanted, label) for each part of a source."""
    if ":" in source and not Path(source).exists():
        return _mix(source, samples)
    if source == "default":
        documents = [doc for name in bundled_names() for doc in _documents(bundled_text(name))]
        return [(documents, samples, source)]
    if source in bundled_names():
        return [(_documents(bundled_text(source)), samples, source)]
    path = Path(source)
    if source == HELD_OUT and not path.exists():
        raise CompressorError(f"--calibration {source}: this text is for evaluation only")
    if not path.is_file():
        names = ["default", *bundled_names()]
        close = difflib.get_close_matches(source, names, n=1)
        raise CompressorError(
            f"--calibration {source}: no such text",
            expected=f"a .txt or .jsonl file, or one of {', '.join(names)}",
            hint=f"did you mean {close[0]!r}?" if close else None,
        )
    documents = _json_lines(path) if path.suffix == ".jsonl" else _documents(_text(path))
    return [(documents, samples, source)]


def _mix(source: str, samples: int) -> list[tuple[list[str], int, str]]:
    """``prose:40,code:20`` -> each set with its share of the windows."""
    parts = []
    for item in source.split(","):
        name, _, weight = item.strip().partition(":")
        if not weight.isdigit() or int(weight) == 0:
            raise CompressorError(f"--calibration {source}", got=repr(item), expected="NAME:WEIGHT, e.g. prose:40")
        parts.append((name, int(weight)))
    total, given, shares = sum(weight for _, weight in parts), 0, []
    for index, (name, _) in enumerate(parts):
        upto = sum(w for _, w in parts[: index + 1]) * samples // total
        ((documents, _, label),) = _shares(name, samples)
        if upto > given:
            shares.append((documents, upto - given, label))
        given = upto
    return shares


def _text(path: Path) -> str:
    """A UTF-8 file's text, lines ended by LF, without a byte order mark."""
    try:
        return path.read_bytes().decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except OSError as error:
        raise CompressorError(f"--calibration {path}: cannot be read", got=error.strerror) from error
    except UnicodeDecodeError as error:
        raise CompressorError(f"--calibration {path}: not UTF-8", got=f"byte {error.start}") from error


def _documents(text: str) -> list[str]:
    """Text split where lines are blank, joined again to pieces of about 1,000 characters."""
    pieces: list[str] = []
    for part in re.split(r"\n(?:[^\S\n]*\n)+", text):
        if pieces and len(pieces[-1]) < 1000:
            pieces[-1] += "\n\n" + part
        else:
            pieces.append(part)
    return [piece for piece in pieces if piece.strip()]


def _json_lines(path: Path) -> list[str]:
    """One document per line: its ``text``, or its ``messages`` joined. Bad lines are named, five at most."""
    documents, problems = [], []
    for number, line in enumerate(_text(path).split("\n"), start=1):  # U+2028 may stand inside a string
        if not line.strip():
            continue
        try:
            documents.append(_document(json.loads(line)))
        except (ValueError, KeyError, TypeError, RecursionError):
            expected = '{"text": "..."} or {"messages": [{"role": ..., "content": ...}]}'
            problems.append(CompressorError(f"line {number}: not a document", got=line[:60], expected=expected))
    if problems:
        raise Problems(f"--calibration {path}: {len(problems)} unusable lines", problems[:5])
    return [document for document in documents if document.strip()]


def _document(record: Any) -> str:
    parts = [record["text"]] if "text" in record else [m["content"] for m in record["messages"]]
    if not all(isinstance(part, str) for part in parts):
        raise TypeError("text and content must be strings")
    "".join(parts).encode()  # a lone surrogate is no text: UnicodeEncodeError is a ValueError
    if "text" in record:
        return str(record["text"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in record["messages"])


def _windows(
    documents: list[str], tokenizer: Tokenizer, wanted: int, length: int, seed: int, label: str
) -> list[list[int]]:
    """At most ``wanted`` windows of exactly ``length`` tokens; one shorter when the text does not fill one.

    Documents follow each other in an order drawn by ``seed``, a blank line after each, until there is
    enough.
    """
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)
    ids: list[int] = []
    for document in shuffled:
        if len(ids) >= wanted * length:
            break
        ids += tokenizer.encode(f"{document}\n\n", add_special_tokens=True).ids
    if not ids:
        raise CompressorError(f"--calibration {label}: holds no text", hint="give a file with text in it")
    count = min(wanted, len(ids) // length)
    return [ids[i * length : (i + 1) * length] for i in range(count)] or [ids]
