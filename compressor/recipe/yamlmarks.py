"""YAML with line numbers: plain data plus a map from each path to the line it stands on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from compressor.errors import CompressorError

Loc = tuple[str | int, ...]
MAX_BYTES = 1_000_000
MAX_DEPTH = 20


class _Loader(yaml.SafeLoader):
    """SafeLoader without aliases or deep nesting: a small file cannot grow without bound."""

    depth = 0

    def compose_node(self, parent: Any, index: int) -> Any:
        """Compose one node, refusing aliases and deep nesting."""
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "anchors and aliases are not allowed", mark)
        if self.depth == MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"nested more than {MAX_DEPTH} deep", mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Construct one value; what Python refuses (day 99, 5000 digits) is an error with a line."""
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
            text = f"not a value of its type: {str(node.value)[:40]!r}"
            raise yaml.constructor.ConstructorError(None, None, text, node.start_mark) from error


def load_yaml(path: Path) -> tuple[Any, dict[Loc, int]]:
    """Data of a YAML file and the 1-based line of every path in it.

    Raises:
        CompressorError: missing, too large, not UTF-8, not YAML, or a key twice; with file:line.
    """
    text = _text(path)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        data = loader.construct_document(node) if node is not None else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise CompressorError(f"{where}: not valid YAML", got=getattr(error, "problem", error)) from error
    lines: dict[Loc, int] = {(): 1}
    if node is not None:
        _mark(node, (), lines, path)
    return data, lines


def line_of(lines: dict[Loc, int], loc: Loc) -> int:
    """The line of a path, or of its nearest ancestor in the file."""
    while loc not in lines:
        loc = loc[:-1]
    return lines[loc]


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CompressorError(f"{path}: too large for a recipe", expected=f"at most {MAX_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CompressorError(f"{path}: cannot be read as a recipe", got=str(error)) from error


def _mark(node: yaml.Node, loc: Loc, lines: dict[Loc, int], path: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*loc, str(key.value))
            if inner in lines:
                raise CompressorError(
                    f"{path}:{key.start_mark.line + 1}: key {key.value!r} stands twice",
                    got=f"first on line {lines[inner]}",
                )
            lines[inner] = key.start_mark.line + 1
            _mark(value, inner, lines, path)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*loc, index)] = value.start_mark.line + 1
            _mark(value, (*loc, index), lines, path)
