"""One file per model family, data only. The directory listing is the registry."""

from __future__ import annotations

import difflib
import importlib
import pkgutil

from compressor.arch.base import Config, Family
from compressor.errors import CompressorError


def families() -> dict[str, Family]:
    """Every family file's FAMILY, by file name."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base")
    return {name: importlib.import_module(f"{__name__}.{name}").FAMILY for name in names}


def find_family(config: Config, label: str) -> Family:
    """The family of a config.json.

    Args:
        config: Parsed config.json.
        label: Path of the model, for the message.

    Raises:
        CompressorError: ``model_type`` is missing or no family covers it.
    """
    model_type = config.get("model_type")
    known = {t: family for family in families().values() for t in family.model_types}
    if isinstance(model_type, str) and model_type in known:
        return known[model_type]
    close = difflib.get_close_matches(str(model_type), known, n=1)
    raise CompressorError(
        f"{label}: unknown architecture",
        got=f"model_type {model_type!r} in config.json",
        expected="one of " + ", ".join(sorted(known)),
        hint=f"did you mean {close[0]!r}?" if close else "docs/adding-a-family.md adds one",
    )
