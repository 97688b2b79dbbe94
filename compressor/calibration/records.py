"""Records of jsonl, parquet and datasets to documents: which field holds the text, and what is wrong with it."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from compressor.calibration.chat import Message
from compressor.errors import CompressorError, Problems

Render = Callable[[list[Message]], str]

SUFFIXES = (".txt", ".jsonl", ".parquet")
EXPECTED = (
    '{"text": "..."}, {"messages": [{"role": ..., "content": ...}]},'
    ' {"conversations": [{"from": ..., "value": ...}]} or {"prompt": ..., "completion": ...};'
    " FILE#FIELD names another field"
)
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}


def text_of(path: Path) -> str:
    """A UTF-8 file's text, lines ended by LF, without a byte order mark.

    Raises:
        CompressorError: unreadable, or not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except OSError as error:
        raise CompressorError(f"--calibration {path}: cannot be read", got=error.strerror) from error
    except UnicodeDecodeError as error:
        raise CompressorError(f"--calibration {path}: not UTF-8", got=f"byte {error.start}") from error


def document(record: Any, render: Render, column: str | None) -> str:
    """The text of one record: the named field, or the first of text, messages, conversations, prompt.

    Raises:
        ValueError, KeyError, TypeError: it is no document.
    """
    if not isinstance(record, dict):
        raise TypeError("not an object")
    if column is not None:
        text = _value(record[column], render)
    elif "text" in record:
        text = _value(record["text"], render)
    elif record.get("messages") is not None:
        text = render(_messages(record["messages"]))
    elif record.get("conversations") is not None:
        text = render(_messages(record["conversations"]))
    else:
        text = _pair(record["prompt"], record["completion"], render)
    text.encode()  # a lone surrogate is no text: UnicodeEncodeError is a ValueError
    return text


def _value(value: Any, render: Render) -> str:
    if isinstance(value, str):
        return value
    return render(_messages(value))


def _pair(prompt: Any, completion: Any, render: Render) -> str:
    """A prompt and what follows it, as texts or as messages."""
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt + completion
    return render([*_messages(prompt), *_messages(completion)])


def _messages(value: Any) -> list[Message]:
    """Turns with ``role`` and ``content``, or ``from`` and ``value``."""
    if not isinstance(value, list) or not value:
        raise TypeError("no list of messages")
    found = []
    for turn in value:
        role, content = (turn["role"], turn["content"]) if "role" in turn else (turn["from"], turn["value"])
        if not isinstance(role, str) or not isinstance(content, str):
            raise TypeError("role and content must be strings")
        found.append({"role": _ROLES.get(role, role), "content": content})
    return found


def json_lines(path: Path, render: Render, column: str | None) -> list[str]:
    """One document per line. Bad lines are named, five at most.

    Raises:
        CompressorError: unreadable, or lines that hold no document.
    """
    lines = enumerate(text_of(path).split("\n"), start=1)  # U+2028 may stand inside a string
    return _documents(((f"line {n}", line) for n, line in lines if line.strip()), path, render, column, json.loads)


def parquet(path: Path, render: Render, column: str | None) -> list[str]:
    """One document per row.

    Raises:
        CompressorError: pyarrow is missing, the file is damaged, or rows hold no document.
    """
    _module("pyarrow", path)
    pq = importlib.import_module("pyarrow.parquet")
    try:
        present = pq.read_schema(path).names
        used = [name for name in _fields(column) if name in present]
        rows = pq.read_table(path, columns=used or None).to_pylist()
    except Exception as error:
        raise CompressorError(f"--calibration {path}: cannot be read", got=str(error)[:200]) from error
    return _documents(((f"row {n}", row) for n, row in enumerate(rows, start=1)), path, render, column)


def _fields(column: str | None) -> tuple[str, ...]:
    return (column,) if column else ("text", "messages", "conversations", "prompt", "completion")


def _documents(
    items: Iterable[tuple[str, Any]],
    source: object,
    render: Render,
    column: str | None,
    parse: Callable[[Any], Any] = lambda item: item,
) -> list[str]:
    """The documents of records with their places; every bad one counted, five named."""
    found, problems = [], []
    expected = EXPECTED if column is None else f"an object with the field {column!r} holding text or messages"
    for place, item in items:
        try:
            found.append(document(parse(item), render, column))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            problems.append(CompressorError(f"{place}: not a document", got=str(item)[:60], expected=expected))
    if problems:
        raise Problems(f"--calibration {source}: {len(problems)} unusable lines", problems[:5])
    return [text for text in found if text.strip()]


def saved_dataset(path: Path, render: Render, column: str | None, budget: int, seed: int) -> list[str]:
    """A directory written by ``Dataset.save_to_disk``, read in an order drawn by seed up to ``budget`` characters.

    Raises:
        CompressorError: ``datasets`` is missing, the directory is none of its, or rows hold no document.
    """
    datasets = _module("datasets", path)
    try:
        table = _train_split(datasets.load_from_disk(str(path)))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise CompressorError(
            f"--calibration {path}: not a dataset saved by save_to_disk", got=reason, hint="name a file in it"
        ) from error
    order = list(range(len(table)))
    random.Random(seed).shuffle(order)
    rows = ((f"row {index + 1}", table[index]) for index in order)
    return _within(rows, path, render, column, budget)


def hub_dataset(name: str, render: Render, column: str | None, budget: int, seed: int) -> list[str]:
    """A dataset of the hub, ``OWNER/NAME`` or ``OWNER/NAME@CONFIG``, streamed up to ``budget`` characters.

    The order is that of a seeded buffer of 1,000 rows: nothing of it is stored.

    Raises:
        CompressorError: ``datasets`` is missing, no connection, no such dataset, or rows hold no document.
    """
    datasets = _module("datasets", name)
    repository, _, config = name.partition("@")
    try:
        table = _train_split(datasets.load_dataset(repository, config or None, streaming=True))
        rows = enumerate(table.shuffle(seed=seed, buffer_size=1000), start=1)
        return _within(((f"row {n}", row) for n, row in rows), name, render, column, budget)
    except CompressorError:
        raise
    except Exception as error:
        raise CompressorError(
            f"--calibration {name}: no such local file, and the hub dataset cannot be loaded",
            got=" ".join(f"{type(error).__name__}: {error}".split())[:200],
            hint="check the name and the connection, or use --calibration default",
        ) from error


def _within(
    rows: Iterable[tuple[str, Any]], source: object, render: Render, column: str | None, budget: int
) -> list[str]:
    """Documents of rows until ``budget`` characters are there."""
    found: list[str] = []
    read = 0
    for row in rows:
        documents = _documents([row], source, render, column)
        found += documents
        read += sum(map(len, documents))
        if read >= budget:
            break
    return found


def _train_split(loaded: Any) -> Any:
    """The ``train`` split of a dictionary of splits, or its first; a single table as it is."""
    if not isinstance(loaded, dict):
        return loaded
    return loaded["train"] if "train" in loaded else next(iter(loaded.values()))


def _module(name: str, source: object) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CompressorError(
            f"--calibration {source}: needs the package {name!r}", hint="pip install 'compressor[data]'"
        ) from error
