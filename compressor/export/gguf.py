"""GGUF: llama.cpp's file. Integer codes are carried as they are, never rounded again.

One tensor is in memory at a time; afterwards every tensor is read back and compared with its source.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor import __version__
from compressor.arch import families, find_family
from compressor.arch.base import Config, Family
from compressor.checkpoint.base import Checkpoint
from compressor.core.report import Progress, Report
from compressor.core.tensors import QTensor
from compressor.errors import CompressorError, GateFailed, Problems
from compressor.export import gguf_metadata as metadata
from compressor.export import gguf_tokenizer as tokenizer
from compressor.export.gguf_codes import FLOAT_TYPES, choose_type, pack, permute, permuted, same
from compressor.kernels import ggml
from compressor.kernels.floats import encode_float

_MARK = "compressor.version"
_BITS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}


@dataclass(frozen=True)
class Entry:
    """One tensor of the file: GGUF name, checkpoint name, shape, ggml type, heads to permute rows by."""

    name: str
    source: str
    shape: tuple[int, ...]
    kind: str
    heads: int | None

    @property
    def nbytes(self) -> int:
        """Bytes in the file, without padding."""
        elements = int(np.prod(self.shape))
        if self.kind in ggml.BLOCK_BYTES:
            return elements // ggml.BLOCK * ggml.BLOCK_BYTES[self.kind]
        return elements * np.dtype(_BITS[self.kind][0]).itemsize


def names(family: Family, config: Config) -> dict[str, tuple[str, int | None]]:
    """Checkpoint name -> (GGUF name, heads to permute rows by) of every tensor the family can have."""
    dims = family.dims(config)
    found: dict[str, tuple[str, int | None]] = {f"{family.embedding}.weight": ("token_embd.weight", None)}
    for layer in range(dims["layers"]):
        for linear in family.linears:
            heads = dims[linear.rope_heads] if linear.rope_heads else None
            for part in ("weight", "bias"):
                source = f"{family.block(layer)}.{linear.name}.{part}"
                found[source] = (f"blk.{layer}.{linear.gguf}.{part}", heads)
        for norm in family.norms:
            found[f"{family.block(layer)}.{norm.name}.weight"] = (f"blk.{layer}.{norm.gguf}.weight", None)
    found[f"{family.final_norm}.weight"] = ("output_norm.weight", None)
    found[f"{family.head}.weight"] = ("output.weight", None)
    return found


def check(checkpoint: Checkpoint, family: Family, pretokenizer: str | None = None) -> list[CompressorError]:
    """Everything that would stop the export, before any byte is written."""
    if family.gguf_arch is None:
        able = sorted(name for name, other in families().items() if other.gguf_arch)
        return [
            CompressorError(
                f"{checkpoint.label}: no GGUF export for family {family.name} yet",
                expected="one of " + ", ".join(able),
                hint="--format compressed-tensors",
            )
        ]
    problems = metadata.check_config(family, checkpoint.config)
    problems += _check_tensors(checkpoint, family)
    try:
        _vocabulary(checkpoint, family, pretokenizer)
    except CompressorError as error:
        problems.append(error)
    return problems


def _check_tensors(checkpoint: Checkpoint, family: Family) -> list[CompressorError]:
    """Missing, misshapen and surplus tensors; a tied head that differs from the embedding."""
    problems = []
    expected = family.tensors(checkpoint.config)
    for name, wanted in expected.items():
        found = checkpoint.tensors.get(name)
        if found is None or tuple(found.shape) != wanted.shape:
            got = "nothing" if found is None else tuple(found.shape)
            problems.append(CompressorError(f"{name}: not as config.json says", got=got, expected=wanted.shape))
    head = f"{family.head}.weight"
    known = {*expected, head}
    problems += [
        CompressorError(f"{name}: GGUF has no place for this tensor")
        for name in checkpoint.tensors
        if name not in known and not name.endswith("rotary_emb.inv_freq")
    ]
    tied = head not in expected and head in checkpoint.tensors
    if tied and not _equal(checkpoint, head, f"{family.embedding}.weight"):
        problems.append(
            CompressorError(
                f"{head}: differs from the embedding though config.json ties them",
                hint="set tie_word_embeddings to false in config.json",
            )
        )
    return problems


def _equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Whether two tensors hold the same bytes (or codes and scales)."""
    left, right = _qtensor(checkpoint, one), _qtensor(checkpoint, other)
    if left is None or right is None:
        if (left is None) != (right is None):
            return False
        return np.array_equal(checkpoint.raw(one).data, checkpoint.raw(other).data)
    pairs = ((left.codes, right.codes), (left.scales, right.scales), (left.zeros, right.zeros))
    return left.spec == right.spec and all(np.array_equal(a, b) for a, b in pairs)  # type: ignore[arg-type]


def _qtensor(checkpoint: Checkpoint, name: str) -> QTensor | None:
    """A tensor's codes where the checkpoint has any."""
    read = getattr(checkpoint, "qtensor", None)
    return read(name) if read is not None else None


def _vocabulary(checkpoint: Checkpoint, family: Family, pretokenizer: str | None) -> tokenizer.Vocabulary:
    """The tokenizer; its pre-tokenizer as asked, else as the source recorded it, else by structure."""
    if pretokenizer is not None and pretokenizer not in tokenizer.KNOWN:
        raise CompressorError(
            f"pretokenizer {pretokenizer!r} is unknown", expected="one of " + ", ".join(tokenizer.KNOWN)
        )
    name = pretokenizer or getattr(checkpoint, "pretokenizer", None)
    rows = family.dims(checkpoint.config)["vocab"]
    return tokenizer.load(checkpoint.side_files(), checkpoint.config, rows, name)


def export(
    artifact: Checkpoint,
    out: Path,
    *,
    pretokenizer: str | None,
    float_type: str | None,
    progress: Progress,
    report: Report,
) -> dict[str, Any]:
    """Write a GGUF and prove it by reading it back.

    Args:
        artifact: Any checkpoint; codes are carried where it has a method ``qtensor``.
        out: The file. An earlier export of ours is replaced, anything else refused.
        pretokenizer: llama.cpp's name for the pre-tokenizer, None to find it.
        float_type: F32, F16 or BF16 for matrices written as floats; None keeps a float's stored dtype.
        progress, report: Told as it goes.

    Returns:
        Facts: path, bytes, tensors by type, file_type, pretokenizer.

    Raises:
        CompressorError: the model cannot be a GGUF, or the file cannot be written.
        GateFailed: the file read back differs from its source.
    """
    float_type = float_type.upper() if float_type else None
    if float_type not in (None, *FLOAT_TYPES):
        raise CompressorError("float type is unknown", got=float_type, expected=", ".join(FLOAT_TYPES))
    family = find_family(artifact.config, artifact.label)
    problems = check(artifact, family, pretokenizer)
    if problems:
        raise Problems(f"{artifact.label} cannot become a GGUF", problems)
    vocabulary = _vocabulary(artifact, family, pretokenizer)
    for line in vocabulary.notes:
        report.note(line)
    window = artifact.config.get("sliding_window")
    if window and window < artifact.config.get("max_position_embeddings", 0):
        report.degrade(f"llama.cpp attends beyond the sliding window of {window} positions")
    if any(spec.activations for spec in getattr(artifact, "specs", {}).values()):
        report.note("how inputs are to be quantized is not carried: llama.cpp quantizes them its own way")
    entries = _entries(artifact, family, float_type, report)
    with _partial(out, artifact, sum(entry.nbytes for entry in entries)) as partial:
        _write(partial, artifact, family, vocabulary, entries, progress)
        _prove(partial, artifact, entries, progress)
    kinds = Counter(entry.kind for entry in entries)
    return {
        "path": str(out),
        "bytes": out.stat().st_size,
        "types": dict(sorted(kinds.items())),
        "file_type": _majority(entries),
        "pretokenizer": vocabulary.pre,
        "verified_tensors": len(entries),
    }


def _entries(artifact: Checkpoint, family: Family, float_type: str | None, report: Report) -> list[Entry]:
    """Every tensor of the file in order, with its type; codes that cannot be carried are reported."""
    renamed = names(family, artifact.config)
    found = []
    for source in family.tensors(artifact.config):
        info = artifact.tensors[source]
        choice = choose_type(_qtensor(artifact, source), info, float_type)
        if choice.reason:
            report.degrade(f"written to GGUF as {choice.kind}: {choice.reason}", source)
        name, heads = renamed[source]
        found.append(Entry(name, source, tuple(info.shape), choice.kind, heads))
    return found


def _majority(entries: list[Entry]) -> str:
    """The type most weights have."""
    weights: Counter[str] = Counter()
    for entry in entries:
        weights[entry.kind] += int(np.prod(entry.shape)) if len(entry.shape) > 1 else 0
    return max(weights, key=lambda kind: weights[kind])


@contextmanager
def _partial(out: Path, artifact: Checkpoint, nbytes: int) -> Iterator[Path]:
    """A path to write to; renamed to ``out`` when the block ends well, removed otherwise."""
    if out.exists() and not _ours(out, artifact):
        raise CompressorError(f"{out}: exists and is no earlier export", hint="name another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < nbytes:
        raise CompressorError(f"{out}: the disk is too full", got=f"{free} bytes", expected=f"{nbytes} bytes")
    partial = out.with_name(out.name + ".partial")
    try:
        yield partial
        partial.replace(out)
    except OSError as error:
        raise CompressorError(f"{out}: cannot be written", got=error) from error
    finally:
        partial.unlink(missing_ok=True)


def _ours(out: Path, artifact: Checkpoint) -> bool:
    """Whether a file is an earlier export that may be replaced (and not the model being read)."""
    if not out.is_file() or out.resolve() == artifact.path.resolve():
        return False
    with out.open("rb") as file:
        return _MARK.encode() in file.read(4096)


def _write(
    path: Path,
    artifact: Checkpoint,
    family: Family,
    vocabulary: tokenizer.Vocabulary,
    entries: list[Entry],
    progress: Progress,
) -> None:
    """Header, metadata and tensor list, then tensor after tensor."""
    import gguf

    logging.getLogger("gguf").setLevel(logging.ERROR)
    writer = gguf.GGUFWriter(path, str(family.gguf_arch))
    _add_metadata(writer, artifact, family, entries)
    vocabulary.write(writer)
    factors = metadata.rope_factors(family, artifact.config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for entry in entries:
        kind = gguf.GGMLQuantizationType[entry.kind]
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), entry.nbytes, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for done, entry in enumerate(entries):
            progress("write", done, len(entries))
            writer.write_tensor_data(_data(artifact, entry))
        progress("write", len(entries), len(entries))
        writer.flush()
        for file in writer.fout:
            os.fsync(file.fileno())
    finally:
        writer.close()


def _add_metadata(writer: Any, artifact: Checkpoint, family: Family, entries: list[Entry]) -> None:
    """Every key that is not the tokenizer's."""
    import gguf

    total = sum(int(np.prod(entry.shape)) for entry in entries)
    files = tokenizer.Files(artifact.side_files())
    name = Path(str(artifact.config.get("_name_or_path") or artifact.path.stem)).name
    card, generation = files.text("README.md") or "", files.json("generation_config.json")
    about = metadata.general(name or family.name, card, generation)
    writer.add_string(_MARK, __version__)
    for key, value in about.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_int32)(key, value)
    writer.add_size_label(gguf.size_label(total, total, 0, 0))
    writer.add_file_type(metadata.FILE_TYPES[_majority(entries)])
    writer.add_quantization_version(2)
    for key, number in metadata.hyperparameters(family, artifact.config).items():
        if isinstance(number, str):
            writer.add_string(key, number)
        else:
            (writer.add_float32 if isinstance(number, float) else writer.add_uint32)(key, number)


def _data(artifact: Checkpoint, entry: Entry) -> NDArray[Any]:
    """The bytes of one tensor as the file has them."""
    tensor = _qtensor(artifact, entry.source)
    if tensor is not None and entry.kind in ggml.BLOCK_BYTES:
        return pack(permuted(tensor, entry.heads), entry.kind)
    dtype, exponent = _BITS[entry.kind]
    if tensor is None and artifact.tensors[entry.source].dtype == entry.kind:
        values = artifact.raw(entry.source).data.view(dtype).reshape(entry.shape)
    else:
        floats = artifact.read(entry.source) if tensor is None else tensor.dequantize()
        values = encode_float(floats, entry.kind).view(dtype).reshape(entry.shape)
    if bool(((values & exponent) == exponent).any()):
        raise CompressorError(
            f"{entry.source}: a value is NaN, infinite or too large for {entry.kind}",
            hint="--float-type BF16 holds every finite value",
        )
    return values if entry.heads is None else np.ascontiguousarray(permute(values, entry.heads))


def _prove(path: Path, artifact: Checkpoint, entries: list[Entry], progress: Progress) -> None:
    """Read every tensor back and compare it with its source.

    Raises:
        GateFailed: naming the first that differs.
    """
    import gguf

    stored: Mapping[str, Any] = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for done, entry in enumerate(entries):
        progress("prove", done, len(entries))
        found = stored.get(entry.name)
        if found is None or not _proved(path, artifact, entry, found):
            raise GateFailed(f"{entry.source}: read back from {path.name} it differs from its source")
    progress("prove", len(entries), len(entries))


def _proved(path: Path, artifact: Checkpoint, entry: Entry, found: Any) -> bool:
    """Whether one stored tensor (gguf.ReaderTensor) has the right shape, type and content."""
    shape = tuple(int(n) for n in reversed(found.shape))
    if shape != entry.shape or found.tensor_type.name != entry.kind or int(found.n_bytes) != entry.nbytes:
        return False
    data = np.fromfile(path, np.uint8, entry.nbytes, offset=int(found.data_offset))
    tensor = _qtensor(artifact, entry.source)
    if tensor is not None and entry.kind in ggml.BLOCK_BYTES:
        return same(permuted(tensor, entry.heads), entry.kind, data.reshape(entry.shape[0], -1))
    return np.array_equal(data.view(_BITS[entry.kind][0]), _data(artifact, entry).reshape(-1))
