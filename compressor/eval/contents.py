"""What a model or weight file holds: tensors as stored, metadata, tokenizer. Reads no weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from compressor.calibration.data import load_tokenizer
from compressor.calibration.packing import added_bos
from compressor.checkpoint.base import Checkpoint
from compressor.checkpoint.files import parse_json
from compressor.checkpoint.integrity import scan_gguf, scan_safetensors
from compressor.checkpoint.reader import DEMO, demo_file
from compressor.checkpoint.safetensors import MANIFEST
from compressor.errors import CompressorError
from compressor.models import open_model

_CONFIG_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip
_SHORTEST_LIST = 8


@dataclass(frozen=True)
class Stored:
    """One tensor as the file stores it: format, presented shape, bytes of all its parts."""

    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        """Number of values."""
        return prod(self.shape)


@dataclass(frozen=True)
class Contents:
    """Everything ``compress inspect`` shows; metadata and tokenizer are JSON-ready."""

    path: str
    kind: str
    tensors: list[Stored]
    metadata: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def formats(self) -> dict[str, dict[str, Any]]:
        """Tensors, bytes and bits per weight of each format, largest first."""
        groups: dict[str, list[Stored]] = defaultdict(list)
        for tensor in self.tensors:
            groups[tensor.format].append(tensor)
        ranked = sorted(groups.items(), key=lambda item: -sum(t.nbytes for t in item[1]))
        return {name: totals(group) for name, group in ranked}


def totals(tensors: list[Stored]) -> dict[str, Any]:
    """Tensors, weights, bytes and bits per weight of several tensors."""
    nbytes, elements = sum(t.nbytes for t in tensors), sum(t.elements for t in tensors)
    bits = round(8 * nbytes / max(1, elements), 4)
    return {"tensors": len(tensors), "weights": elements, "bytes": nbytes, "bits_per_weight": bits}


def read_contents(path: str) -> Contents:
    """Contents of a directory, an artifact, a .safetensors or GGUF file, or ``demo``.

    Raises:
        CompressorError: nothing there, no model, or a header that contradicts itself or its file.
    """
    source = Path(path)
    if path == DEMO and not source.exists():
        return _gguf_file(path, demo_file())
    if source.is_file():
        with source.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF" or source.suffix.lower() == ".gguf"
        if is_gguf:
            return _gguf_file(path, source)
        if source.suffix == ".safetensors":
            return _safetensors_file(path, source)
    return _model(path)


def _safetensors_file(path: str, file: Path) -> Contents:
    found = scan_safetensors(file)
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = parse_json(stream.read(length), file, "safetensors header")
    tensors = [Stored(t.name, t.dtype, t.shape, t.nbytes) for t in found.values()]
    return Contents(path, "safetensors file", tensors, dict(header.get("__metadata__", {})))


def _gguf_file(path: str, file: Path) -> Contents:
    header = scan_gguf(file)
    tensors = [Stored(t.name, t.type_name, t.shape, t.nbytes) for t in header.tensors.values()]
    metadata = {name: _short(value) for name, value in header.fields.items()}
    return Contents(path, f"GGUF v{header.version}", tensors, metadata, _gguf_tokenizer(header.fields))


def _gguf_tokenizer(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of ``tokenizer.*``, under the names used for every model."""
    tokens = fields.get("tokenizer.ggml.tokens")
    if tokens is None:
        return {}
    return {
        "type": _short(fields.get("tokenizer.ggml.model")),
        "splitting": _short(fields.get("tokenizer.ggml.pre")),
        "vocabulary": len(tokens),
        "bos_id": _short(fields.get("tokenizer.ggml.bos_token_id")),
        "eos_id": _short(fields.get("tokenizer.ggml.eos_token_id")),
        "adds_bos": _short(fields.get("tokenizer.ggml.add_bos_token")),
        "chat_template": "tokenizer.chat_template" in fields,
    }


def _model(path: str) -> Contents:
    model = open_model(path)
    section = getattr(model, "quantization_config", None)
    kind = f"{section['quant_method']} ({section.get('format')})" if section else "Hugging Face directory"
    tensors = [Stored(n, i.stored_as or i.dtype, i.shape, _nbytes(model, n)) for n, i in model.tensors.items()]
    metadata = {key: _short(model.config[key]) for key in _CONFIG_KEYS if key in model.config}
    files = model.side_files()
    return Contents(
        path,
        kind,
        tensors,
        {**metadata, **_manifest(model.path)},
        _hf_tokenizer(model, files),
        sorted(files),
        list(model.notes),
    )


def _nbytes(model: Checkpoint, name: str) -> int:
    """Bytes in the files behind one presented tensor."""
    if not hasattr(model, "stored_names"):
        return model.tensors[name].nbytes
    stored: Checkpoint = model.source  # type: ignore[attr-defined]
    return sum(stored.tensors[part].nbytes for part in model.stored_names(name))


def _manifest(path: Path) -> dict[str, Any]:
    """Who made an artifact, of what."""
    file = path / MANIFEST
    if not file.is_file():
        return {}
    manifest = parse_json(file.read_bytes(), file, MANIFEST)
    return {f"made_{name}": _short(manifest[key]) for key, name in _MADE.items() if key in manifest}


_MADE = {"version": "by_version", "source": "from"}


def _hf_tokenizer(model: Checkpoint, files: Mapping[str, Path | bytes]) -> dict[str, Any]:
    if "tokenizer.json" not in files:
        return {}
    try:
        tokenizer = load_tokenizer(model)
    except CompressorError as error:
        return {"damaged": error.what}
    settings = files.get("tokenizer_config.json", b"")
    text = settings if isinstance(settings, bytes) else settings.read_bytes()
    return {
        "type": type(tokenizer.model).__name__,
        "vocabulary": tokenizer.get_vocab_size(),
        "bos_id": _short(model.config.get("bos_token_id")),
        "eos_id": _short(model.config.get("eos_token_id")),
        "adds_bos": added_bos(tokenizer) is not None,
        "chat_template": "chat_template.jinja" in files or b'"chat_template"' in text,
    }


def _short(value: Any) -> Any:
    """A metadata value fit for a screen and for JSON."""
    if isinstance(value, bool | int | str) or value is None:
        return value[:77] + "..." if isinstance(value, str) and len(value) > 80 else value
    if isinstance(value, list | tuple) and len(value) <= _SHORTEST_LIST:
        return [_short(item) for item in value]
    if hasattr(value, "__len__"):
        return f"[{len(value)} items]"
    return value if isinstance(value, float) and abs(value) < float("inf") else str(value)[:80]
