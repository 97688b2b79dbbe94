"""Recipe + family + headers -> Plan. Every rule is checked here, before any weight is read."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import defaultdict
from collections.abc import Mapping

from compressor.arch.base import Config, Family
from compressor.checkpoint.base import TensorInfo
from compressor.core.plan import Plan, PlannedTensor
from compressor.core.spec import Spec, dividing_group_sizes
from compressor.errors import CompressorError, Problems
from compressor.kernels.floats import FLOAT_BYTES
from compressor.recipe.estimate import RunShape, artifact_nbytes, peak_parts, stream_bytes
from compressor.recipe.schema import LATER, Recipe, Rule
from compressor.recipe.written import QUANTIZABLE, Layers, parse_range

__all__ = ["RunShape", "make_plan"]

_MATCH = ("role", "modules", "layers")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def make_plan(
    *,
    label: str,
    config: Config,
    family: Family,
    tensors: Mapping[str, TensorInfo] | None,
    recipe: Recipe,
    run: RunShape,
) -> Plan:
    """Decide every tensor's fate.

    Args:
        label: Name of the model, for messages.
        config: Parsed config.json.
        family: Its arch data.
        tensors: Headers of the checkpoint, or None to plan from the config alone.
        recipe: The rules.
        run: Calibration size, for the memory prediction.

    Raises:
        Problems: rules that match nothing, group sizes that do not divide: all at once.
    """
    headers = tensors if tensors is not None else headers_from_config(config, family)
    planner = _Planner(config, family, recipe)
    planned = tuple(planner.plan(info) for info in _walk_order(headers, config, family))
    planner.check(label)
    dims = family.dims(config)
    hessians = any(call.name in ("gptq", *LATER) for t in planned for call in t.passes)
    parts = peak_parts(family, dims, run, hessians)
    nbytes = sum(t.nbytes for t in planned)
    return Plan(
        model=label,
        family=family.name,
        tensors=planned,
        layers=dims["layers"],
        peak_ram_bytes=sum(parts.values()),
        disk_bytes=nbytes + stream_bytes(dims, run) + 50_000_000,
        notes=(*recipe.notes, *planner.notes()),
        peak_parts=parts,
    )


def headers_from_config(config: Config, family: Family) -> dict[str, TensorInfo]:
    """The headers a checkpoint of this config would have."""
    written = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = _DTYPES.get(written.removeprefix("torch."), "BF16")
    found = {}
    for name, expected in family.tensors(config).items():
        size = FLOAT_BYTES[dtype]
        for length in expected.shape:
            size *= length
        found[name] = TensorInfo(name, dtype, expected.shape, size, "config.json")
    return found


def _walk_order(headers: Mapping[str, TensorInfo], config: Config, family: Family) -> list[TensorInfo]:
    """Tensors in walk order; those the family does not know come last."""
    known = [name for name in family.tensors(config) if name in headers]
    extra = sorted(headers.keys() - set(known))
    return [headers[name] for name in (*known, *extra)]


class _Planner:
    """Applies the rules tensor by tensor and remembers what went wrong."""

    def __init__(self, config: Config, family: Family, recipe: Recipe) -> None:
        self.family, self.recipe, self.config = family, recipe, config
        self.expected = family.tensors(config)
        self.layers = family.dims(config)["layers"]
        self.hits: dict[str, int] = defaultdict(int)
        self.modules: list[str] = []
        self.indivisible: dict[tuple[str, int, int, str], int] = defaultdict(int)
        self.kept_floats: set[str] = set()

    def plan(self, info: TensorInfo) -> PlannedTensor:
        """One tensor's fate."""
        expected = self.expected.get(info.name)
        module = info.name.rpartition(".")[0]
        role = expected.role if expected else "other"
        layer = self.family.layer_of(info.name)
        rule = self._rule(module, role, layer) if role in QUANTIZABLE and len(info.shape) == 2 else None
        spec = self._spec(rule, info, module) if rule and rule.format else None
        if rule and not rule.format:
            self.kept_floats.add(info.dtype)
        return PlannedTensor(
            name=info.name,
            module=module,
            role=role,
            layer=layer,
            shape=info.shape,
            dtype=info.dtype,
            source_nbytes=info.nbytes,
            spec=spec,
            passes=rule.passes if rule and spec else (),
            rule=rule.where if rule else "no rule",
            nbytes=artifact_nbytes(spec, info.shape[0], info.shape[1]) if spec else info.nbytes,
        )

    def _rule(self, module: str, role: str, layer: int | None) -> Rule | None:
        self.modules.append(module)
        for rule in self.recipe.rules:
            if matches(rule, module, role, layer, self.layers):
                self.hits[rule.where] += 1
                return rule
        return None

    def _spec(self, rule: Rule, info: TensorInfo, module: str) -> Spec | None:
        assert rule.format is not None
        scale_dtype = rule.format["scale_dtype"] or ("BF16" if info.dtype == "BF16" else "F16")
        spec = Spec(**{**rule.format, "scale_dtype": scale_dtype})
        width = info.shape[1]
        if spec.group_size > 0 and width % spec.group_size:
            pattern = re.sub(r"\.\d+\.", ".*.", module)
            self.indivisible[(pattern, width, spec.group_size, rule.where)] += 1
            return None
        return spec

    def notes(self) -> list[str]:
        """Facts the table should show."""
        found = [f"fp16 keeps tensors as stored ({dtype.lower()})" for dtype in sorted(self.kept_floats - {"F16"})]
        found += [
            f"{name.upper().replace('_', '-')} is NOT AVAILABLE YET ({where}): sizes are right, but running"
            f" needs --substitute {name}={'gptq' if name == 'awq' else 'fp16'}"
            for name, where in self.recipe.missing
        ]
        return found

    def check(self, label: str) -> None:
        """Raise everything found, at once."""
        problems = [self._unmatched(rule) for rule in self.recipe.rules if not self.hits[rule.where]]
        problems += [
            CompressorError(
                f"{pattern} ({count} tensor{'s' if count > 1 else ''}): in_features {width} is not a multiple"
                f" of group_size {group} in {where}",
                hint="group_size "
                + (", ".join(map(str, dividing_group_sizes(width))) or "-1 (one scale per row)")
                + ", or -1 for one scale per row",
            )
            for (pattern, width, group, where), count in self.indivisible.items()
        ]
        found = [problem for problem in problems if problem is not None]
        if found:
            raise Problems(f"{label}: the recipe {self.recipe.source} does not fit this model", found)

    def _unmatched(self, rule: Rule) -> CompressorError | None:
        """A rule that matches nothing is a mistake, unless it only keeps what is not there."""
        if rule.lenient:
            return None
        globs = {re.sub(r"\.\d+\.", ".*.", module) for module in self.modules}
        globs |= {"*." + module.rpartition(".")[2] for module in self.modules}
        close = [m for p in rule.modules or () for m in difflib.get_close_matches(p, sorted(globs), n=1)]
        shadowed = " (or an earlier rule takes everything it matches)"
        return CompressorError(
            f"{rule.where}: matches nothing{shadowed}",
            got=", ".join(f"{key} {value}" for key, value in rule.canonical().items() if value and key in _MATCH),
            hint=f"did you mean {close[0]!r}?" if close else "`compress plan --tensors` lists the modules",
        )


def matches(rule: Rule, module: str, role: str, layer: int | None, layers: int) -> bool:
    """Whether every condition of a rule holds for a module."""
    if rule.roles is not None and role not in rule.roles:
        return False
    if rule.modules is not None and not any(_matches_module(p, module) for p in rule.modules):
        return False
    return rule.layers is None or (layer is not None and _in_layers(rule.layers, layer, layers))


def _matches_module(pattern: str, module: str) -> bool:
    """A glob over the whole path, or ``re:`` with a regular expression searched from the start."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatch.fnmatchcase(module, pattern)


def _in_layers(wanted: Layers | int | str | list[int], layer: int, layers: int) -> bool:
    if isinstance(wanted, Layers):
        in_first = wanted.first is not None and layer < wanted.first
        return in_first or (wanted.last is not None and layer >= layers - wanted.last)
    if isinstance(wanted, str):
        return layer in (parse_range(wanted) or ())
    return layer in ([wanted] if isinstance(wanted, int) else wanted)
