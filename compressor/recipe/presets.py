"""How much work to spend: what ``--preset`` fills in where a recipe leaves it open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compressor.errors import CompressorError
from compressor.recipe.mistakes import did_you_mean


@dataclass(frozen=True)
class Preset:
    """One level of effort.

    Attributes:
        samples: Calibration windows, unless ``--samples`` says otherwise.
        passes: By kind of format, the passes of rules that list none.
        options: By pass, option values that stand in for its defaults; what a recipe spells out wins.
        finish: What is done to the finished artifact of a recipe without a ``finish`` section.
    """

    samples: int = 48
    passes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"int": ("gptq",), "float": ("gptq",)})
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    finish: tuple[str, ...] = ()


PRESETS: dict[str, Preset] = {
    "fast": Preset(samples=32, options={"gptq": {"propagate": 0.0}}),
    "default": Preset(),
    "best": Preset(samples=128, options={"gptq": {"refits": 4, "held_out": True}}, finish=("distill_scales",)),
}


def find_preset(name: str) -> Preset:
    """A preset by name.

    Raises:
        CompressorError: there is none.
    """
    if name in PRESETS:
        return PRESETS[name]
    raise CompressorError(
        f"--preset {name}: no such preset", expected=", ".join(PRESETS), hint=did_you_mean(name, PRESETS)
    )
