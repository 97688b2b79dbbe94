"""From data to a model, and from pydantic's errors to ours: file:line, what was got, a suggestion."""

from __future__ import annotations

import copy
import difflib
import functools
import operator
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from compressor.errors import CompressorError
from compressor.recipe.written import (
    CacheSection,
    Format,
    Layers,
    Match,
    RuleModel,
    Section,
    ShortModel,
)
from compressor.recipe.yamlmarks import Loc, line_of

Mistake = tuple[int, CompressorError]
"""A line and what is wrong on it."""

_SAFE = {"match": "ffn", "format": "int8", "precision": "int8"}
"""Stands in for a required value that is wrong, so that the rest can still be checked."""


def did_you_mean(wrong: str, known: Iterable[str], otherwise: str | None = None) -> str | None:
    """The hint for a word that is close to a known one."""
    close = difflib.get_close_matches(wrong.lower(), list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise


def validate(model: type[BaseModel], data: Any, lines: dict[Loc, int], path: Path) -> tuple[Any, list[Mistake]]:
    """Data as a model, and every mistake in it.

    With mistakes, the model is the data with the wrong values left out (None where that is not
    possible), so that names and options elsewhere can be checked in the same go.
    """
    try:
        return model.model_validate(data), []
    except ValidationError as error:
        items = error.errors()
    mistakes = [_explain(item, model, lines, path) for item in items]
    wrong = [_path(item["loc"], lines) for item in items if item["type"] != "missing"]
    try:
        return model.model_validate(_repaired(data, wrong)), mistakes
    except ValidationError:
        return None, mistakes


def _repaired(data: Any, wrong: list[Loc]) -> Any:
    """A copy where each wrong field of a rule or section is a harmless one, or left out."""
    fixed = copy.deepcopy(data)
    for loc in wrong:
        depth = min(len(loc), 3 if loc[:1] in (("rules",), ("quantization_config",)) else 1)
        try:
            parent: Any = functools.reduce(operator.getitem, loc[: depth - 1], fixed)
            if isinstance(parent, dict):
                del parent[loc[depth - 1]]
            else:
                parent[loc[depth - 1]] = {}
        except (LookupError, TypeError):
            continue  # left out already, with what it stood in
    needed = ("match", "format") if isinstance(fixed, dict) and "rules" in fixed else ("precision",)
    for section in _sections(fixed):
        for key in needed:
            section.setdefault(key, _SAFE[key])
    return fixed


def _sections(data: Any) -> list[dict[str, Any]]:
    """Rules of the long form, sections of the short one."""
    if not isinstance(data, dict):
        return []
    rules, short = data.get("rules"), data.get("quantization_config")
    found = rules if isinstance(rules, list) else list(short.values()) if isinstance(short, dict) else []
    return [section for section in found if isinstance(section, dict)]


def _explain(item: Any, model: type[BaseModel], lines: dict[Loc, int], path: Path) -> Mistake:
    """One of pydantic's errors as ours."""
    loc = _path(item["loc"], lines)
    line, got, kind = line_of(lines, loc), item.get("input"), item["type"]
    where, key = f"{path}:{line}", _spoken(loc)
    if kind == "extra_forbidden":
        wrong = str(item["loc"][-1])
        what, got, hint = f"unknown key {wrong!r}", None, did_you_mean(wrong, _known_keys(model, loc[:-1]))
    elif kind == "missing":
        what, got, hint = f"{key}: key {item['loc'][-1]!r} is missing", None, None
    elif kind == "literal_error":
        allowed = item["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
        name = [part for part in loc if isinstance(part, str)][-1]
        name = "role" if name == "match" else name
        expected, hint = allowed, did_you_mean(str(got), allowed.split(", "))
        return line, CompressorError(f"{where}: unknown {name} {got!r}", expected=expected, hint=hint)
    else:
        message = re.sub("^Value error, | or instance of .*$", "", item["msg"])
        what, hint = f"{key}: {message}", None
    shown = None if got is None else repr(got)[:80]
    return line, CompressorError(f"{where}: {what}", got=shown, hint=hint)


def _path(loc: Iterable[Any], lines: dict[Loc, int]) -> Loc:
    """The part of pydantic's location that stands in the file (it also names members of unions)."""
    kept: Loc = ()
    for part in loc:
        if (*kept, part) in lines:
            kept = (*kept, part)
    return kept


def _spoken(loc: Loc) -> str:
    """``rules, 1, format, bits`` -> ``rule 2: format.bits``."""
    if loc[:1] == ("rules",) and len(loc) > 1:
        rest = ".".join(map(str, loc[2:]))
        return f"rule {int(loc[1]) + 1}" + (f": {rest}" if rest else "")
    return ".".join(map(str, loc)) or "recipe"


def _known_keys(model: type[BaseModel], loc: Loc) -> list[str]:
    """The keys allowed at a path of the file."""
    nested: dict[str | int, type[BaseModel]] = {
        "rules": RuleModel,
        "match": Match,
        "format": Format,
        "layers": Layers,
        "quantization_config": ShortModel,
        "kv_cache": CacheSection,
    }
    for part in loc:
        short_section = model is ShortModel and part != "kv_cache"
        model = Section if short_section else nested.get(part, model)
    return list(model.model_fields)
