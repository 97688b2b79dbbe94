"""config.json from a GGUF's metadata: sizes, rotary embedding, special tokens.

What a GGUF can say but a config of the family cannot is refused, never dropped.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.arch import families
from compressor.arch.base import Family
from compressor.checkpoint.files import mapped
from compressor.checkpoint.gguf_header import GgufHeader
from compressor.errors import CompressorError

ARCHITECTURES = {"llama": "LlamaForCausalLM"}
"""general.architecture -> the transformers class of its config."""

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}
"""config.json role -> the word in ``tokenizer.ggml.{word}_token_id``."""

ROPE_FREQS = "rope_freqs.weight"
_ROPE_KEYS = ("type", "factor", "original_context_length", "finetuned")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def find_gguf_family(header: GgufHeader, path: Path) -> Family:
    """The family a GGUF's architecture belongs to.

    Raises:
        CompressorError: not one we read.
    """
    arch = header.fields.get("general.architecture")
    for family in families().values():
        if family.gguf_arch == arch and arch in ARCHITECTURES:
            return family
    raise CompressorError(
        f"{path}: this GGUF's architecture cannot be read",
        got=f"general.architecture {arch!r}",
        expected="one of " + ", ".join(sorted(ARCHITECTURES)),
        hint="pass the original Hugging Face model directory instead",
    )


class _Keys:
    """Typed access to ``{arch}.*`` keys."""

    def __init__(self, header: GgufHeader, path: Path) -> None:
        self.fields, self.path = header.fields, path
        self.arch = str(header.fields["general.architecture"])

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.fields

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31:
            return value
        raise self.bad(key, value, "a number from 1 to 2^31 - 1")

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive float32, as the shortest decimal that means it (1e-05)."""
        value = self._get(key, default)
        if isinstance(value, float | int) and math.isfinite(value) and value > 0:
            return float(str(np.float32(value)))
        raise self.bad(key, value, "a finite number > 0")

    def _get(self, key: str, default: float | None) -> Any:
        value = self.fields.get(f"{self.arch}.{key}", default)
        if value is None:
            raise CompressorError(f"{self.path}: metadata lacks {self.arch}.{key}")
        return value

    def bad(self, key: str, got: object, expected: object) -> CompressorError:
        return CompressorError(f"{self.path}: {self.arch}.{key}", got=str(got)[:80], expected=expected)


def make_config(header: GgufHeader, path: Path, dtype: str) -> dict[str, Any]:
    """A config.json for the tensors of a GGUF.

    Args:
        header: Its scan.
        path: The file, for messages and rope_freqs.
        dtype: What the weights are presented as (``BF16``).

    Raises:
        CompressorError: a key is missing, malformed, or asks for what the family cannot do.
    """
    keys, tensors = _Keys(header, path), header.tensors
    _refuse_variants(keys, header)
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    rotary = keys.integer("rope.dimension_count", hidden // heads)
    head_dim = keys.integer("attention.key_length", rotary)
    for key, value in (("rope.dimension_count", rotary), ("attention.value_length", None)):
        if (found := value or keys.integer(key, head_dim)) != head_dim:
            raise keys.bad(key, found, f"the head size {head_dim}")
    table = tensors.get("token_embd.weight")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[keys.arch]],
        "model_type": keys.arch,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": _layers(keys, header),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.integer("context_length"),
        "vocab_size": table.shape[0] if table else keys.integer("vocab_size"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": DTYPES[dtype],
        "torch_dtype": DTYPES[dtype],
        **_rope(keys, header, head_dim),
        **special_ids(header),
    }
    return dict(sorted(config.items()))


def special_ids(header: GgufHeader) -> dict[str, int]:
    """bos_token_id, eos_token_id, pad_token_id where the file names them."""
    found = {}
    for role, word in SPECIAL_TOKENS.items():
        value = header.fields.get(f"tokenizer.ggml.{word}_token_id")
        if isinstance(value, int) and not isinstance(value, bool):
            found[f"{role}_token_id"] = value
    return found


def _refuse_variants(keys: _Keys, header: GgufHeader) -> None:
    """Parts of a model, and relatives that share the name but not the graph."""
    if header.fields.get("split.count", 1) not in (0, 1):
        raise CompressorError(
            f"{keys.path}: one part of a split GGUF",
            got=f"split.count {header.fields['split.count']}",
            expected="the whole model in one file",
            hint="merge the parts first (llama-gguf-split --merge)",
        )
    for key in ("expert_count", "attention.sliding_window"):
        if keys.has(key) and header.fields[f"{keys.arch}.{key}"] != 0:
            raise keys.bad(key, header.fields[f"{keys.arch}.{key}"], "0: this variant is not supported yet")


def _layers(keys: _Keys, header: GgufHeader) -> int:
    """block_count, when the tensors agree."""
    blocks = [int(m[1]) for name in header.tensors if (m := re.match(r"blk\.(\d{1,9})\.", name))]
    layers, found = keys.integer("block_count"), max(blocks, default=-1) + 1
    if layers != found:
        raise keys.bad("block_count", layers, f"{found}, the number of blocks with tensors")
    return layers


def _rope(keys: _Keys, header: GgufHeader, head_dim: int) -> dict[str, Any]:
    """rope_theta, and rope_parameters as transformers 5 keeps them."""
    theta = keys.number("rope.freq_base", 10000.0)
    parameters: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    prefix = f"{keys.arch}.rope.scaling."
    asked = {k.removeprefix(prefix) for k in header.fields if k.startswith(prefix)}
    kind = header.fields.get(f"{prefix}type", "linear")
    if unknown := asked - set(_ROPE_KEYS):
        raise keys.bad("rope.scaling", sorted(unknown), f"only {', '.join(_ROPE_KEYS)}")
    if kind not in ("none", "linear", "yarn"):
        raise keys.bad("rope.scaling.type", kind, "none, linear or yarn")
    old_factor = keys.number("rope.scale_linear", 1.0)
    factor = keys.number("rope.scaling.factor", old_factor) if kind != "none" else 1.0
    if kind == "yarn" or factor != 1.0:
        parameters |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length")
    if ROPE_FREQS in header.tensors:
        parameters |= _llama3(keys, header, theta, head_dim)
    return {"rope_theta": theta, "rope_parameters": parameters}


def _llama3(keys: _Keys, header: GgufHeader, theta: float, head_dim: int) -> dict[str, Any]:
    """The llama3 scaling whose factors rope_freqs.weight holds, else an error."""
    tensor = header.tensors[ROPE_FREQS]
    if tensor.type_name != "F32" or tensor.shape != (head_dim // 2,):
        got = f"{tensor.type_name} {tensor.shape}"
        raise CompressorError(f"{keys.path}: {ROPE_FREQS}", got=got, expected=f"F32 ({head_dim // 2},)")
    factors = mapped(keys.path, tensor.start, tensor.nbytes).view("<f4").astype(np.float64)
    if np.all(factors == 1.0):
        return {}
    factor = float(str(np.float32(factors.max())))
    if not np.allclose(factors, llama3_factors(theta, head_dim, factor), rtol=1e-4):
        raise CompressorError(
            f"{keys.path}: {ROPE_FREQS} scales positions in an unknown way",
            expected=f"llama3 scaling with {_LLAMA3}",
            hint="pass the original Hugging Face model directory instead",
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def llama3_factors(theta: float, head_dim: int, factor: float) -> NDArray[np.float64]:
    """float64 [head_dim/2]: what llama3 scaling divides each rotary frequency by.

    1 for short wavelengths, ``factor`` for long ones, a smooth blend between 2048 and 8192 positions.
    """
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = _LLAMA3["original_max_position_embeddings"] / wavelengths
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))
