"""From a recipe as written to its rules: formats and passes by name, options filled in, substitutions made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from compressor.core.plan import PassCall
from compressor.distill import options as distill
from compressor.errors import CompressorError
from compressor.passes import base as passes
from compressor.recipe.formats import DEFAULTS, FLOAT_DEFAULTS, KEEP, PRESETS, SCALE_DTYPES, to_spec
from compressor.recipe.mistakes import Mistake, did_you_mean
from compressor.recipe.presets import Preset
from compressor.recipe.rules import Recipe, Rule
from compressor.recipe.written import Format, RecipeModel, RuleModel, Section, ShortRecipeModel
from compressor.recipe.yamlmarks import Loc, line_of
from compressor.transforms import base as transforms

_SECTIONS = {
    "embedding_layer": "embedding",
    "attention_layers": "attention",
    "ffn_layers": "ffn",
    "lm_head": "lm_head",
}
_AS_STORED = ("fp16", "bf16")
_Entry = tuple[str, Mapping[str, Any], Loc]


class Resolver:
    """Turns a validated recipe into rules; what is wrong is collected in ``mistakes``."""

    def __init__(self, path: Path, lines: dict[Loc, int], substitutions: Mapping[str, str], preset: Preset) -> None:
        self.path, self.lines, self.substitutions, self.preset = path, lines, substitutions, preset
        self.mistakes: list[Mistake] = []
        self.missing: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.used: set[str] = set()

    def recipe(self, model: RecipeModel | ShortRecipeModel) -> Recipe:
        """The rules, in order."""
        rules = self._short(model) if isinstance(model, ShortRecipeModel) else self._long(model)
        calls = self._transforms(getattr(model, "transforms", None) or [])
        finish = tuple(self._finish(getattr(model, "finish", None)))
        name, missing, notes = model.name or self.path.stem, tuple(self.missing), tuple(self.notes)
        return Recipe(name, str(self.path), rules, missing, notes, tuple(calls), finish)

    def unused(self) -> list[CompressorError]:
        """Substitutions for something the recipe does not use."""
        return [
            CompressorError(f"--substitute {old}={new}: {self.path} does not use {old}")
            for old, new in self.substitutions.items()
            if old not in self.used
        ]

    def _long(self, model: RecipeModel) -> tuple[Rule, ...]:
        return tuple(self._rule(index, rule) for index, rule in enumerate(model.rules))

    def _short(self, model: ShortRecipeModel) -> tuple[Rule, ...]:
        body = model.quantization_config
        found = {key: getattr(body, key) for key in _SECTIONS}
        rules = [self._section(key, section) for key, section in found.items() if section is not None]
        if body.kv_cache is not None:
            self._cache(body.kv_cache.precision)
        return tuple(rules)

    def _where(self, loc: Loc) -> str:
        return f"{self.path}:{line_of(self.lines, loc)}"

    def _place(self, loc: Loc) -> str:
        """``mixed.yaml:7``: for tables, where the folder is noise."""
        return f"{self.path.name}:{line_of(self.lines, loc)}"

    def _problem(self, loc: Loc, what: str, **more: Any) -> None:
        error = CompressorError(f"{self._where(loc)}: {what}", **more)
        self.mistakes.append((line_of(self.lines, loc), error))

    def _rule(self, index: int, rule: RuleModel) -> Rule:
        loc: Loc = ("rules", index)
        spec = self._format(rule.format, (*loc, "format"))
        return Rule(
            where=f"rule {index + 1} ({self._place(loc)})",
            roles=tuple(rule.match.role) if rule.match.role else None,
            modules=tuple(rule.match.modules) if rule.match.modules else None,
            layers=rule.match.layers,
            format=spec,
            passes=self._passes(rule.passes, spec, (*loc, "passes")),
            kept_as=(rule.format.preset or "") if spec is None else "",
        )

    def _section(self, key: str, section: Section) -> Rule:
        loc: Loc = ("quantization_config", key)
        written = Format(
            bits=None,
            block=None,
            preset=section.precision,
            group_size=section.group_size,
            symmetric=section.symmetric,
        )
        spec = self._format(written, (*loc, "precision"))
        calls = self._passes(self._method(section, spec), spec, (*loc, "method"))
        kept_as = "" if spec else section.precision
        where = f"{key} ({self._place(loc)})"
        return Rule(where, (_SECTIONS[key],), None, None, spec, calls, kept_as, short=True)

    def _method(self, section: Section, spec: Mapping[str, Any] | None) -> list[str] | None:
        """The passes a ``method`` of the short form stands for: AWQ scales, then rounds to nearest."""
        if section.method != "awq" or spec is None or "awq" in self.substitutions:
            return [section.method] if section.method else None
        return ["awq", "ptq_symmetric" if spec["symmetric"] else "gptq"]

    def _format(self, written: Format, loc: Loc) -> dict[str, Any] | None:
        """Bits, group_size, symmetric, scale_dtype, and what else differs from a plain integer; None = keep."""
        changes = written.model_dump(exclude_none=True, exclude={"preset"})
        base: dict[str, Any] = {}
        if written.preset in KEEP:
            if changes:
                self._problem(loc, f"{written.preset} takes no {' or '.join(changes)}")
            return None
        if written.preset is not None and written.preset not in PRESETS:
            names = [*PRESETS, *KEEP]
            hint = did_you_mean(written.preset, names)
            self._problem(loc, f"unknown format {written.preset!r}", expected=", ".join(names), hint=hint)
            base = PRESETS["int8"]  # the passes are checked all the same
        elif written.preset is not None:
            base = PRESETS[written.preset]
        elif written.kind == "float":
            base = FLOAT_DEFAULTS if written.block is None else {**FLOAT_DEFAULTS, "group_size": 0}
        elif written.bits is None:
            self._problem(loc, "a format needs bits or a preset")
        found = {**DEFAULTS, **base, **changes}
        found["scale_dtype"] = SCALE_DTYPES.get(str(found["scale_dtype"]))
        try:
            to_spec({"bits": 8, **found}, "BF16")
        except ValueError as error:
            self._problem(loc, str(error))
            return {**DEFAULTS, **PRESETS["int8"]}  # the passes are checked all the same
        return found

    def _passes(self, written: Any, spec: Mapping[str, Any] | None, loc: Loc) -> tuple[PassCall, ...]:
        if spec is None:
            if written:
                self._problem(loc, "passes on a tensor that is kept as stored", hint="choose a format that rounds")
            return ()
        if written == []:
            self._problem(loc, "no pass rounds the weight", expected=", ".join(passes.available()))
        default = self.preset.passes[spec.get("kind", "int")]
        entries = self._entries("pass", default if written is None else written, loc)
        calls = [call for entry in self._substituted(entries) for call in self._call(*entry)]
        self._one_rounding(calls, spec, loc)
        return tuple(calls)

    def _entries(self, word: str, written: Iterable[Any], loc: Loc) -> list[_Entry]:
        """``[rtn, gptq: {damp: 0.1}]`` as names with options and places."""
        entries: list[_Entry] = []
        for index, item in enumerate(written):
            entry = {item: None} if isinstance(item, str) else item
            if len(entry) != 1:
                self._problem((*loc, index), f"one {word} per list item", got=str(entry))
            entries += [(name, options or {}, (*loc, index)) for name, options in entry.items()]
        return entries

    def _transforms(self, written: list[Any]) -> list[PassCall]:
        """What is done to the whole model, each at most once, options checked and completed."""
        calls: list[PassCall] = []
        for name, options, loc in self._entries("transform", written, ("transforms",)):
            known = transforms.available()
            if name not in known:
                hint = f"{name} is a pass of a rule" if name in passes.available() else did_you_mean(name, known)
                self._problem(loc, f"unknown transform {name!r}", expected=", ".join(known), hint=hint)
            elif name in [call.name for call in calls]:
                self._problem(loc, f"{name} stands twice")
            else:
                calls += self._options(name, transforms.load(name).Options, options, loc)
        return calls

    def _finish(self, written: list[Any] | None) -> list[PassCall]:
        """What is done to the artifact at the end; the preset's where the recipe does not say."""
        calls: list[PassCall] = []
        known = {distill.NAME: distill.Options}
        entries = self._entries("step", self.preset.finish if written is None else written, ("finish",))
        for name, options, loc in entries:
            if name not in known:
                self._problem(
                    loc, f"unknown step {name!r}", expected=", ".join(known), hint=did_you_mean(name, known)
                )
            elif calls:
                self._problem(loc, f"{name} stands twice")
            else:
                calls += self._options(name, known[name], options, loc)
        return calls

    def _substituted(self, entries: list[_Entry]) -> list[_Entry]:
        """Passes with --substitute applied; one that the list names anyway is not called twice."""
        named, found = [name for name, _, _ in entries], []
        for name, options, loc in entries:
            new = self.substitutions.get(name)
            if new is not None:
                self.used.add(name)
                self.notes.append(f"{self._where(loc)}: {name} substituted by {new}")
            if new is None or new == name:
                found.append((name, options, loc))
            elif new not in named:
                found.append((new, {}, loc))
        return found

    def _call(self, name: str, options: Mapping[str, Any], loc: Loc) -> list[PassCall]:
        """A pass by name, its options checked and completed; empty when that is impossible."""
        if name not in passes.available():
            hint = did_you_mean(name, passes.available())
            self._problem(loc, f"unknown pass {name!r}", expected=", ".join(passes.available()), hint=hint)
            return []
        filled = {**self.preset.options.get(name, {}), **options}
        return self._options(name, passes.load(name).Options, filled, loc)

    def _options(self, name: str, model: Any, options: Mapping[str, Any], loc: Loc) -> list[PassCall]:
        try:
            return [PassCall(name, model.model_validate(dict(options)).model_dump())]
        except ValidationError as error:
            known = list(model.model_fields)
            for item in error.errors():
                wrong = str(item["loc"][-1]) if item["loc"] else ""
                all_options = f"options of {name}: {', '.join(known)}"
                if item["type"] == "extra_forbidden":
                    what, got = f"{name}: unknown option {wrong!r}", None
                    hint = did_you_mean(wrong, known, all_options)
                else:
                    what, got, hint = f"{name}: {wrong}: {item['msg']}", repr(item["input"]), None
                self._problem((*loc, name, wrong), what, got=got, hint=hint)
            return []

    def _one_rounding(self, calls: list[PassCall], spec: Mapping[str, Any], loc: Loc) -> None:
        """Any number of rescaling passes, then one that rounds; each must take this kind of format."""
        kinds = [passes.kind(call) for call in calls]
        rounding = [call.name for call, kind in zip(calls, kinds, strict=True) if kind == "round"]
        if len(rounding) > 1:
            self._problem(loc, "a weight is rounded once", got=", ".join(rounding))
        elif calls and not rounding:
            names = ", ".join(call.name for call in calls)
            self._problem(
                loc,
                "no pass rounds the weight",
                got=f"{names} only",
                hint=f"[{names}, gptq] or [{names}, ptq_symmetric]",
            )
        elif calls and kinds[-1] != "round":
            self._problem(loc, f"{calls[-1].name} comes after {rounding[0]}", hint="rescaling passes come first")
        for call in calls:
            module = passes.load(call.name)
            if getattr(module, "SYMMETRIC_ONLY", False) and not spec["symmetric"]:
                self._problem(
                    loc, f"{call.name} rounds symmetric formats only", hint="use gptq, or symmetric: true"
                )
            if spec.get("kind") == "float" and not getattr(module, "FLOATS", False):
                self._problem(loc, f"{call.name} is for integer formats only", got="fp8", hint="use ptq_symmetric")

    def _cache(self, precision: str) -> None:
        loc: Loc = ("quantization_config", "kv_cache", "precision")
        if "kv_cache" in self.substitutions:
            self.used.add("kv_cache")
            precision = self.substitutions["kv_cache"]
            self.notes.append(f"{self._where(loc)}: kv_cache substituted by {precision}")
            if precision not in _AS_STORED:
                self._problem(loc, f"--substitute kv_cache={precision}", expected="fp16 or bf16")
        elif precision not in _AS_STORED:
            self.missing.append(("kv_cache", self._where(loc)))
