"""Recipes: strict YAML in, ``Recipe`` out. Every mistake at once, each with file:line and a suggestion.

Long form: ordered rules, first match wins. Short form (``quantization_config`` with one section per
role) is translated into the same rules. What may be written stands in ``written``, what the words mean
in ``resolve``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from compressor.errors import CompressorError, Problems
from compressor.recipe.mistakes import did_you_mean, validate
from compressor.recipe.presets import find_preset
from compressor.recipe.resolve import Resolver
from compressor.recipe.rules import LATER, Recipe, Rule, unavailable
from compressor.recipe.written import RecipeModel, ShortRecipeModel
from compressor.recipe.yamlmarks import load_yaml
from compressor.shipped import shipped_folder

__all__ = ["LATER", "Recipe", "Rule", "find_recipe", "load_recipe", "shipped_recipes", "unavailable"]


def shipped_recipes() -> dict[str, Path]:
    """Shipped recipes by name."""
    return {path.stem: path for path in sorted(shipped_folder("recipes").glob("*.yaml"))}


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
    raise CompressorError(
        f"{source}: no such recipe",
        expected="a YAML file, or one of " + ", ".join(shipped),
        hint=did_you_mean(source, shipped),
    )


def load_recipe(
    source: str | Path, substitutions: Mapping[str, str] | None = None, preset: str = "default"
) -> Recipe:
    """Read and check a recipe.

    Args:
        source: A file, or the name of a shipped recipe.
        substitutions: Passes to replace (``awq=gptq``, ``kv_cache=fp16``).
        preset: What fills in passes and options it leaves open (recipe.presets).

    Raises:
        CompressorError: anything wrong with it, all at once as Problems.
    """
    effort = find_preset(preset)
    path = find_recipe(str(source))
    data, lines = load_yaml(path)
    short = isinstance(data, dict) and "quantization_config" in data
    model, mistakes = validate(ShortRecipeModel if short else RecipeModel, data, lines, path)
    resolver = Resolver(path, lines, substitutions or {}, effort)
    recipe = resolver.recipe(model) if model is not None else None
    found = sorted([*mistakes, *resolver.mistakes], key=lambda mistake: mistake[0])
    problems = list({str(error): error for _, error in found}.values())
    if recipe is not None and not mistakes:
        problems += resolver.unused()
    if problems or recipe is None:
        raise Problems(f"{path}: not a valid recipe", problems)
    return recipe
