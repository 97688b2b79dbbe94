"""The rounded model with trainable scales and norms, walked block by block forward and backward."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch.func import functional_call

from compressor.arch.base import Family
from compressor.calibration.walk import Walk
from compressor.distill.scaled import FrozenLinear, ScaledLinear, Trained
from compressor.export.compressed_tensors import ArtifactCheckpoint


class Teacher(Walk):
    """The float model: run once, only its final hidden states are kept."""

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the head reads, float32 [..., hidden]: the last block's output through the final norm."""
        return cast(torch.Tensor, self._final_norm()(hidden))


class Student(Walk):
    """An artifact whose blocks compute from codes (1 byte per weight, in memory) and trained scales.

    Attributes:
        trained: Scales and norm weights by the name of their stored tensor.
        head: The head's codes where it is quantized, else None.
    """

    checkpoint: ArtifactCheckpoint

    def __init__(self, artifact: ArtifactCheckpoint, family: Family, device: str = "cpu") -> None:
        super().__init__(artifact, family, device)
        threads = torch.get_num_threads()  # decoding codes lets numba set its own number for torch as well
        self.model.requires_grad_(False)
        self.trained: dict[str, Trained] = {}
        self._of_block: list[dict[str, Trained]] = [{} for _ in range(self.layers)]
        for layer in range(self.layers):
            self._take_block(layer)
        self.head = self._scaled(family.head) if family.head in artifact.specs else None
        self._final = self._add(f"{family.final_norm}.weight")
        torch.set_num_threads(threads)

    def _take_block(self, layer: int) -> None:
        """Replace the quantized linears of a block and note what it trains, by name inside the block."""
        block, prefix = self._blocks[layer], self.family.block(layer) + "."
        for linear in self.family.linears:
            module = prefix + linear.name
            if module in self.checkpoint.specs:
                block.set_submodule(linear.name, self._scaled(module))
                self._of_block[layer][f"{linear.name}.scales"] = self.trained[f"{module}.weight_scale"]
            else:
                block.get_submodule(linear.name).__class__ = FrozenLinear
        for norm in self.family.norms:
            if f"{prefix}{norm.name}.weight" in self.checkpoint.tensors:
                self._of_block[layer][f"{norm.name}.weight"] = self._add(f"{prefix}{norm.name}.weight")

    def _scaled(self, module: str) -> ScaledLinear:
        """The codes of a quantized module; its scales join what is trained."""
        tensor = self.checkpoint.qtensor(f"{module}.weight")
        assert tensor is not None
        scales, name = torch.from_numpy(tensor.scales).to(self.device), f"{module}.weight_scale"
        self.trained[name] = Trained(name, scales, tensor.spec.scale_dtype)
        return ScaledLinear(tensor, self.device, f"{module}.bias" in self.checkpoint.tensors)

    def _add(self, name: str) -> Trained:
        base = torch.from_numpy(self.checkpoint.read(name)).to(self.device)
        self.trained[name] = Trained(name, base, self.checkpoint.tensors[name].dtype)
        return self.trained[name]

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states float32 [b, L, hidden] of token ids int64 [b, L], fit for autograd."""
        return self.embed([tokens])[0].clone()

    def step_block(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Output of a block for hidden float32 [b, L, hidden], in the caller's grad mode."""
        with torch.no_grad():
            kwargs = self._block_kwargs(hidden.detach())[layer]
            block = self._blocks[layer]
            if any(parameter.is_meta for parameter in block.parameters()):
                self.block(layer)
        values = {name: trained.value() for name, trained in self._of_block[layer].items()}
        output = functional_call(block, values, (hidden,), kwargs)
        if any(isinstance(module, FrozenLinear) for module in block.modules()):
            self.release(block)
        return cast(torch.Tensor, output[0] if isinstance(output, tuple) else output)

    def backward_block(self, layer: int, hidden: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Gradient of a block's input, given that of its output; its trained tensors' gradients are added.

        Args:
            layer: The block.
            hidden: float32 [b, L, hidden], its input; the forward is computed again.
            gradient: Like hidden.
        """
        start = hidden.detach().requires_grad_()
        with torch.enable_grad():
            self.step_block(layer, start).backward(gradient)  # type: ignore[no-untyped-call]
        assert start.grad is not None
        return start.grad

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the head reads, float32 [..., hidden], in the caller's grad mode."""
        return cast(torch.Tensor, functional_call(self._final_norm(), {"weight": self._final.value()}, (hidden,)))

    def head_weight(self) -> torch.Tensor:
        """The head's float32 [vocab, hidden], in the caller's grad mode; from trained scales where quantized."""
        if self.head is None:
            return head_matrix(self)
        return self.head.weight(self.trained[f"{self.family.head}.weight_scale"].value())


def head_matrix(walk: Walk) -> torch.Tensor:
    """A model's head as stored, float32 [vocab, hidden]."""
    return torch.from_numpy(walk.checkpoint.read(walk.head_name)).clone().to(walk.device)


def same_head(student: Walk, teacher: Walk) -> bool:
    """Whether both heads are stored as the same bytes: one matrix in memory then serves both."""
    ours, theirs = (walk.checkpoint.raw(walk.head_name) for walk in (student, teacher))
    return ours.dtype == theirs.dtype and np.array_equal(ours.data, theirs.data)
