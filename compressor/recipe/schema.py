"""Recipes: strict YAML in, ``Recipe`` out. Every mistake at once, each with file:line and a suggestion.

Long form: ordered rules, first match wins. Short form (``quantization_config`` with one section per
role) is translated into the same rules.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from compressor.core.plan import PassCall
from compressor.errors import CompressorError, Problems
from compressor.passes import base as passes
from compressor.recipe.formats import KEEP, PRESETS, SCALE_DTYPES
from compressor.recipe.written import (
    QUANTIZABLE,
    Format,
    Layers,
    Match,
    RecipeModel,
    RuleModel,
    Section,
    ShortRecipeModel,
    validate,
)
from compressor.recipe.yamlmarks import Loc, line_of, load_yaml

LATER = {"awq": "activation-aware scaling (AWQ)", "kv_cache": "KV-cache calibration"}
DEFAULT_PASSES = ("gptq",)


@dataclass(frozen=True)
class Rule:
    """One rule, resolved.

    Attributes:
        where: ``rule 2 (recipes/x.yaml:14)``.
        roles: Roles it applies to, or None for every quantizable one.
        modules: Globs or ``re:`` patterns over module paths, or None.
        layers: ``Layers``, a number, a list, ``"10-20"``, or None.
        format: Bits, group_size, symmetric, scale_dtype; None = kept as stored.
        passes: Passes in order; empty when kept.
        lenient: Matching nothing is a note, not an error (short form sections, keeping rules).
    """

    where: str
    roles: tuple[str, ...] | None
    modules: tuple[str, ...] | None
    layers: Layers | int | str | list[int] | None
    format: Mapping[str, Any] | None
    passes: tuple[PassCall, ...]
    lenient: bool = False

    def canonical(self) -> dict[str, Any]:
        """JSON-ready, without file names or line numbers."""
        layers = self.layers.model_dump(exclude_none=True) if isinstance(self.layers, Layers) else self.layers
        return {
            "role": list(self.roles) if self.roles else None,
            "modules": list(self.modules) if self.modules else None,
            "layers": layers,
            "format": self.format,
            "passes": [{call.name: dict(call.options)} for call in self.passes],
        }


@dataclass(frozen=True)
class Recipe:
    """Ordered rules, first match wins; ``missing`` names what is asked for and not available yet."""

    name: str
    source: str
    rules: tuple[Rule, ...]
    missing: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def canonical(self) -> dict[str, Any]:
        """What the bytes of an artifact depend on."""
        return {"rules": [rule.canonical() for rule in self.rules]}


def recipe_folders() -> list[Path]:
    """Where shipped recipes live: the checkout, or an installation's share folder."""
    checkout = Path(__file__).parents[2] / "recipes"
    return [checkout, Path(sys.prefix) / "share" / "compressor" / "recipes"]


def shipped_recipes() -> dict[str, Path]:
    """Shipped recipes by name."""
    for folder in recipe_folders():
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {}


def find_recipe(source: str) -> Path:
    """A recipe file, or a shipped recipe by its bare name.

    Raises:
        CompressorError: neither.
    """
    path, shipped = Path(source), shipped_recipes()
    if path.is_file():
        return path
    if source in shipped:
        return shipped[source]
    close = difflib.get_close_matches(source, shipped, n=1)
    raise CompressorError(
        f"{source}: no such recipe",
        expected="a YAML file, or one of " + ", ".join(shipped),
        hint=f"did you mean {close[0]!r}?" if close else None,
    )


def load_recipe(source: str | Path, substitutions: Mapping[str, str] | None = None) -> Recipe:
    """Read and check a recipe; ``substitutions`` replaces passes (``awq=gptq``, ``kv_cache=fp16``).

    Raises:
        CompressorError: anything wrong with it, all at once as Problems.
    """
    path = find_recipe(str(source))
    data, lines = load_yaml(path)
    short = isinstance(data, dict) and "quantization_config" in data
    model = validate(ShortRecipeModel if short else RecipeModel, data, lines, path)
    builder = _Builder(path, lines, dict(substitutions or {}))
    recipe = builder.short(model) if isinstance(model, ShortRecipeModel) else builder.long(model)
    builder.finish()
    return recipe


def unavailable(recipe: Recipe) -> list[CompressorError]:
    """What the recipe asks for that cannot run yet; empty when it can run."""
    return [
        CompressorError(
            f"{where}: {LATER[name]} is not available yet",
            hint=f"--substitute {name}={'gptq' if name == 'awq' else 'fp16'} runs without it",
        )
        for name, where in recipe.missing
    ]


class _Builder:
    """Turns checked data into rules, collecting problems that need more than the schema."""

    def __init__(self, path: Path, lines: dict[Loc, int], substitutions: dict[str, str]) -> None:
        self.path, self.lines, self.substitutions = path, lines, substitutions
        self.problems: list[CompressorError] = []
        self.missing: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.used: set[str] = set()

    def long(self, model: RecipeModel) -> Recipe:
        """Rules as written."""
        rules = tuple(self._rule(index, rule) for index, rule in enumerate(model.rules))
        return self._recipe(model.name, rules)

    def short(self, model: ShortRecipeModel) -> Recipe:
        """One rule per section."""
        sections = {
            "embedding_layer": "embedding",
            "attention_layers": "attention",
            "ffn_layers": "ffn",
            "lm_head": "lm_head",
        }
        body, rules = model.quantization_config, []
        for key, role in sections.items():
            section = getattr(body, key)
            if section is not None:
                rules.append(self._section(key, role, section))
        if body.kv_cache is not None:
            self._cache(body.kv_cache.precision)
        return self._recipe(model.name, tuple(rules))

    def finish(self) -> None:
        """Raise what was collected."""
        for name in self.substitutions.keys() - self.used:
            self.problems.append(
                CompressorError(f"--substitute {name}={self.substitutions[name]}: {self.path} does not use {name}")
            )
        if self.problems:
            raise Problems(f"{self.path}: not a valid recipe", self.problems)

    def _recipe(self, name: str | None, rules: tuple[Rule, ...]) -> Recipe:
        return Recipe(name or self.path.stem, str(self.path), rules, tuple(self.missing), tuple(self.notes))

    def _where(self, loc: Loc) -> str:
        return f"{self.path}:{line_of(self.lines, loc)}"

    def _place(self, loc: Loc) -> str:
        """``mixed.yaml:7``: for tables, where the folder is noise."""
        return f"{self.path.name}:{line_of(self.lines, loc)}"

    def _problem(self, loc: Loc, what: str, **more: Any) -> None:
        self.problems.append(CompressorError(f"{self._where(loc)}: {what}", **more))

    def _rule(self, index: int, rule: RuleModel) -> Rule:
        loc: Loc = ("rules", index)
        match = rule.match
        if isinstance(match, str):
            if match not in QUANTIZABLE:
                close = difflib.get_close_matches(match, QUANTIZABLE, n=1)
                hint = f"did you mean {close[0]!r}?" if close else None
                self._problem(
                    (*loc, "match"), f"unknown role {match!r}", expected=", ".join(QUANTIZABLE), hint=hint
                )
            match = Match.model_construct(role=[match], modules=None, layers=None)
        spec = self._format(rule.format, (*loc, "format"))
        calls = self._passes(rule.passes, spec, (*loc, "passes"))
        return Rule(
            where=f"rule {index + 1} ({self._place(loc)})",
            roles=tuple(match.role) if match.role else None,
            modules=tuple(match.modules) if match.modules else None,
            layers=match.layers,
            format=spec,
            passes=calls,
            lenient=spec is None,
        )

    def _section(self, key: str, role: str, section: Section) -> Rule:
        loc: Loc = ("quantization_config", key)
        written = {"group_size": section.group_size, "symmetric": section.symmetric}
        changes = {name: value for name, value in written.items() if value is not None}
        spec = self._format(section.precision, (*loc, "precision"))
        if spec is None and changes:
            self._problem(loc, f"{section.precision} takes no {' or '.join(changes)}")
        method = [section.method] if section.method else None
        calls = self._passes(method, spec, (*loc, "method"))
        where = f"{key} ({self._place(loc)})"
        return Rule(where, (role,), None, None, {**spec, **changes} if spec else None, calls, lenient=True)

    def _format(self, written: Format | str, loc: Loc) -> dict[str, Any] | None:
        """Bits, group_size, symmetric, scale_dtype; None = keep."""
        if isinstance(written, str):
            written = Format.model_construct(preset=written)
        changes = {k: v for k, v in written.model_dump().items() if v is not None and k != "preset"}
        base: dict[str, Any] = {}
        if written.preset is not None:
            if written.preset in KEEP:
                if changes:
                    self._problem(loc, f"{written.preset} takes no {' or '.join(changes)}")
                return None
            if written.preset not in PRESETS:
                names = [*PRESETS, *KEEP]
                close = difflib.get_close_matches(written.preset, names, n=1)
                hint = f"did you mean {close[0]!r}?" if close else None
                self._problem(loc, f"unknown format {written.preset!r}", expected=", ".join(names), hint=hint)
                return None
            base = PRESETS[written.preset]
        elif "bits" not in changes:
            self._problem(loc, "a format needs bits or a preset")
            return None
        found = {"group_size": 128, "symmetric": True, "scale_dtype": None, **base, **changes}
        if found["scale_dtype"] in SCALE_DTYPES:
            found["scale_dtype"] = SCALE_DTYPES[found["scale_dtype"]]
        return found

    def _passes(self, written: Any, spec: Mapping[str, Any] | None, loc: Loc) -> tuple[PassCall, ...]:
        if spec is None:
            if written:
                self._problem(loc, "passes on a tensor that is kept as stored", hint="choose an integer format")
            return ()
        calls = []
        for index, item in enumerate(written if written is not None else DEFAULT_PASSES):
            name, options = (item, {}) if isinstance(item, str) else next(iter(item.items()), ("", {}))
            if not isinstance(item, str) and len(item) != 1:
                self._problem((*loc, index), "one pass per list item", got=str(item))
                continue
            calls.append(self._call(name, options or {}, (*loc, index)))
        found = tuple(call for call in calls if call is not None)
        if not found and len(calls) == len(found):
            self._problem(loc, "no pass rounds the weight", expected=", ".join(passes.available()))
        self._one_rounding(found, spec, loc)
        return found

    def _call(self, name: str, options: Mapping[str, Any], loc: Loc) -> PassCall | None:
        """A pass by name, substituted, its options checked and completed."""
        if name in self.substitutions:
            self.used.add(name)
            self.notes.append(f"{self._where(loc)}: {name} substituted by {self.substitutions[name]}")
            name, options = self.substitutions[name], {}
        if name in LATER:
            self.missing.append((name, self._where(loc)))
            return PassCall(name, dict(options))
        if name not in passes.available():
            close = difflib.get_close_matches(name, [*passes.available(), *LATER], n=1)
            hint = f"did you mean {close[0]!r}?" if close else None
            self._problem(loc, f"unknown pass {name!r}", expected=", ".join(passes.available()), hint=hint)
            return None
        try:
            return PassCall(name, passes.load(name).Options(**options).model_dump())
        except ValidationError as error:
            known = list(passes.load(name).Options.model_fields)
            for item in error.errors():
                wrong = str(item["loc"][-1]) if item["loc"] else ""
                close = difflib.get_close_matches(wrong, known, n=1) if wrong not in known else []
                hint = f"did you mean {close[0]!r}?" if close else f"options of {name}: {', '.join(known)}"
                self._problem((*loc, name, wrong), f"{name}: {wrong}: {item['msg']}", hint=hint)
            return None

    def _one_rounding(self, calls: tuple[PassCall, ...], spec: Mapping[str, Any], loc: Loc) -> None:
        rounding = [
            call.name for call in calls if call.name not in LATER and passes.load(call.name).KIND == "round"
        ]
        if len(rounding) > 1:
            self._problem(loc, "a weight is rounded once", got=", ".join(rounding))
        for name in rounding:
            if getattr(passes.load(name), "SYMMETRIC_ONLY", False) and not spec["symmetric"]:
                self._problem(loc, f"{name} rounds symmetric formats only", hint="use gptq, or symmetric: true")

    def _cache(self, precision: str) -> None:
        loc: Loc = ("quantization_config", "kv_cache", "precision")
        if "kv_cache" in self.substitutions:
            self.used.add("kv_cache")
            precision = self.substitutions["kv_cache"]
            self.notes.append(f"{self._where(loc)}: kv_cache substituted by {precision}")
            if precision not in ("fp16", "bf16"):
                self._problem(loc, f"--substitute kv_cache={precision}", expected="fp16 or bf16")
        elif precision not in ("fp16", "bf16"):
            self.missing.append(("kv_cache", self._where(loc)))
