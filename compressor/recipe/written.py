"""What a recipe file may say: the long and the short form as pydantic models."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from compressor.patterns import compile_pattern

QUANTIZABLE = ("embedding", "attention", "ffn", "lm_head")
Role = Literal["embedding", "attention", "ffn", "lm_head"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Layers(_Strict):
    """``{first: n}``, ``{last: n}``, or both."""

    first: int | None = Field(None, ge=1)
    last: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _says_something(self) -> Layers:
        if self.first is None and self.last is None:
            raise ValueError("first or last is missing")
        return self


def _kind(value: Any) -> str:
    """Which member of a union a value is meant for: its type's name."""
    return "dict" if isinstance(value, BaseModel) else type(value).__name__


Block = Annotated[int, Field(ge=0)]
LayersWritten = Annotated[
    Annotated[Layers, Tag("dict")]
    | Annotated[Block, Tag("int")]
    | Annotated[str, Tag("str")]
    | Annotated[list[Block], Field(min_length=1), Tag("list")],
    Discriminator(
        _kind,
        custom_error_type="kind",
        custom_error_message='a number, a list of numbers, "10-20", {first: n} or {last: n} is wanted',
    ),
]
PassWritten = Annotated[
    Annotated[str, Tag("str")] | Annotated[dict[str, dict[str, Any] | None], Tag("dict")],
    Discriminator(
        _kind, custom_error_type="kind", custom_error_message="a pass is a name, or {name: {option: value}}"
    ),
]


class Match(_Strict):
    """What a rule applies to; every condition given must hold."""

    role: list[Role] | None = Field(None, min_length=1)
    modules: list[str] | None = Field(None, min_length=1)
    layers: LayersWritten | None = None

    @field_validator("role", "modules", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("modules")
    @classmethod
    def _patterns(cls, value: list[str] | None) -> list[str] | None:
        for pattern in value or ():
            try:
                compile_pattern(pattern[3:] if pattern.startswith("re:") else "")
            except ValueError as error:
                raise ValueError(f"{pattern!r} is no usable regular expression: {error}") from error
        return value

    @field_validator("layers")
    @classmethod
    def _range(cls, value: Any) -> Any:
        if isinstance(value, str) and parse_range(value) is None:
            raise ValueError('a layer range looks like "10-20"')
        return value

    @model_validator(mode="after")
    def _says_something(self) -> Match:
        if self.role is None and self.modules is None and self.layers is None:
            raise ValueError('role, modules or layers is missing (modules: "*" matches everything)')
        return self


class Format(_Strict):
    """A preset with changes, or spelled out."""

    preset: str | None = None
    bits: int | None = Field(None, ge=2, le=8)
    group_size: int | None = Field(None, ge=-1)
    symmetric: bool | None = None
    scale_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    kind: Literal["int", "float"] | None = None
    block: list[Annotated[int, Field(ge=1)]] | None = Field(None, min_length=2, max_length=2)
    activations: Literal["int8", "fp8"] | None = None


class RuleModel(_Strict):
    """One rule as written; ``match: ffn`` and ``format: int4`` are short for role and preset."""

    match: Match
    format: Format
    passes: list[PassWritten] | None = None

    @field_validator("match", "format", mode="before")
    @classmethod
    def _spelled_out(cls, value: Any, info: Any) -> Any:
        key = {"match": "role", "format": "preset"}[info.field_name]
        return {key: value} if isinstance(value, str) else value


class RecipeModel(_Strict):
    """The long form."""

    name: str | None = None
    description: str | None = None
    transforms: list[PassWritten] | None = None
    finish: list[PassWritten] | None = None
    rules: list[RuleModel] = Field(min_length=1)


class Section(_Strict):
    """One section of the short form."""

    precision: str
    method: Literal["awq", "gptq", "ptq_symmetric"] | None = None
    group_size: int | None = Field(None, ge=-1)
    symmetric: bool | None = None


class CacheSection(_Strict):
    """The short form's kv_cache."""

    precision: Literal["int4", "int8", "fp8", "fp16", "bf16"]


class ShortModel(_Strict):
    """The short form's body."""

    embedding_layer: Section | None = None
    attention_layers: Section | None = None
    ffn_layers: Section | None = None
    lm_head: Section | None = None
    kv_cache: CacheSection | None = None

    @model_validator(mode="after")
    def _says_something(self) -> ShortModel:
        if not self.model_fields_set:
            raise ValueError("at least one section is wanted: " + ", ".join(ShortModel.model_fields))
        return self


class ShortRecipeModel(_Strict):
    """The short form."""

    name: str | None = None
    description: str | None = None
    quantization_config: ShortModel


def parse_range(text: str) -> range | None:
    """``"10-20"`` -> range(10, 21); None when it is no range."""
    found = re.fullmatch(r"\s*([0-9]{1,6})\s*-\s*([0-9]{1,6})\s*", text)
    if found is None or int(found[1]) > int(found[2]):
        return None
    return range(int(found[1]), int(found[2]) + 1)
