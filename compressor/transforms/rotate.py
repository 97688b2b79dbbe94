"""Rotation: the residual stream and the value heads in another orthogonal basis, the function unchanged.

A block reads the stream x through an RMS norm: W (g * x / rms(x)). With Q orthogonal, rms(x Q) = rms(x), so
once g is folded into W the stream may be x Q throughout: readers become (W diag(g)) Q, writers Q^T W, the
embedding E Q, the head (E or its own weight) diag(g) Q. Each value head may likewise be h V: rows of v_proj
V^T W, columns of o_proj W V. Outliers of single channels spread over all of them, and weights come close to
Gaussian, which suits rounding with one scale per row.

Source: S. Ashkboos et al., "QuaRot" (2024), section 4; Z. Liu et al., "SpinQuant" (2024), R1 and R2. Nothing
here needs support from an engine: rotations an engine would have to run are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compressor.arch.base import Config, Family
from compressor.checkpoint.base import Checkpoint, TensorInfo
from compressor.checkpoint.files import check_finite
from compressor.core.tensors import RawTensor
from compressor.errors import CompressorError
from compressor.kernels.floats import FLOAT_BYTES, all_finite, decode_float, encode_float, round_to_dtype
from compressor.kernels.rotations import Rotation, hadamard_orders, random_hadamard, random_orthogonal
from compressor.transforms.base import TransformedCheckpoint, TransformOptions

PIECE = 1 << 18  # elements rotated at once: bounds the float64 temporaries
WORKING_BYTES = 5 * 8 * PIECE


class Options(TransformOptions):
    """Options of rotate."""

    kind: Literal["hadamard", "orthogonal"] = Field(
        "hadamard", description="a Hadamard matrix with random signs (fast, most widths), or any orthogonal matrix"
    )
    seed: int = Field(0, ge=0, description="of the random matrices")
    values: bool = Field(True, description="rotate each value head too, between v_proj and o_proj")


@dataclass(frozen=True)
class Change:
    """How one tensor of the rotated model comes from one of the source.

    Attributes:
        source: The tensor it is made from.
        ones: It is a folded norm: all ones, nothing else applies.
        fold: Norm weight its columns are multiplied by.
        columns, rows: Rotation of that axis, ``stream`` or ``heads`` (head by head), or None. A bias has
            rows only in name: as one row of ``columns``.
    """

    source: str
    ones: bool = False
    fold: str | None = None
    columns: str | None = None
    rows: str | None = None


def problems(config: Config, family: Family, options: Options) -> list[CompressorError]:
    """Why a model cannot be rotated this way: its norms, its block's shape, or a width without a matrix."""
    found = _structure(family)
    dims = family.dims(config)
    widths = {"hidden": dims["hidden"], **({"head_dim": dims["head_dim"]} if options.values else {})}
    if options.kind == "hadamard":
        found += [
            CompressorError(f"no Hadamard matrix for {name} {width}", hint="kind: orthogonal takes every width")
            for name, width in widths.items()
            if hadamard_orders(width) is None
        ]
    return found


def _structure(family: Family) -> list[CompressorError]:
    """What stands between the stream and its readers or writers and does not turn with it."""
    if family.norm_kind != "rms":
        return [
            CompressorError(
                f"family {family.name}: its norms cannot be folded",
                got=f"norm_kind {family.norm_kind!r}",
                expected="rms: x / rms(x) * weight",
            )
        ]
    sources = {pair.source for pair in family.pairs if pair.kind == "norm"}
    readers = {name for pair in family.pairs if pair.kind == "norm" for name in pair.consumers}
    bad = [norm.name for norm in family.norms if norm.size == "hidden" and norm.name not in sources]
    bad += [x.name for x in family.linears if x.in_ == "hidden" and x.name not in readers]
    bad += [x.name for x in family.linears if x.out == "hidden" and x.name not in family.writers]
    return [
        CompressorError(f"family {family.name}: {name} touches the residual stream outside norm pairs and writers")
        for name in bad
    ]


def present(config: Config, family: Family, options: Options) -> dict[str, Any]:
    """The config of the rotated model: its head is a tensor of its own."""
    return {**config, "tie_word_embeddings": False}


def notes(config: Config, family: Family, options: Options) -> list[str]:
    """What the rotation does, and what untying the head costs."""
    dims = family.dims(config)
    heads = f", value heads of width {dims['head_dim']}" if options.values and _heads_pairs(family) else ""
    lines = [
        f"rotated: residual stream of width {dims['hidden']}{heads} ({options.kind}, seed {options.seed});"
        " norms folded into the linears that read them"
    ]
    if family.tied(config):
        elements = dims["vocab"] * dims["hidden"]
        lines.append(
            f"rotation unties the head from the embedding: {family.head}.weight is a tensor of its own,"
            f" {elements:,} more weights ({2 * elements / 1e6:.1f} MB as 16-bit floats)"
        )
    return lines


def memory(config: Config, family: Family, options: Options) -> int:
    """Bytes of the orthogonal matrices (float64), of rotated pieces, and of the rotated embedding or head."""
    dims = family.dims(config)
    kept = 8 * (dims["hidden"] ** 2 + dims["head_dim"] ** 2) if options.kind == "orthogonal" else 0
    making = 2 * 8 * dims["hidden"] ** 2 if options.kind == "orthogonal" else 0
    return kept + max(making, WORKING_BYTES + 2 * dims["vocab"] * dims["hidden"])


def view(checkpoint: Checkpoint, family: Family, options: Options) -> RotatedCheckpoint:
    """The rotated model."""
    return RotatedCheckpoint(checkpoint, family, options)


def _heads_pairs(family: Family) -> list[tuple[str, tuple[str, ...]]]:
    return [(pair.source, pair.consumers) for pair in family.pairs if pair.heads]


def changes(config: Config, family: Family, options: Options) -> dict[str, Change]:
    """Every tensor the rotation touches, by its name in the rotated model (biases whether or not there are)."""
    final, embedding = f"{family.final_norm}.weight", f"{family.embedding}.weight"
    head = f"{family.head}.weight"
    found = {
        embedding: Change(embedding, columns="stream"),
        final: Change(final, ones=True),
        head: Change(embedding if family.tied(config) else head, fold=final, columns="stream"),
    }
    for layer in range(family.dims(config)["layers"]):
        prefix = family.block(layer) + "."
        found |= {prefix + name: change for name, change in _block_changes(family, prefix, options)}
    return found


def _block_changes(family: Family, prefix: str, options: Options) -> Iterator[tuple[str, Change]]:
    norm_of = {name: pair.source for pair in family.pairs if pair.kind == "norm" for name in pair.consumers}
    values = _heads_pairs(family) if options.values else []
    givers = {source for source, _ in values}
    takers = {name for _, consumers in values for name in consumers}
    for norm in dict.fromkeys(norm_of.values()):
        yield f"{norm}.weight", Change(f"{prefix}{norm}.weight", ones=True)
    for linear in family.linears:
        name = linear.name
        rows = "stream" if name in family.writers else "heads" if name in givers else None
        columns = "stream" if name in norm_of else "heads" if name in takers else None
        fold = f"{prefix}{norm_of[name]}.weight" if name in norm_of else None
        yield f"{name}.weight", Change(f"{prefix}{name}.weight", fold=fold, columns=columns, rows=rows)
        if rows is not None:
            yield f"{name}.bias", Change(f"{prefix}{name}.bias", columns=rows)


class RotatedCheckpoint(TransformedCheckpoint):
    """The rotated model, tensor by tensor; nothing is kept but the orthogonal matrices.

    ``raw`` gives tensors in the source's dtype (F64 as F32). ``read`` gives matrices in float32 without
    that rounding, since they are what gets quantized, and vectors as they are stored.
    """

    def __init__(self, source: Checkpoint, family: Family, options: Options) -> None:
        self.source, self.family, self.options = source, family, options
        self.label, self.path = source.label, source.path
        self.config = present(source.config, family, options)
        wanted = changes(source.config, family, options)
        self._changes = {name: change for name, change in wanted.items() if change.source in source.tensors}
        self.tensors = dict(self._present())
        self.notes = [*source.notes, *notes(source.config, family, options), *self._strangers()]

    def _present(self) -> Iterator[tuple[str, TensorInfo]]:
        """Headers: the source's, and the head's where it is new."""
        for name in dict.fromkeys([*self.source.tensors, *self._changes]):
            info = self.source.tensors[self._changes[name].source if name in self._changes else name]
            if name in self._changes and info.dtype == "F64":
                info = replace(info, dtype="F32", nbytes=info.nbytes // 2)
            yield name, replace(info, name=name)

    def _strangers(self) -> list[str]:
        """A note about tensors that no family file names: they may read or write the stream."""
        count = len(self.source.tensors.keys() - self.family.tensors(self.config).keys())
        if not count:
            return []
        return [f"{count} tensors unknown to family {self.family.name} are carried along without rotation"]

    @cached_property
    def _rotations(self) -> dict[str, Rotation]:
        dims = self.family.dims(self.config)
        make = random_hadamard if self.options.kind == "hadamard" else random_orthogonal
        return {
            "stream": make(dims["hidden"], (self.options.seed, 0)),
            "heads": make(dims["head_dim"], (self.options.seed, 1)),
        }

    def raw(self, name: str) -> RawTensor:
        """Bytes in the presented dtype."""
        change, info = self._changes.get(name), self.tensors[name]
        if change is None:
            return self.source.raw(name)
        if change.rows is not None or change.ones:
            data = encode_float(self._whole(change, info.shape), info.dtype)
        else:
            data = np.empty(info.nbytes, np.uint8)
            start = 0
            for rows in self._pieces(change):
                encoded = encode_float(rows, info.dtype)
                data[start : start + len(encoded)] = encoded
                start += len(encoded)
        if not all_finite(data, info.dtype):
            raise CompressorError(f"{name}: a rotated value is too large for {info.dtype}", hint="store it as BF16")
        return RawTensor(info.dtype, info.shape, data)

    def read(self, name: str) -> NDArray[np.float32]:
        """Float32 in its shape: matrices as computed, vectors rounded to the presented dtype."""
        change, info = self._changes.get(name), self.tensors[name]
        if change is None:
            return self.source.read(name)
        found = self._whole(change, info.shape)
        return found if len(info.shape) > 1 else round_to_dtype(found, info.dtype)

    def _whole(self, change: Change, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """One tensor, float32 in its shape."""
        if change.ones:
            return np.ones(shape, np.float32)
        found = np.empty(shape, np.float32)
        start, flat = 0, found.reshape(-1, shape[-1])
        for rows in self._pieces(change):
            flat[start : start + len(rows)] = rows
            start += len(rows)
        if change.rows is not None:
            self._rotate_rows(flat, self._rotations[change.rows])
        return found

    def _pieces(self, change: Change) -> Iterator[NDArray[np.float32]]:
        """Float32 [rows, in] pieces of the source's tensor, its columns folded and rotated."""
        raw = self.source.raw(change.source)
        width = raw.shape[-1]
        fold = self.source.read(change.fold) if change.fold else None
        step = max(1, PIECE // width)
        table = raw.data.reshape(-1, width * FLOAT_BYTES[raw.dtype])
        for start in range(0, len(table), step):
            rows = decode_float(table[start : start + step].reshape(-1), raw.dtype).reshape(-1, width)
            check_finite(rows, change.source, self.source.path)
            exact: NDArray[np.float64] = rows.astype(np.float64)
            if fold is not None:
                exact *= fold
            if change.columns is not None:
                rotation = self._rotations[change.columns]
                exact = rotation.apply(exact.reshape(-1, rotation.width)).reshape(exact.shape)
            yield exact.astype(np.float32)

    def _rotate_rows(self, matrix: NDArray[np.float32], rotation: Rotation) -> None:
        """W [out, in] -> Q^T W in place, groups of ``rotation.width`` rows each by themselves."""
        step = max(1, PIECE // len(matrix))
        for start in range(0, matrix.shape[1], step):
            columns = np.ascontiguousarray(matrix[:, start : start + step].T)
            rotated = rotation.apply(columns.reshape(-1, rotation.width)).reshape(columns.shape)
            matrix[:, start : start + step] = rotated.T

    def fingerprint(self) -> str:
        """sha256 over the source's fingerprint and the options."""
        options = json.dumps(self.options.model_dump(), sort_keys=True)
        return hashlib.sha256(f"{self.source.fingerprint()} rotate {options}".encode()).hexdigest()
