"""What a recipe file may say: the long and the short form as pydantic models, and errors that explain."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from compressor.errors import CompressorError, Problems
from compressor.recipe.yamlmarks import Loc, line_of

QUANTIZABLE = ("embedding", "attention", "ffn", "lm_head")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Layers(_Strict):
    """``{first: n}`` or ``{last: n}``."""

    first: int | None = Field(None, ge=1)
    last: int | None = Field(None, ge=1)


class Match(_Strict):
    """What a rule applies to; every condition given must hold."""

    role: list[Literal["embedding", "attention", "ffn", "lm_head"]] | None = None
    modules: list[str] | None = None
    layers: Layers | int | str | list[int] | None = None

    @field_validator("role", "modules", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("layers")
    @classmethod
    def _range(cls, value: Any) -> Any:
        if isinstance(value, str) and parse_range(value) is None:
            raise ValueError('a layer range looks like "10-20"')
        return value


class Format(_Strict):
    """A preset with changes, or spelled out."""

    preset: str | None = None
    bits: int | None = Field(None, ge=2, le=8)
    group_size: int | None = Field(None, ge=-1)
    symmetric: bool | None = None
    scale_dtype: Literal["bf16", "fp16", "fp32"] | None = None


class RuleModel(_Strict):
    """One rule as written."""

    match: Match | str
    format: Format | str
    passes: list[str | dict[str, dict[str, Any] | None]] | None = None


class RecipeModel(_Strict):
    """The long form."""

    name: str | None = None
    description: str | None = None
    rules: list[RuleModel] = Field(min_length=1)


class Section(_Strict):
    """One section of the short form."""

    precision: str
    method: Literal["awq", "gptq", "ptq_symmetric"] | None = None
    group_size: int | None = Field(None, ge=-1)
    symmetric: bool | None = None


class CacheSection(_Strict):
    """The short form's kv_cache."""

    precision: Literal["int8", "fp8", "fp16", "bf16"]


class ShortModel(_Strict):
    """The short form's body."""

    embedding_layer: Section | None = None
    attention_layers: Section | None = None
    ffn_layers: Section | None = None
    lm_head: Section | None = None
    kv_cache: CacheSection | None = None


class ShortRecipeModel(_Strict):
    """The short form."""

    name: str | None = None
    description: str | None = None
    quantization_config: ShortModel


def parse_range(text: str) -> range | None:
    """``"10-20"`` -> range(10, 21); None when it is no range."""
    first, dash, last = text.partition("-")
    if not (dash and first.strip().isdigit() and last.strip().isdigit()):
        return None
    found = range(int(first), int(last) + 1)
    return found if len(found) else None


def validate(model: type[BaseModel], data: Any, lines: dict[Loc, int], path: Path) -> Any:
    """Data as a model.

    Raises:
        Problems: every mistake, with file:line, what was got, and a suggestion.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        seen: dict[str, CompressorError] = {}
        for item in error.errors():
            problem = _explain(item, model, lines, path)
            seen.setdefault(str(problem), problem)
        raise Problems(f"{path}: not a valid recipe", list(seen.values())) from error


def _explain(item: Any, model: type[BaseModel], lines: dict[Loc, int], path: Path) -> CompressorError:
    """A pydantic error as ours: file:line, the key, what was got, what would be right."""
    loc = tuple(part for part in item["loc"] if part in _path_parts(item["loc"], lines))
    where = f"{path}:{line_of(lines, loc)}"
    key = ".".join(map(str, loc)) or "recipe"
    if item["type"] == "extra_forbidden":
        wrong = str(item["loc"][-1])
        close = difflib.get_close_matches(wrong, _known_keys(model), n=1)
        return CompressorError(
            f"{where}: unknown key {wrong!r}", hint=f"did you mean {close[0]!r}?" if close else None
        )
    if item["type"] == "missing":
        return CompressorError(f"{where}: {key}: key {item['loc'][-1]!r} is missing")
    got = item.get("input")
    close = difflib.get_close_matches(str(got), QUANTIZABLE, n=1) if item["type"] == "literal_error" else []
    return CompressorError(
        f"{where}: {key}: {item['msg']}",
        got=repr(got),
        hint=f"did you mean {close[0]!r}?" if close else None,
    )


def _path_parts(loc: tuple[Any, ...], lines: dict[Loc, int]) -> set[Any]:
    """The parts of a pydantic location that exist in the file (it also names union members)."""
    kept: Loc = ()
    for part in loc:
        if (*kept, part) in lines:
            kept = (*kept, part)
    return set(kept)


def _known_keys(model: type[BaseModel]) -> list[str]:
    models: list[type[BaseModel]] = [model, RuleModel, Match, Format, Layers, ShortModel, Section, CacheSection]
    if model is ShortRecipeModel:
        models = [model, ShortModel, Section, CacheSection]
    return [name for kind in models for name in kind.model_fields]
