"""The hidden states a run carries from block to block, and keeps on disk between them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from compressor.checkpoint.writer import RunDirectory

_EXACT = "exact "


@dataclass
class Streams:
    """Hidden states on their way through the blocks, float32 [b, L, hidden] per batch.

    Attributes:
        rounded: Behind blocks that are rounded already.
        exact: Of the float model, or None where no pass compares with it.
    """

    rounded: list[torch.Tensor]
    exact: list[torch.Tensor] | None = None

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """For the run directory, by name."""
        found = {str(i): hidden for i, hidden in enumerate(self.rounded)}
        found |= {f"{_EXACT}{i}": hidden for i, hidden in enumerate(self.exact or ())}
        return {name: hidden.cpu().numpy() for name, hidden in found.items()}


def load_streams(run: RunDirectory, layer: int, device: str) -> Streams:
    """Hidden states as they entered ``layer``, in torch's own memory."""
    import torch

    arrays = {key: torch.from_numpy(a).clone().to(device) for key, a in run.load_stream(layer).items()}
    exact = [arrays[key] for key in _numbered(arrays, _EXACT)]
    return Streams([arrays[key] for key in _numbered(arrays, "")], exact or None)


def _numbered(arrays: Mapping[str, Any], prefix: str) -> list[str]:
    """Keys ``prefix0``, ``prefix1`` ... that are there."""
    return list(itertools.takewhile(arrays.__contains__, (f"{prefix}{i}" for i in itertools.count())))
