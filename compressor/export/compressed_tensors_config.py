"""``quantization_config`` in config.json: from each module's format to config groups, and back.

Only keys that every reader of the layout accepts are written: readers refuse unknown keys inside a group,
and older ones do not know the newer keys.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from compressor.core.spec import (
    ACTIVATIONS,
    CHANNEL,
    FLOAT_QUANTIZED,
    INT_QUANTIZED,
    PACK_QUANTIZED,
    TENSOR,
    Spec,
)
from compressor.errors import CompressorError, Problems
from compressor.patterns import compile_pattern

METHOD, MIXED = "compressed-tensors", "mixed-precision"
HEAD = "lm_head"
HEAD_TARGET = f"re:.*{HEAD}"
_NUMBERED = re.compile(r"(.*?\.)(\d+)\.(.+)")
_SAME_BYTES = {"naive-quantized": FLOAT_QUANTIZED}
_READ = "integers of 2 to 8 bits or FP8, in the layouts pack-quantized, int-quantized and float-quantized"
_DYNAMIC = "dynamic, symmetric, 8 bits, strategy token, of the weights' type"


def quantization_config(specs: Mapping[str, Spec | None], tied: bool) -> dict[str, Any]:
    """The config section for a model's linear layers.

    Args:
        specs: Every linear module's format by full name, None for those that stay float.
        tied: The head shares the embedding table: it stays float and is named in ``ignore`` even when
            ``specs`` leaves it out.
    """
    groups: dict[Spec, list[str]] = defaultdict(list)
    for module, spec in specs.items():
        if spec is not None:
            groups[spec].append(module)
    ignore = [module for module, spec in specs.items() if spec is None]
    if tied and not any(_is_head(module) for module in specs):
        ignore.append(HEAD)
    if len(groups) == 1:
        targets = [["Linear", *(HEAD_TARGET for module in specs if _is_head(module) and specs[module])]]
    else:
        targets = [_regex_targets(modules, specs) for modules in groups.values()]
    layouts = {spec.layout for spec in groups}
    mixed = len(layouts) > 1
    return {
        "config_groups": {
            f"group_{index}": {"targets": target, **_group(spec, mixed)}
            for index, (target, spec) in enumerate(zip(targets, groups, strict=True))
        },
        "format": MIXED if mixed else next(iter(layouts), PACK_QUANTIZED),
        "ignore": ignore,
        "quant_method": METHOD,
        "quantization_status": "compressed",
    }


def _is_head(module: str) -> bool:
    return module.rsplit(".", 1)[-1] == HEAD


def _group(spec: Spec, mixed: bool) -> dict[str, Any]:
    """One config group, without its targets; it names its layout where the file has several."""
    group: dict[str, Any] = {"weights": _weights(spec)}
    if spec.activations is not None:
        kind = ACTIVATIONS[spec.activations]
        common = {"num_bits": 8, "type": kind, "symmetric": True}
        group["input_activations"] = {**common, "strategy": "token", "dynamic": True}
    return {**group, "format": spec.layout} if mixed else group


def _weights(spec: Spec) -> dict[str, Any]:
    sizes: dict[str, Any] = {"group_size": spec.group_size} if spec.strategy == "group" else {}
    if spec.block is not None:
        sizes["block_structure"] = list(spec.block)
    return {
        "num_bits": spec.bits,
        "type": spec.kind,
        "symmetric": spec.symmetric,
        "strategy": spec.strategy,
        **sizes,
        "dynamic": False,
        "observer": "minmax",
    }


def _regex_targets(modules: Iterable[str], specs: Mapping[str, Spec | None]) -> list[str]:
    """Targets that match exactly ``modules`` among the modules of ``specs``.

    Layers that share one parent and one set of block numbers share one regex: an engine that fuses
    q, k and v looks for one target string that covers all three.
    """
    everywhere = _block_numbers(specs)
    shared: dict[tuple[str, str, tuple[int, ...] | None], list[str]] = defaultdict(list)
    targets = []
    for (prefix, suffix), numbers in _block_numbers(modules).items():
        parent, _, leaf = suffix.rpartition(".")
        blocks = None if numbers == everywhere[prefix, suffix] else tuple(sorted(numbers))
        shared[prefix, parent, blocks].append(leaf)
    for (prefix, parent, blocks), leaves in shared.items():
        number = r"\d+" if blocks is None else _either(map(str, blocks))
        path = f"{re.escape(prefix)}{number}\\." + (re.escape(parent) + r"\." if parent else "")
        targets.append(f"re:^{path}{_either(map(re.escape, leaves))}$")
    single = [module for module in modules if not _NUMBERED.fullmatch(module)]
    return targets + [HEAD_TARGET if _is_head(module) else module for module in single]


def _block_numbers(modules: Iterable[str]) -> dict[tuple[str, str], set[int]]:
    """Block numbers by (``model.layers.``, ``self_attn.q_proj``); modules outside blocks are left out."""
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for module in modules:
        if match := _NUMBERED.fullmatch(module):
            found[match.group(1), match.group(3)].add(int(match.group(2)))
    return dict(found)


def _either(words: Iterable[str]) -> str:
    alternatives = list(words)
    return alternatives[0] if len(alternatives) == 1 else f"({'|'.join(alternatives)})"


def specs_from_config(
    config: Mapping[str, Any], modules: Iterable[str], label: str = "quantization_config"
) -> dict[str, Spec | None]:
    """Each linear module's format, as readers understand the config. Inverse: quantization_config.

    The config does not tell the dtype of scales: formats come with the default, files tell the truth.
    A module takes the first target that matches, full names before regexes (in alphabetical order,
    matched from the start) before class names; what ``ignore`` matches stays float.

    Raises:
        Problems: everything in the config that is no format we know, at once.
    """
    problems = _file_problems(config, label)
    targets: dict[str, Spec] = {}
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        problems.append(_refusal(f"{label}: config_groups", groups, "an object"))
        groups = {}
    for name, group in groups.items():
        try:
            spec = _group_spec(config, group, f"{label}: {name}")
        except CompressorError as problem:
            problems.append(problem)
            continue
        targets.update(dict.fromkeys(group["targets"], spec))
    if problems:
        raise Problems(f"{label}: not readable", problems, "start from the unquantized model")
    ignore = list(config.get("ignore") or ())
    return {module: None if _first(module, ignore) else _lookup(module, targets) for module in modules}


def _lookup(module: str, targets: Mapping[str, Spec]) -> Spec | None:
    target = _first(module, targets)
    return targets[target] if target else None


def _first(module: str, targets: Iterable[str]) -> str | None:
    """The first target that matches a linear module."""
    ordered = sorted(targets)
    if module in ordered:
        return module
    for target in ordered:
        if target.startswith("re:") and re.match(target.removeprefix("re:"), module):
            return target
    return "Linear" if "Linear" in ordered else None


def _file_problems(config: Mapping[str, Any], label: str) -> list[CompressorError]:
    problems = []
    if config.get("quant_method") != METHOD:
        problems.append(_refusal(f"{label}: quant_method", config.get("quant_method"), METHOD))
    try:
        _check_patterns(config.get("ignore") or [], f"{label}: ignore")
    except CompressorError as problem:
        problems.append(problem)
    for key, why in (
        ("transform_config", "no online transforms of activations"),
        ("sparsity_config", "no sparsity"),
    ):
        section = config.get(key)
        if section and not (key == "sparsity_config" and section.get("format") == "dense"):
            problems.append(_refusal(f"{label}: {key}", section, why))
    return problems


def _group_spec(config: Mapping[str, Any], group: Any, label: str) -> Spec:
    """The format of one config group."""
    if not isinstance(group, Mapping):
        raise _refusal(f"{label} is no group", group, "an object with targets and weights")
    _check_patterns(group.get("targets"), f"{label}: targets")
    stored = group.get("format") or config.get("format")
    if stored not in (PACK_QUANTIZED, INT_QUANTIZED, FLOAT_QUANTIZED, *_SAME_BYTES):
        raise _refusal(f"{label}: layout is not read", stored, _READ)
    if group.get("output_activations") is not None:
        got = f"output_activations {group['output_activations']}"
        raise _refusal(f"{label}: quantizes outputs", got, _READ)
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise _refusal(f"{label}: quantizes no weights", weights, _READ)
    _check_weights(weights, label)
    activations = _activations(group.get("input_activations"), label)
    try:
        spec = _spec(weights, activations)
    except (KeyError, TypeError, ValueError) as error:
        raise _refusal(f"{label}: weights", f"{dict(weights)} ({error})", _READ) from error
    if _SAME_BYTES.get(stored, stored) != spec.layout:
        raise _refusal(f"{label}: {spec.label()} in this layout is not read", stored, spec.layout)
    return spec


def _spec(weights: Mapping[str, Any], activations: str | None) -> Spec:
    """The format a group's weights tell; what they tell wrong is a KeyError, TypeError or ValueError."""
    return Spec(
        int(weights["num_bits"]),
        _group_size(weights),
        bool(weights.get("symmetric", True)),
        kind=weights.get("type") or "int",
        block=_block(weights),
        activations=activations,
    )


def _activations(section: Any, label: str) -> str | None:
    """``int8`` or ``fp8`` for inputs quantized per token as they run; None for none."""
    if section is None:
        return None
    for name, kind in ACTIVATIONS.items():
        wanted = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
        if isinstance(section, Mapping) and {key: section.get(key) for key in wanted} == wanted:
            return name
    raise _refusal(f"{label}: quantizes activations", f"input_activations {section}", _DYNAMIC)


def _check_patterns(patterns: object, label: str) -> None:
    """Refuse what is no list of names and regexes."""
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise _refusal(label, patterns, "a list of module names, re:... patterns and class names")
    for pattern in patterns:
        try:
            compile_pattern(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except ValueError as error:
            raise _refusal(label, pattern, f"a usable regular expression ({error})") from error


def _check_weights(weights: Mapping[str, Any], label: str) -> None:
    """Refuse unknown types, runtime ranges, and column orders that need an index per column (g_idx)."""
    for key, allowed, why in (
        ("type", ("int", "float", None), _READ),
        ("dynamic", (False, None), "scales stored in the file"),
        ("actorder", (None, False, "weight", "static"), "columns in their own order (no g_idx)"),
    ):
        if weights.get(key) not in allowed:
            raise _refusal(f"{label}: weights.{key}", weights[key], why)


def _group_size(weights: Mapping[str, Any]) -> int:
    """Our group_size, from a strategy or, where that is left out, from the group size."""
    size = weights.get("group_size")
    inferred = {None: "tensor", -1: "channel"}.get(size, "group")
    strategy = weights.get("strategy") or inferred
    if strategy == "group":
        if not isinstance(size, int) or size < 1:
            raise ValueError("strategy group without a positive group_size")
        return size
    return {"channel": CHANNEL, "tensor": TENSOR, "block": TENSOR}[strategy]


def _block(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block strategy."""
    structure = weights.get("block_structure")
    if weights.get("strategy") != "block":
        if structure is not None:
            raise ValueError("block_structure without the strategy block")
        return None
    if not isinstance(structure, list) or len(structure) != 2:
        raise ValueError("strategy block without a block_structure of two sizes")
    return int(structure[0]), int(structure[1])


def _refusal(what: str, got: object, expected: str) -> CompressorError:
    return CompressorError(what, got=got, expected=expected)
