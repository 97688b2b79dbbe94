"""Documents packed into full windows: no padding, a boundary between documents, BOS first where it belongs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compressor.errors import CompressorError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Marks:
    """Tokens that structure a window: ``bos`` opens each, ``eos`` ends a document (None: not used)."""

    bos: int | None = None
    eos: int | None = None


def added_bos(tokenizer: Tokenizer) -> int | None:
    """The token the tokenizer puts before every text, if it does."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    marked = tokenizer.encode("a", add_special_tokens=True).ids
    if marked[:1] == plain[:1] or not marked:
        return None
    return int(marked[0])


def pack(
    documents: Sequence[str],
    tokenizer: Tokenizer,
    marks: Marks,
    *,
    wanted: int,
    length: int,
    seed: int,
    label: str,
) -> list[list[int]]:
    """At most ``wanted`` windows of exactly ``length`` tokens; one shorter when the text does not fill one.

    Documents follow each other in an order drawn by ``seed`` until there is enough. After each comes
    ``marks.eos``, or a blank line without one.

    Raises:
        CompressorError: there is no text.
    """
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    opening = [] if marks.bos is None else [marks.bos]
    body = max(1, length - len(opening))
    ids: list[int] = []
    for index in order:
        if len(ids) >= wanted * body:
            break
        ids += _document(documents[index], tokenizer, marks)
    if not ids:
        raise CompressorError(f"--calibration {label}: holds no text", hint="give a file with text in it")
    count = min(wanted, len(ids) // body)
    rows = [opening + ids[i * body : (i + 1) * body] for i in range(count)]
    return [row[:length] for row in rows] or [opening + ids]


def _document(text: str, tokenizer: Tokenizer, marks: Marks) -> list[int]:
    """Tokens of one document and its end; a chat template may have written both marks itself."""
    if marks.eos is None:
        return list(tokenizer.encode(f"{text}\n\n", add_special_tokens=False).ids)
    ids = list(tokenizer.encode(text, add_special_tokens=False).ids)
    if ids and ids[0] == marks.bos:
        del ids[0]
    return ids if marks.eos in ids[-2:] else [*ids, marks.eos]
