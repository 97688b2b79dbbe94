"""GGUF files of tiny llamas, written with the gguf package alone (not by our exporter)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from fixtures_models import MERGES, vocabulary
from numpy.typing import NDArray

from compressor.checkpoint.reader import open_checkpoint

KIND = gguf.GGMLQuantizationType
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
SPM_VOCAB = 320


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    special = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module, _, part = name.rpartition(".")
    if module in special:
        return f"{special[module]}.{part}"
    _, _, layer, local = module.split(".", 3)
    return f"blk.{layer}.{NAMES[local]}.{part}"


def permute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp's order of rotary rows, as its converter makes it."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write(
    path: Path,
    model: Path,
    kind: gguf.GGMLQuantizationType = KIND.F32,
    *,
    extra: Sequence[tuple[str, Any, int]] = (),
    drop: Sequence[str] = (),
    tensors: Sequence[tuple[str, NDArray[Any]]] = (),
    keep: Callable[[str], bool] = lambda name: True,
) -> Path:
    """A GGUF of a tiny llama: matrices in ``kind``, ``extra`` keys as (key, value, type)."""
    source, writer = open_checkpoint(model), gguf.GGUFWriter(path, "llama")
    config = source.config
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    keys = {
        "llama.block_count": (config["num_hidden_layers"], 4),
        "llama.context_length": (config["max_position_embeddings"], 4),
        "llama.embedding_length": (config["hidden_size"], 4),
        "llama.feed_forward_length": (config["intermediate_size"], 4),
        "llama.attention.head_count": (config["num_attention_heads"], 4),
        "llama.attention.head_count_kv": (config["num_key_value_heads"], 4),
        "llama.attention.layer_norm_rms_epsilon": (config["rms_norm_eps"], 6),
        "llama.rope.freq_base": (10000.0, 6),
        "llama.vocab_size": (config["vocab_size"], 4),
        "tokenizer.ggml.model": ("gpt2", 8),
        "tokenizer.ggml.pre": ("gpt-2", 8),
        "tokenizer.ggml.tokens": (list(vocabulary()), 9),
        "tokenizer.ggml.token_type": ([3] * 3 + [1] * 253, 9),
        "tokenizer.ggml.merges": ([" ".join(pair) for pair in MERGES], 9),
        "tokenizer.ggml.bos_token_id": (0, 4),
        "tokenizer.ggml.eos_token_id": (1, 4),
        "tokenizer.ggml.padding_token_id": (2, 4),
        **{key: (value, code) for key, value, code in extra},
    }
    for key, (value, code) in keys.items():
        if key not in drop:
            writer.add_key_value(key, value, gguf.GGUFValueType(code))
    for name in filter(keep, source.tensors):
        values, stored = source.read(name), gguf_name(name)
        for part, count in heads.items():
            if f".{part}." in stored:
                values = permute(values, count)
        used = kind if values.ndim > 1 else KIND.F32
        packed = gguf.quantize(values, used) if used not in (KIND.F32, KIND.F16) else None
        plain = values.astype(np.float16) if used == KIND.F16 else values
        writer.add_tensor(stored, plain if packed is None else packed, raw_dtype=used)
    for name, values in tensors:
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sentencepiece_keys() -> list[tuple[str, Any, int]]:
    """Keys of a small Llama-2 style vocabulary: 320 tokens, bytes first, then words with scores."""
    words = ["▁the", "▁t", "he", "at", "▁c", "▁cat", "▁", "▁▁", "in", "ing", "s"]
    letters = sorted({*"thecaingb"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    tokens += [f"[x{i}]" for i in range(SPM_VOCAB - len(tokens))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (SPM_VOCAB - 259)
    scores = [0.0] * 259 + [-float(i) for i in range(SPM_VOCAB - 259)]
    return [
        ("tokenizer.ggml.model", "llama", 8), ("tokenizer.ggml.tokens", tokens, 9),
        ("tokenizer.ggml.token_type", kinds, 9), ("tokenizer.ggml.scores", scores, 9),
        ("tokenizer.ggml.bos_token_id", 1, 4), ("tokenizer.ggml.eos_token_id", 2, 4),
        ("tokenizer.ggml.unknown_token_id", 0, 4), ("tokenizer.ggml.padding_token_id", 0, 4),
    ]  # fmt: skip
