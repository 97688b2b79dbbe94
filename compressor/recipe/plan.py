"""Recipe + family + headers -> Plan. Every rule is checked here, before any weight is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from compressor.arch.base import Config, Family
from compressor.checkpoint.base import TensorInfo
from compressor.core.plan import Plan, PlannedTensor
from compressor.core.spec import Spec, dividing_group_sizes
from compressor.errors import CompressorError, Problems
from compressor.kernels.floats import FLOAT_BYTES
from compressor.recipe.estimate import RunShape, artifact_nbytes, disk_bytes, peak_parts
from compressor.recipe.formats import to_spec
from compressor.recipe.matching import Model, Target, abbreviated, matches, unmatched
from compressor.recipe.rules import INSTEAD, Recipe, Rule
from compressor.recipe.written import QUANTIZABLE
from compressor.transforms import base as transforms

__all__ = ["RunShape", "headers_from_config", "make_plan"]

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_KEPT_DTYPES = {"fp16": "F16", "bf16": "BF16"}


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
        tensors: Headers of the checkpoint (seen through the recipe's transforms, as is ``config``), or None
            to plan from the config alone, which the transforms then change here.
        recipe: The rules.
        run: Calibration size, for the memory prediction.

    Raises:
        Problems: rules that match nothing, group sizes that do not divide: all at once.
    """
    if tensors is None:
        config = transforms.present(recipe.transforms, config, family, label)
    headers = tensors if tensors is not None else headers_from_config(config, family)
    planner = _Planner(config, family, recipe)
    planned = tuple(planner.plan(info) for info in _walk_order(headers, config, family))
    planner.check(label)
    dims = family.dims(config)
    parts = peak_parts(planned, family, dims, run)
    if recipe.transforms:
        parts["transforms"] = transforms.memory(recipe.transforms, config, family)
    return Plan(
        model=label,
        family=family.name,
        tensors=planned,
        layers=dims["layers"],
        peak_ram_bytes=sum(parts.values()),
        disk_bytes=disk_bytes(planned, dims, run),
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
        self.taken: dict[str, int] = defaultdict(int)
        self.targets: list[Target] = []
        self.others: set[str] = set()
        self.indivisible: dict[tuple[str, int, int, str], int] = defaultdict(int)
        self.kept: dict[tuple[str, str], None] = {}
        self.quantized = 0
        self.surplus: list[str] = []

    def plan(self, info: TensorInfo) -> PlannedTensor:
        """One tensor's fate."""
        expected = self.expected.get(info.name)
        layer = self.family.layer_of(info.name)
        if layer is not None and layer >= self.layers:  # blocks the config does not run (MTP and the like)
            layer = None
            self.surplus.append(info.name)
        target = Target(info.name.rpartition(".")[0], expected.role if expected else "other", layer)
        rule = self._rule(target, info)
        spec = self._spec(rule, info, target.module) if rule and rule.format else None
        return PlannedTensor(
            name=info.name,
            module=target.module,
            role=target.role,
            layer=target.layer,
            shape=info.shape,
            dtype=info.dtype,
            source_nbytes=info.nbytes,
            spec=spec,
            passes=rule.passes if rule and spec else (),
            rule=rule.where if rule else "no rule",
            nbytes=artifact_nbytes(spec, info.shape[0], info.shape[1]) if spec else info.nbytes,
        )

    def _rule(self, target: Target, info: TensorInfo) -> Rule | None:
        """The first rule that matches; None for what is never quantized."""
        if target.role not in QUANTIZABLE or len(info.shape) != 2:
            self.others.add(target.module)
            return None
        self.targets.append(target)
        for rule in self.recipe.rules:
            if matches(rule, target.module, target.role, target.layer, self.layers):
                self.taken[rule.where] += 1
                if _KEPT_DTYPES.get(rule.kept_as, info.dtype) != info.dtype:
                    self.kept[rule.kept_as, info.dtype.lower()] = None
                return rule
        return None

    def _spec(self, rule: Rule, info: TensorInfo, module: str) -> Spec | None:
        """The format of one tensor; None, and remembered, where its groups do not divide."""
        assert rule.format is not None
        self.quantized += 1
        spec = to_spec(rule.format, info.dtype)
        width = info.shape[1]
        if spec.group_size > 0 and width % spec.group_size:
            self.indivisible[abbreviated(module), width, spec.group_size, rule.where] += 1
            return None
        return spec

    def notes(self) -> Iterator[str]:
        """Facts the table should show."""
        for name, where in self.recipe.missing:
            yield (
                f"{name.upper().replace('_', '-')} is NOT AVAILABLE YET ({where}): sizes are right, but running"
                f" needs --substitute {name}={INSTEAD[name]}"
            )
        if self.surplus:
            yield f"{len(self.surplus)} tensors of blocks beyond num_hidden_layers are carried unquantized"
        for written, dtype in self.kept:
            yield f"{written} keeps tensors as they are stored: {dtype}"
        for rule in self.recipe.rules:
            if not self.taken[rule.where]:
                tied = rule.roles == ("lm_head",) and self.family.tied(self.config)
                why = ": the head is the embedding table (tie_word_embeddings)" if tied else ""
                yield f"{rule.where} matches nothing in this model{why}"
        if not self.quantized:
            yield "this recipe quantizes nothing"

    def check(self, label: str) -> None:
        """Raise everything found, at once."""
        head = self.family.head if self.family.tied(self.config) else None
        model = Model(self.layers, head, tuple(self.targets), frozenset(self.others))
        problems = [p for rule in self.recipe.rules for p in unmatched(rule, self.taken[rule.where], model)]
        problems += [_indivisible(*key, count) for key, count in self.indivisible.items()]
        if problems:
            raise Problems(f"{label}: the recipe {self.recipe.source} does not fit this model", problems)


def _indivisible(name: str, width: int, group: int, where: str, count: int) -> CompressorError:
    """One error for the same linear of all blocks."""
    sizes = [str(size) for size in dividing_group_sizes(width)]
    return CompressorError(
        f"{name} ({count} tensor{'s' if count > 1 else ''}): in_features {width} is not a multiple of"
        f" group_size {group} in {where}",
        hint="group_size " + ", ".join([*sizes, "or -1 for one scale per row"]),
    )
