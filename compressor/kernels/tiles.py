"""Rectangles of a matrix that share a scale."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """Rows and columns that share a scale; tiles at the right and lower edges may be smaller."""

    rows: int
    columns: int
