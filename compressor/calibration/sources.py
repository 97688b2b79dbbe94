"""What ``--calibration`` may name, as documents: bundled sets, mixes, local files, datasets, ``self``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from compressor.calibration import records
from compressor.calibration.chat import Message
from compressor.errors import CompressorError
from compressor.shipped import shipped_folder

HELD_OUT = "held_out"
"""The bundled evaluation set: never part of calibration."""
SELF = "self"
"""Text sampled from the model itself."""

Render = Callable[[list[Message]], str]


@dataclass(frozen=True)
class Part:
    """One part of a source.

    Attributes:
        label: What the user called it.
        wanted: Windows it is to give.
        documents: Its texts, or None where the model writes them (``self``).
        separate: Whether they are documents of their own, rather than pieces of one text.
    """

    label: str
    wanted: int
    documents: list[str] | None
    separate: bool = True


def bundled_names() -> list[str]:
    """Names of the bundled calibration sets (the evaluation set is not among them)."""
    return sorted(path.stem for path in _bundled_files() if path.stem != HELD_OUT)


def bundled_text(name: str) -> str:
    """A bundled set's file content (.txt: documents divided by blank lines; .jsonl: one per line).

    Raises:
        CompressorError: no such set.
    """
    return _bundled_file(name).read_bytes().decode("utf-8")


def _bundled_files() -> list[Path]:
    folder = shipped_folder("calibration_data")
    return [*folder.glob("*.txt"), *folder.glob("*.jsonl")]


def _bundled_file(name: str) -> Path:
    found = {path.stem: path for path in _bundled_files()}
    if name not in found:
        raise CompressorError(f"{name}: no such bundled text", expected=", ".join([*bundled_names(), HELD_OUT]))
    return found[name]


def bundled_documents(name: str, render: Render) -> list[str]:
    """The documents of a bundled set, dialogues rendered."""
    path = _bundled_file(name)
    if path.suffix == ".jsonl":
        return records.json_lines(path, render, None)
    return [document for document in bundled_text(name).strip().split("\n\n") if document.strip()]


def parts_of(source: str, samples: int, render: Render, *, budget: int, seed: int) -> list[Part]:
    """The parts of a source, ``samples`` windows shared among them by weight.

    Args:
        source: As the user wrote it.
        samples: Windows in all.
        render: Dialogue to text.
        budget: Characters after which reading a dataset may stop.
        seed: Order in which a dataset is read.

    Raises:
        CompressorError: no such source, unreadable, or no document in it.
    """
    if ":" in source and not Path(source).exists():
        return _mix(source, samples, render, budget, seed)
    if source == SELF:
        return [Part(source, samples, None)]
    if source == "default":
        documents = [text for name in bundled_names() for text in bundled_documents(name, render)]
        return [Part(source, samples, documents)]
    if source in bundled_names():
        return [Part(source, samples, bundled_documents(source, render))]
    return [_outside(source, samples, render, budget, seed)]


def _mix(source: str, samples: int, render: Render, budget: int, seed: int) -> list[Part]:
    """``prose:40,code:20`` -> each source with its share of the windows."""
    weights = []
    for item in source.split(","):
        name, _, weight = item.strip().rpartition(":")
        if not name or not weight.isdecimal() or int(weight) == 0:
            raise CompressorError(f"--calibration {source}", got=repr(item), expected="NAME:WEIGHT, e.g. prose:40")
        weights.append((name, int(weight)))
    total, given, parts = sum(weight for _, weight in weights), 0, []
    for index, (name, _) in enumerate(weights):
        upto = sum(w for _, w in weights[: index + 1]) * samples // total
        found = parts_of(name, max(1, upto - given), render, budget=budget, seed=seed)
        if upto > given:
            parts += found
        given = upto
    return parts


def _outside(source: str, samples: int, render: Render, budget: int, seed: int) -> Part:
    """A local file, a directory saved by ``datasets``, or a dataset of the hub; ``#FIELD`` names the column."""
    name, _, field = (source, "", "") if Path(source).exists() else source.partition("#")
    path = Path(name)
    if name == HELD_OUT and not path.exists():
        raise CompressorError(f"--calibration {source}: this text is for evaluation only")
    column = field or None
    if path.is_dir():
        return Part(source, samples, records.saved_dataset(path, render, column, budget, seed))
    if path.is_file():
        return _file(source, path, samples, render, column)
    if re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w.-]+)?", name) and path.suffix not in records.SUFFIXES:
        return Part(source, samples, records.hub_dataset(name, render, column, budget, seed))
    names = ["default", SELF, *bundled_names()]
    close = difflib.get_close_matches(name, names, n=1)
    raise CompressorError(
        f"--calibration {source}: no such text",
        expected="a .txt, .jsonl or .parquet file, a saved dataset, OWNER/NAME on the hub, or one of "
        + ", ".join(names),
        hint=f"did you mean {close[0]!r}?" if close else None,
    )


def _file(source: str, path: Path, samples: int, render: Render, column: str | None) -> Part:
    if path.suffix == ".jsonl":
        return Part(source, samples, records.json_lines(path, render, column))
    if path.suffix == ".parquet":
        return Part(source, samples, records.parquet(path, render, column))
    if column is not None:
        raise CompressorError(f"--calibration {source}: a text file has no fields", hint=f"--calibration {path}")
    return Part(source, samples, pieces(records.text_of(path)), separate=False)


def pieces(text: str) -> list[str]:
    """Text split where lines are blank, joined again to pieces of about 1,000 characters."""
    found: list[str] = []
    for part in re.split(r"\n(?:[^\S\n]*\n)+", text):
        if found and len(found[-1]) < 1000:
            found[-1] += "\n\n" + part
        else:
            found.append(part)
    return [piece for piece in found if piece.strip()]
