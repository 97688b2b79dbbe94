"""Regular expressions from recipes and model files: compiled, or refused with the reason."""

from __future__ import annotations

import re
import re._parser as parser  # type: ignore[import-not-found]
from typing import Any

MAX_LENGTH = 10_000
_REPEATS = {parser.MAX_REPEAT, parser.MIN_REPEAT}


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A pattern that cannot take exponential time: no unbounded repeat inside another.

    Raises:
        ValueError: not a regular expression, too long, or with nested repeats.
    """
    if len(pattern) > MAX_LENGTH:
        raise ValueError(f"longer than {MAX_LENGTH} characters")
    try:
        compiled = re.compile(pattern)
        nested = _nests(parser.parse(pattern), inside=False)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from error
    if nested:
        raise ValueError("a repeat inside a repeat can take forever to match")
    return compiled


def _nests(tree: Any, inside: bool) -> bool:
    """Whether an unbounded repeat stands inside another."""
    for operation, argument in tree:
        repeat = operation in _REPEATS and argument[1] == parser.MAXREPEAT
        if repeat and inside:
            return True
        for part in argument if isinstance(argument, tuple | list) else [argument]:
            for branch in part if isinstance(part, list) else [part]:
                if isinstance(branch, parser.SubPattern) and _nests(branch, inside or repeat):
                    return True
    return False
