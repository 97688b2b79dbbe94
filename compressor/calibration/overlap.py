"""Whether a text was calibrated on: a small sample of the calibration tokens' 32-token shingles.

A shingle is 32 tokens in a row. Each is hashed to 64 bits; the smallest hashes are kept (bottom-k sampling),
together with the largest of them. Of another text only hashes up to that bound are looked up, so the share
found is an unbiased estimate of the share of its shingles that calibration saw.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHINGLE = 32
"""Tokens in a row that count as the same text."""
KEPT = 8192
WARN_SHARE = 0.01
"""Share of a text's shingles from which a user is warned."""


@dataclass(frozen=True)
class Sketch:
    """A sample of hashes.

    Attributes:
        hashes: uint64, ascending, without repetition.
        bound: Every hash of the text that is at most this is in ``hashes``.
    """

    hashes: NDArray[np.uint64]
    bound: int

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict: the hashes as base64 of little-endian 64-bit words."""
        words = self.hashes.astype("<u8").tobytes()
        return {"shingle": SHINGLE, "bound": f"{self.bound:016x}", "hashes": base64.b64encode(words).decode()}

    @classmethod
    def from_json(cls, stored: object) -> Sketch | None:
        """What ``to_json`` gave; None for anything else (an older artifact, a damaged file)."""
        if not isinstance(stored, dict) or stored.get("shingle") != SHINGLE:
            return None
        try:
            words = base64.b64decode(stored["hashes"], validate=True)
            bound = min(int(stored["bound"], 16), 2**64 - 1)
            return cls(np.sort(np.frombuffer(words, dtype="<u8").astype(np.uint64)), max(0, bound))
        except (KeyError, ValueError, TypeError, binascii.Error):
            return None


def shingle_hashes(rows: Iterable[Sequence[int]]) -> NDArray[np.uint64]:
    """Hashes uint64 of every shingle of rows of token ids, ascending, each once. Shorter rows have none."""
    found = [_row_hashes(np.asarray(row, dtype=np.uint64)) for row in rows]
    return np.unique(np.concatenate([np.empty(0, dtype=np.uint64), *found]))


def _row_hashes(ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A sum of tokens by fixed random odd weights, then mixed (modulo 2^64 throughout)."""
    if len(ids) < SHINGLE:
        return np.empty(0, dtype=np.uint64)
    weights = _mixed(np.arange(1, SHINGLE + 1, dtype=np.uint64)) | np.uint64(1)
    tokens = _mixed(ids + np.uint64(1))
    count = len(ids) - SHINGLE + 1
    total = np.zeros(count, dtype=np.uint64)
    for offset in range(SHINGLE):
        total += tokens[offset : offset + count] * weights[offset]
    return _mixed(total)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014): every input bit moves every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def sketch(rows: Iterable[Sequence[int]], kept: int = KEPT) -> Sketch:
    """A sample of at most ``kept`` hashes of rows of token ids."""
    hashes = shingle_hashes(rows)
    if len(hashes) <= kept:
        return Sketch(hashes, 2**64 - 1)
    return Sketch(hashes[:kept], int(hashes[kept - 1]))


def overlap_share(stored: Sketch, rows: Iterable[Sequence[int]]) -> float:
    """The estimated share of the shingles of rows that the sketched text holds, 0 to 1."""
    hashes = shingle_hashes(rows)
    seen = hashes[hashes <= np.uint64(stored.bound)]
    return float(np.isin(seen, stored.hashes).mean()) if len(seen) else 0.0


def stored_sketch(artifact: Path) -> Sketch | None:
    """The sketch in an artifact's report.json; None where there is no artifact, report or sketch."""
    try:
        report = json.loads((artifact / "report.json").read_bytes())
        return Sketch.from_json(report["facts"]["calibration"]["overlap"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
