"""A GGUF file as a checkpoint: Hugging Face names, weights dequantized one tensor at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.arch.base import Family
from compressor.checkpoint.base import Checkpoint, TensorInfo
from compressor.checkpoint.files import check_finite, mapped, sample_hash
from compressor.checkpoint.gguf_config import ROPE_FREQS, find_gguf_family, make_config
from compressor.checkpoint.gguf_header import GgufHeader, GgufTensor, scan_gguf, tensor_types
from compressor.checkpoint.gguf_tokenizer import TokenizerFields, tokenizer_files
from compressor.core.tensors import RawTensor
from compressor.errors import CompressorError
from compressor.kernels.floats import FLOAT_BYTES, decode_float, encode_float, round_to_dtype

_CHUNK = 1 << 24
"""Elements dequantized at once: bounds the temporaries of a large embedding."""


@dataclass(frozen=True)
class _Source:
    """Where a Hugging Face tensor comes from; heads > 0: its rows are permuted for rotary pairs."""

    tensor: GgufTensor
    heads: int


class GgufCheckpoint(Checkpoint):
    """A GGUF whose family we know. Quantized weights are presented as BF16, rounded once.

    Attributes:
        exact: Let ``read`` give the file's own values, not rounded to the presented dtype: what an
            engine computes with. For scoring and comparing; a model to quantize is read as presented.
    """

    def __init__(self, path: Path, label: str | None = None) -> None:
        self.label, self.path = label or str(path), path
        self.exact = False
        self._header = scan_gguf(path)
        family = find_gguf_family(self._header, path)
        dtype = _presented_dtype(self._header, path)
        self.config: dict[str, Any] = make_config(self._header, path, dtype)
        self._sources = _sources(self._header, family, self.config, path)
        self.tensors = {name: self._info(name, source, dtype) for name, source in self._sources.items()}
        self._tokenizer = TokenizerFields.of(self._header, path)
        self.notes = [*_quantized_notes(self._header, dtype), *self._tokenizer.notes()]

    def _info(self, name: str, source: _Source, dtype: str) -> TensorInfo:
        stored = source.tensor
        nbytes = int(np.prod(stored.shape, dtype=object)) * FLOAT_BYTES[dtype]
        stored_as = None if stored.type_name == dtype else stored.type_name
        return TensorInfo(name, dtype, stored.shape, nbytes, self.path.name, stored_as)

    @property
    def pretokenizer(self) -> str | None:
        """llama.cpp's name of the pre-tokenizer (``tokenizer.ggml.pre``)."""
        return self._tokenizer.pre

    @property
    def add_bos_token(self) -> bool:
        """Whether encoding starts with BOS, llama.cpp's default where the file does not say."""
        return self._tokenizer.add_bos

    def raw(self, name: str) -> RawTensor:
        """The presented bytes: stored floats as they are, anything else rounded to the presented dtype."""
        info = self.tensors[name]
        return RawTensor(info.dtype, info.shape, encode_float(self.read(name), info.dtype))

    def read(self, name: str) -> NDArray[np.float32]:
        """Float32 in its shape, every value representable in the presented dtype."""
        source, info = self._sources[name], self.tensors[name]
        values = _dequantize(source.tensor, self.path)
        if info.stored_as is not None and not self.exact:
            values = round_to_dtype(values, info.dtype)
        if source.heads:
            values = unpermute(values, source.heads)
        check_finite(values, name, self.path)
        return values

    def side_files(self) -> dict[str, Path | bytes]:
        """Tokenizer, template and generation defaults, made from the metadata."""
        return dict(self._side_files)

    @cached_property
    def _side_files(self) -> dict[str, bytes]:
        return tokenizer_files(self._tokenizer, self._header, int(self.config["max_position_embeddings"]))

    def fingerprint(self) -> str:
        """sha256 over config, names, stored types, shapes and samples of every tensor as stored."""
        return sample_hash(
            self.config,
            (
                (
                    f"{name} {s.tensor.type_name} {s.tensor.shape}",
                    self.path,
                    s.tensor.start,
                    s.tensor.nbytes,
                )
                for name, s in sorted(self._sources.items())
            ),
        )


def unpermute(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of rotary rows.

    Args:
        values: float32 [rows, ...]; in each head the pair (i, i + half) lies side by side.
        heads: Number of heads in ``rows``.

    Returns:
        float32 [rows, ...], each head's first halves before its second halves.
    """
    half = values.shape[0] // heads // 2
    pairs = values.reshape(heads, half, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _dequantize(tensor: GgufTensor, path: Path) -> NDArray[np.float32]:
    """The stored tensor as a fresh float32 array, row chunk by row chunk."""
    data = mapped(path, tensor.start, tensor.nbytes)
    if tensor.type_name in FLOAT_BYTES:
        return decode_float(data, tensor.type_name).reshape(tensor.shape)
    import gguf

    kind = gguf.GGMLQuantizationType[tensor.type_name]
    columns = tensor.shape[-1]
    out = np.empty((int(np.prod(tensor.shape[:-1])), columns), np.float32)
    packed = data.reshape(out.shape[0], -1)
    step = max(1, _CHUNK // columns)
    for start in range(0, len(out), step):
        with np.errstate(invalid="ignore", over="ignore"):
            out[start : start + step] = gguf.dequantize(packed[start : start + step], kind)
    return out.reshape(tensor.shape)


def _presented_dtype(header: GgufHeader, path: Path) -> str:
    """One dtype for the whole model: what all matrices share, F32 for mixed floats, BF16 if quantized."""
    kinds = {tensor.type_name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    for kind in sorted({tensor.type_name for tensor in header.tensors.values()}):
        _check_readable(kind, path)
    if kinds - set(FLOAT_BYTES):
        return "BF16"
    return kinds.pop() if len(kinds) == 1 and kinds != {"F64"} else "F32"


def _check_readable(kind: str, path: Path) -> None:
    """Refuse a ggml type that no dequantizer knows, by trying it on an empty block."""
    if kind in FLOAT_BYTES:
        return
    import gguf

    block_bytes = {name: size for name, _, size in tensor_types().values()}[kind]
    try:
        gguf.dequantize(np.zeros((1, block_bytes), np.uint8), gguf.GGMLQuantizationType[kind])
    except NotImplementedError as error:
        raise CompressorError(
            f"{path}: tensors of ggml type {kind} cannot be read",
            hint="pass the original Hugging Face model directory instead",
        ) from error


def _sources(header: GgufHeader, family: Family, config: Mapping[str, Any], path: Path) -> dict[str, _Source]:
    """Every tensor by its Hugging Face name, in walk order; a tensor without one is refused."""
    dims = family.dims(config)
    names = {f"{family.embedding}.weight": ("token_embd.weight", 0)}
    for layer in range(dims["layers"]):
        for linear in family.linears:
            heads = dims[linear.rope_heads] if linear.rope_heads else 0
            for part in ("weight", "bias"):
                hf_name = f"{family.block(layer)}.{linear.name}.{part}"
                names[hf_name] = (f"blk.{layer}.{linear.gguf}.{part}", heads)
        for norm in family.norms:
            names[f"{family.block(layer)}.{norm.name}.weight"] = (f"blk.{layer}.{norm.gguf}.weight", 0)
    names[f"{family.final_norm}.weight"] = ("output_norm.weight", 0)
    names[f"{family.head}.weight"] = ("output.weight", 0)
    known = {gguf_name for gguf_name, _ in names.values()} | {ROPE_FREQS}
    if unknown := [name for name in header.tensors if name not in known]:
        raise CompressorError(
            f"{path}: tensors that family {family.name} does not have",
            got=", ".join(unknown[:5]) + (" ..." if len(unknown) > 5 else ""),
            hint="pass the original Hugging Face model directory instead",
        )
    found = {}
    for hf_name, (gguf_name, heads) in names.items():
        if tensor := header.tensors.get(gguf_name):
            if heads and tensor.shape[0] % (2 * heads):
                expected = f"a multiple of {2 * heads}"
                raise CompressorError(f"{path}: rows of {gguf_name}", got=tensor.shape[0], expected=expected)
            found[hf_name] = _Source(tensor, heads)
    return found


def _quantized_notes(header: GgufHeader, dtype: str) -> list[str]:
    """The loud sentence about weights that were quantized before."""
    counts = Counter(t.type_name for t in header.tensors.values() if t.type_name not in FLOAT_BYTES)
    if not counts:
        return []
    kinds = ", ".join(f"{kind} ({count} tensor{'s' if count > 1 else ''})" for kind, count in counts.most_common())
    return [
        f"weights dequantized from {kinds} to {dtype}: requantizing a quantized model loses quality; "
        "prefer the original checkpoint"
    ]
