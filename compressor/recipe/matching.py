"""Which rule takes which module, and what to say about a condition that takes none."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from compressor.errors import CompressorError
from compressor.recipe.rules import Rule
from compressor.recipe.written import Layers, parse_range

ENDS = ("embedding", "lm_head")


@dataclass(frozen=True)
class Target:
    """A module that rules may take: its path, role, and block number or None."""

    module: str
    role: str
    layer: int | None


@dataclass(frozen=True)
class Model:
    """What matching needs to know of a model.

    Attributes:
        layers: Number of blocks.
        tied_head: Module path of a head that shares the embedding table (it is no tensor of its own), or None.
        targets: Every module that rules may take.
        others: Modules that are always kept (norms, biases).
    """

    layers: int
    tied_head: str | None
    targets: tuple[Target, ...]
    others: frozenset[str]


def matches(rule: Rule, module: str, role: str, layer: int | None, layers: int) -> bool:
    """Whether every condition of a rule holds for a module."""
    if rule.roles is not None and role not in rule.roles:
        return False
    if rule.modules is not None and not any(matches_module(p, module) for p in rule.modules):
        return False
    return rule.layers is None or (layer is not None and _in_layers(rule.layers, layer, layers))


def matches_module(pattern: str, module: str) -> bool:
    """A glob over the whole path, or ``re:`` with a regular expression that the path starts with."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatch.fnmatchcase(module, pattern)


def abbreviated(module: str) -> str:
    """``model.layers.3.mlp.up_proj`` -> ``model.layers.*.mlp.up_proj``."""
    return re.sub(r"\.\d+\.", ".*.", module)


def _in_layers(wanted: Layers | int | str | list[int], layer: int, layers: int) -> bool:
    if isinstance(wanted, Layers):
        in_first = wanted.first is not None and layer < wanted.first
        return in_first or (wanted.last is not None and layer >= layers - wanted.last)
    return layer in _numbers(wanted)


def _numbers(wanted: int | str | list[int]) -> range | list[int]:
    if isinstance(wanted, str):
        return parse_range(wanted) or range(0)
    return [wanted] if isinstance(wanted, int) else wanted


def optional(rule: Rule, model: Model) -> bool:
    """Whether a rule may match nothing: sections, and rules that keep a head the model has not."""
    if rule.short:
        return True
    keeps_head = not rule.format and rule.roles is not None and set(rule.roles) <= set(ENDS)
    return model.tied_head is not None and keeps_head and not rule.modules


def unmatched(rule: Rule, taken: int, model: Model) -> Iterator[CompressorError]:
    """What is wrong with a rule's conditions; ``taken`` is how many modules it got.

    A pattern or a block number that fits nothing is an error even where the rest of the rule fits.
    """
    found = [*_bad_patterns(rule, model), *_bad_layers(rule, model)]
    yield from found
    if taken or found or optional(rule, model):
        return
    alone = [t for t in model.targets if matches(rule, t.module, t.role, t.layer, model.layers)]
    if alone:
        yield CompressorError(
            f"{rule.where}: earlier rules take all {len(alone)} tensors it matches",
            hint="put the narrower rule first: the first match wins",
        )
        return
    hint = "its conditions hold for no tensor together"
    if rule.roles == ("lm_head",) and model.tied_head:
        hint = "this model's head is its embedding table (tie_word_embeddings): leave the rule out"
    yield CompressorError(f"{rule.where}: matches nothing", got=_conditions(rule), hint=hint)


def _bad_patterns(rule: Rule, model: Model) -> Iterator[CompressorError]:
    """Patterns that fit no module."""
    for pattern in rule.modules or ():
        if any(matches_module(pattern, target.module) for target in model.targets):
            continue
        keeps_tied = model.tied_head and not rule.format and matches_module(pattern, model.tied_head)
        if keeps_tied:
            continue
        hint = _closest(pattern, [target.module for target in model.targets])
        if any(matches_module(pattern, module) for module in model.others):
            hint = "it fits only norms, biases and the like, which are always kept as stored"
        yield CompressorError(f"{rule.where}: pattern {pattern!r} matches nothing", hint=hint)


def _closest(pattern: str, modules: Iterable[str]) -> str:
    known = {abbreviated(module) for module in modules}
    known |= {"*." + module.rpartition(".")[2] for module in known if "." in module}
    close = difflib.get_close_matches(pattern, sorted(known), n=1)
    names = sorted({module.rpartition(".")[2] for module in known})
    return f"did you mean {close[0]!r}?" if close else f"modules end in {', '.join(names)}"


def _bad_layers(rule: Rule, model: Model) -> Iterator[CompressorError]:
    """Block numbers the model has not."""
    wanted = rule.layers
    if wanted is None or isinstance(wanted, Layers):
        return
    numbers = _numbers(wanted)
    if max(numbers) >= model.layers:
        yield CompressorError(
            f"{rule.where}: layers {wanted}", got=f"block {max(numbers)}", expected=f"0 to {model.layers - 1}"
        )


def _conditions(rule: Rule) -> str:
    wanted = replace(rule, format=None).canonical()
    shown = ((key, wanted[key]) for key in ("role", "modules", "layers"))
    return ", ".join(
        f"{key} {', '.join(value) if isinstance(value, list) and key != 'layers' else value}"
        for key, value in shown
        if value is not None
    )
