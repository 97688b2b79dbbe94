"""The shape of a family file: names, sizes and neighbourhoods of tensors, as data.

A family module exports one constant ``FAMILY``; the directory listing is the registry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Config = Mapping[str, Any]

ROLES = ("embedding", "attention", "ffn", "lm_head", "norm", "other")
"""Every tensor has one role. ``norm`` and ``other`` are never quantized."""


@dataclass(frozen=True)
class Linear:
    """One linear layer of a block.

    Attributes:
        name: Module path inside the block, e.g. ``self_attn.q_proj``.
        role: ``attention`` or ``ffn``.
        out, in_: Names of its sizes (keys of ``Family.dims``).
        bias: Config key that switches a bias on, or True/False.
        gguf: Its name in a GGUF block, e.g. ``attn_q``.
        rope_heads: ``heads`` or ``kv_heads`` when llama.cpp wants its output rows permuted
            (rotary pairs interleaved), else None.
    """

    name: str
    role: str
    out: str
    in_: str
    gguf: str
    bias: str | bool = False
    rope_heads: str | None = None


@dataclass(frozen=True)
class Norm:
    """One norm weight of a block: module path, size name, GGUF name."""

    name: str
    size: str
    gguf: str


@dataclass(frozen=True)
class Pair:
    """A module and the linears that read its output: where a scale can move from one to the other.

    Dividing the source's output channel by s and multiplying the same input column of every consumer by s
    leaves the function as it was. A linear source has its row of ``weight`` divided, and its entry of
    ``bias`` too where it has one (Qwen2's v_proj).

    Attributes:
        source: Module in the block, a norm or a linear.
        consumers: Linears that read it, and nothing else does.
        kind: What the source is.
        heads: v -> o under grouped-query attention: the source has ``kv_heads`` heads of ``head_dim``
            channels, the consumers' input ``heads``; each source head is read by heads / kv_heads
            consecutive input heads, so input channel c reads source channel
            ``c // head_dim // (heads // kv_heads) * head_dim + c % head_dim``.
    """

    source: str
    consumers: tuple[str, ...]
    kind: Literal["norm", "linear"]
    heads: bool = False


@dataclass(frozen=True)
class TensorShape:
    """What the family expects of one tensor: its module, role, block number (or None), shape."""

    module: str
    role: str
    layer: int | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """A model family as data.

    Attributes:
        name: File name of the family.
        model_types: Values of ``model_type`` in config.json that it covers.
        linears, norms: Parts of one block, in forward order.
        inputs: Groups of linears that read the same tensor (they share one Hessian).
        pairs: Modules whose output scale can move into the linears that read them.
        writers: Linears of a block whose output is added to the residual stream.
        norm_kind: ``rms`` (x / rms(x) * w, so a rotation passes through once w is folded away), or
            ``other``: not folded, such a family cannot be rotated.
        residuals: How a block changes the stream h, if it does so in steps: (norm, module) means
            h = h + module(norm(h)), one step after the other. Empty: the block runs only as a whole.
        blocks, embedding, final_norm, head: Module paths.
        gguf_arch: ``general.architecture`` in a GGUF, or None while GGUF is not supported.
    """

    name: str
    model_types: tuple[str, ...]
    linears: tuple[Linear, ...]
    norms: tuple[Norm, ...]
    inputs: tuple[tuple[str, ...], ...]
    pairs: tuple[Pair, ...] = ()
    writers: tuple[str, ...] = ()
    norm_kind: Literal["rms", "other"] = "other"
    residuals: tuple[tuple[str, str], ...] = ()
    blocks: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    gguf_arch: str | None = None

    def dims(self, config: Config) -> dict[str, int]:
        """Sizes by name: hidden, ffn, heads, kv_heads, head_dim, q, kv, vocab, layers."""
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        hidden = int(config["hidden_size"])
        head_dim = int(config.get("head_dim") or hidden // heads)
        return {
            "hidden": hidden,
            "ffn": int(config["intermediate_size"]),
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "q": heads * head_dim,
            "kv": kv_heads * head_dim,
            "vocab": int(config["vocab_size"]),
            "layers": int(config["num_hidden_layers"]),
        }

    def tied(self, config: Config) -> bool:
        """Whether lm_head shares the embedding table."""
        return bool(config.get("tie_word_embeddings", False))

    def block(self, layer: int) -> str:
        """Module path of block ``layer``."""
        return f"{self.blocks}.{layer}"

    def layer_of(self, name: str) -> int | None:
        """Block number in a tensor or module name, None outside the blocks."""
        match = re.match(re.escape(self.blocks) + r"\.(\d+)\.", name)
        return int(match.group(1)) if match else None

    def tensors(self, config: Config) -> dict[str, TensorShape]:
        """Every tensor the family expects for this config, by checkpoint name, in walk order.

        A tied head is not listed: the checkpoint may omit it.
        """
        dims = self.dims(config)
        found = {
            f"{self.embedding}.weight": TensorShape(
                self.embedding, "embedding", None, (dims["vocab"], dims["hidden"])
            )
        }
        for layer in range(dims["layers"]):
            found.update(self._block_tensors(config, dims, layer))
        found[f"{self.final_norm}.weight"] = TensorShape(self.final_norm, "norm", None, (dims["hidden"],))
        if not self.tied(config):
            found[f"{self.head}.weight"] = TensorShape(self.head, "lm_head", None, (dims["vocab"], dims["hidden"]))
        return found

    def _block_tensors(self, config: Config, dims: Mapping[str, int], layer: int) -> dict[str, TensorShape]:
        found = {}
        for linear in self.linears:
            module = f"{self.block(layer)}.{linear.name}"
            shape = (dims[linear.out], dims[linear.in_])
            found[f"{module}.weight"] = TensorShape(module, linear.role, layer, shape)
            biased = linear.bias if isinstance(linear.bias, bool) else config.get(linear.bias)
            if biased:
                found[f"{module}.bias"] = TensorShape(module, "other", layer, (dims[linear.out],))
        for norm in self.norms:
            module = f"{self.block(layer)}.{norm.name}"
            found[f"{module}.weight"] = TensorShape(module, "norm", layer, (dims[norm.size],))
        return found
