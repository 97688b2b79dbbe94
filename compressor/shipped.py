"""Where files shipped beside the package are: recipes and calibration texts."""

from __future__ import annotations

import sysconfig
from pathlib import Path


def shipped_folder(name: str) -> Path:
    """``recipes`` or ``calibration_data``: in the checkout, or in an installation's share folder."""
    user = sysconfig.get_preferred_scheme("user")
    installed = [Path(sysconfig.get_path("data")), Path(sysconfig.get_path("data", user))]
    checkout = Path(__file__).parents[1] / name
    folders = [checkout, *(data / "share" / "compressor" / name for data in installed)]
    return next((folder for folder in folders if folder.is_dir()), checkout)
