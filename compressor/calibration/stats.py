"""Statistics of what flows into a linear layer, mergeable in any order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compressor.calibration.linear import linear, onednn_is_faster


@dataclass
class LayerStats:
    """Second moments of a linear's input over calibration tokens.

    Attributes:
        hessian: float32 [in, in], the sum of x x^T over tokens (GPTQ's H up to a factor), symmetric.
        tokens: How many tokens went in.
    """

    hessian: torch.Tensor
    tokens: int = 0

    @classmethod
    def empty(cls, in_features: int, device: str = "cpu") -> LayerStats:
        """Statistics of no tokens yet."""
        return cls(torch.zeros(in_features, in_features, dtype=torch.float32, device=device))

    def add(self, inputs: torch.Tensor) -> None:
        """Add inputs float32 [..., in]: every leading position is one token."""
        flat = inputs.reshape(-1, inputs.shape[-1]).float()
        if flat.device.type == "cpu" and onednn_is_faster():
            columns = flat.T.contiguous()
            self.hessian += linear(columns, columns)
        else:
            self.hessian.addmm_(flat.T, flat)
        self.tokens += flat.shape[0]

    def merge(self, other: LayerStats) -> LayerStats:
        """The statistics of both token sets together."""
        return LayerStats(self.hessian + other.hessian, self.tokens + other.tokens)
