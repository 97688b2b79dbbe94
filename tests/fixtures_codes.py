"""A checkpoint in memory that holds integer codes for some of its matrices: what exporters are fed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from compressor.checkpoint.base import Checkpoint
from compressor.checkpoint.reader import open_checkpoint
from compressor.core.spec import Spec
from compressor.core.tensors import QTensor


def random_codes(rows: int, columns: int, spec: Spec, seed: int = 0, deviation: float = 0.125) -> QTensor:
    """Seeded codes over the whole range; scales are powers of two times 1 .. 1.99 in eight bits."""
    rng = np.random.default_rng(seed)
    shape = spec.scales_shape(rows, columns)
    if spec.kind == "float":
        codes = rng.integers(0, 0x7F, (rows, columns), dtype=np.uint8)
        codes |= rng.integers(0, 2, codes.shape, dtype=np.uint8) << np.uint8(7)
        codes[0, :2] = 0xFE, 0x7E
    else:
        codes = rng.integers(spec.qmin, spec.qmax + 1, (rows, columns)).astype(np.int8)
        codes[0, :2] = spec.qmin, spec.qmax
    scales = (rng.integers(128, 256, shape) / 128).astype(np.float32)
    scales *= np.float32(2.0 ** np.round(np.log2(deviation / 2 ** (spec.bits - 1))))
    zeros = None if spec.symmetric else rng.integers(spec.qmin, spec.qmax + 1, shape).astype(np.int8)
    return QTensor(codes, scales, zeros, spec)


class CodedCheckpoint(Checkpoint):
    """A stored model whose matrices matching ``specs`` (name pattern -> Spec) have codes."""

    def __init__(self, source: Checkpoint, specs: Mapping[str, Spec]) -> None:
        self.source = source
        self.label, self.path, self.config = source.label, source.path, source.config
        self.tensors, self.notes = source.tensors, source.notes
        self.codes: dict[str, QTensor] = {}
        for seed, (name, info) in enumerate(sorted(source.tensors.items())):
            spec = next((spec for pattern, spec in specs.items() if fnmatch(name, pattern)), None)
            if spec is not None and len(info.shape) == 2:
                self.codes[name] = random_codes(*info.shape, spec, seed)

    def qtensor(self, name: str) -> QTensor | None:
        return self.codes.get(name)

    def raw(self, name: str) -> Any:
        return self.source.raw(name)

    def read(self, name: str) -> Any:
        return self.codes[name].dequantize() if name in self.codes else self.source.read(name)

    def side_files(self) -> dict[str, Path | bytes]:
        return self.source.side_files()

    def fingerprint(self) -> str:
        return self.source.fingerprint()


def coded(model: Path, specs: Mapping[str, Spec]) -> CodedCheckpoint:
    """A model directory with codes over the matrices that match."""
    return CodedCheckpoint(open_checkpoint(str(model)), specs)


def changed_copy(model: Path, target: Path, file: str, **changes: Any) -> Path:
    """A copy of a model directory with keys of one of its JSON files replaced."""
    shutil.copytree(model, target)
    settings = json.loads((target / file).read_text())
    (target / file).write_text(json.dumps({**settings, **changes}))
    return target
