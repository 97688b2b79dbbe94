"""Where files shipped beside the package are: recipes and calibration texts."""

from __future__ import annotations

import sysconfig
from pathlib import Path

_PATTERNS = {"recipes": "demo.yaml", "calibration_data": "held_out.txt"}


def shipped_folder(name: str) -> Path:
    """``recipes`` or ``calibration_data``: in the checkout, or in an installation's share folder."""
    user = sysconfig.get_preferred_scheme("user")
    installed = [Path(sysconfig.get_path("data")), Path(sysconfig.get_path("data", user))]
    checkout = Path(__file__).parents[1] / name
    folders = [checkout, *(data / "share" / "compressor" / name for data in installed)]
    return next((folder for folder in folders if any(folder.glob(_PATTERNS[name]))), checkout)
