"""What a GGUF says about a model besides its tensors: sizes, rope, name, licence, sampling advice."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from compressor.arch.base import Config, Family
from compressor.errors import CompressorError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "BF16": 32}
"""general.file_type by the type most weights have."""

_YARN_DEFAULTS = {"beta_fast": 32, "beta_slow": 1, "truncate": True}


def rope_parameters(config: Config) -> dict[str, Any]:
    """rope_theta, rope_type and the type's parameters, from either place configs keep them."""
    found = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    found.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    found["rope_type"] = found.get("rope_type") or found.get("type") or "default"
    return found


def check_config(family: Family, config: Config) -> list[CompressorError]:
    """What in config.json llama.cpp's graph cannot do."""
    problems = []
    if config.get("hidden_act", "silu") != "silu":
        problems.append(_cannot("hidden_act", config["hidden_act"], "silu"))
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(_cannot("partial_rotary_factor", config["partial_rotary_factor"], "1.0"))
    if family.dims(config)["layers"] > 512:
        problems.append(_cannot("num_hidden_layers", config["num_hidden_layers"], "at most 512"))
    rope = rope_parameters(config)
    if rope["rope_type"] not in ROPE_TYPES:
        problems.append(_cannot("rope_type", rope["rope_type"], "one of " + ", ".join(ROPE_TYPES)))
    elif rope["rope_type"] == "yarn":
        problems += _check_yarn(rope)
    return problems


def _check_yarn(rope: Mapping[str, Any]) -> list[CompressorError]:
    """YaRN with other than its usual constants has no keys every llama.cpp reads."""
    problems = []
    for key, constant in _YARN_DEFAULTS.items():
        if rope.get(key, constant) not in (constant, None):
            problems.append(_cannot(f"rope {key}", rope[key], constant))
    usual = 0.1 * math.log(rope["factor"]) + 1.0
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        value = rope.get(key)
        if value is not None and (key != "attention_factor" or abs(value - usual) > 1e-6):
            problems.append(_cannot(f"rope {key}", value, "not set"))
    return problems


def _cannot(key: str, got: object, expected: object) -> CompressorError:
    return CompressorError(
        f"config.json: llama.cpp cannot run {key} as it stands",
        got=got,
        expected=expected,
        hint="export to --format compressed-tensors instead",
    )


def hyperparameters(family: Family, config: Config) -> dict[str, int | float | str]:
    """Keys ``{arch}.*``: int is u32, float is f32 (types are strict in llama.cpp)."""
    dims = family.dims(config)
    rope = rope_parameters(config)
    keys: dict[str, int | float | str] = {
        "vocab_size": dims["vocab"],
        "context_length": int(config.get("max_position_embeddings", 2048)),
        "embedding_length": dims["hidden"],
        "block_count": dims["layers"],
        "feed_forward_length": dims["ffn"],
        "attention.head_count": dims["heads"],
        "attention.head_count_kv": dims["kv_heads"],
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "rope.dimension_count": dims["head_dim"],
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if dims["head_dim"] * dims["heads"] != dims["hidden"]:
        keys["attention.key_length"] = keys["attention.value_length"] = dims["head_dim"]
    if rope["rope_type"] in ("linear", "yarn"):
        keys["rope.scaling.type"] = str(rope["rope_type"])
        keys["rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
        original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = int(original)
    return {f"{family.gguf_arch}.{key}": value for key, value in keys.items()}


def rope_factors(family: Family, config: Config) -> NDArray[np.float32] | None:
    """float32 [head_dim / 2]: what each rotary frequency is divided by (Llama 3's scaling), else None."""
    rope = rope_parameters(config)
    if rope["rope_type"] != "llama3":
        return None
    head_dim = family.dims(config)["head_dim"]
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    wavelengths = 2 * math.pi * float(rope["rope_theta"]) ** exponents
    turns = rope["original_max_position_embeddings"] / wavelengths
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / float(rope["factor"]) + smooth), dtype=np.float32)


def general(name: str, model_card: str, generation: Mapping[str, Any]) -> dict[str, str | int | float | list[str]]:
    """Keys ``general.*`` of README.md and generation_config.json; int is i32 here."""
    keys: dict[str, str | int | float | list[str]] = {"general.type": "model", "general.name": name}
    card = front_matter(model_card)
    for key in ("license", "license_name", "license_link"):
        if isinstance(card.get(key), str):
            keys["general." + key.replace("_", ".")] = card[key]
    for field, key in (("language", "general.languages"), ("tags", "general.tags")):
        values = [card[field]] if isinstance(card.get(field), str) else card.get(field)
        if isinstance(values, list) and values and all(isinstance(v, str) for v in values):
            keys[key] = values
    return {**keys, **_sampling(generation)}


def _sampling(generation: Mapping[str, Any]) -> dict[str, int | float]:
    """general.sampling.* where generation_config.json asks for sampling."""
    keys: dict[str, int | float] = {}
    if not generation.get("do_sample"):
        return keys
    names = {
        "temperature": "temp",
        "top_p": "top_p",
        "min_p": "min_p",
        "repetition_penalty": "penalty_repeat",
    }
    for source, target in names.items():
        if isinstance(generation.get(source), (int, float)):
            keys[f"general.sampling.{target}"] = float(generation[source])
    if isinstance(generation.get("top_k"), int):
        keys["general.sampling.top_k"] = generation["top_k"]
    return keys


def front_matter(text: str) -> dict[str, Any]:
    """The YAML head of a model card; empty when there is none or it is broken."""
    match = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    try:
        found = yaml.safe_load(match.group(1)) if match else None
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}
