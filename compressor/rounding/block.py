"""One block of the walk: statistics, folds, rounding stage by stage, and its shard."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from compressor.calibration.walk import FloatModel
from compressor.core.tensors import RawTensor
from compressor.errors import CompressorError
from compressor.kernels.floats import encode_float
from compressor.rounding.rescale import TOLERANCE, Folds, Rescaler, moved, rescaling
from compressor.rounding.streams import Streams
from compressor.rounding.tensor import Work, needs, round_tensor, shard_name

if TYPE_CHECKING:
    from compressor.calibration.stats import LayerStats
    from compressor.calibration.walk import Walk
    from compressor.checkpoint.writer import RunDirectory

HELD_OUT = 4
"""One batch in so many is kept out of the statistics where a pass wants some to judge by."""


class BlockRounding:
    """Rounds block ``layer`` and moves the streams behind it.

    A block runs in steps where its family names them (attention, then feed-forward), else as a whole. In a
    step, linears that read the same input are one stage (q, k and v; o; gate and up; down), and each stage
    takes its statistics behind the rounded ones before it.
    """

    def __init__(self, work: Work, walk: Walk, layer: int, streams: Streams) -> None:
        self.work, self.walk, self.layer, self.streams = work, walk, layer, streams
        self.prefix = work.family.block(layer) + "."
        self.planned = [tensor for tensor in work.plan.tensors if tensor.layer == layer]
        self.by_name = {t.module.removeprefix(self.prefix): t for t in self.planned if t.name.endswith(".weight")}
        self.wanted = {name: needs(tensor) for name, tensor in self.by_name.items() if needs(tensor)}
        self.timed = work.profile.stage
        with self.timed("reading weights"):
            self.block = walk.block(layer)
        self.float_block = self.block
        self.tensors: dict[str, RawTensor] = {}
        self.facts: dict[str, Any] = {}

    def write(self, run: RunDirectory) -> None:
        """Round everything, let the streams pass the rounded block, and write the shard."""
        stats = self._fold()
        if self.streams.exact is not None:
            self.float_block = copy.deepcopy(self.block)
        for step in range(len(self.work.family.residuals)) or (None,):
            self._round_step(step, stats)
        with self.timed("writing"):
            self._keep_the_rest()
            self.walk.release(self.block)
            run.write_shard(shard_name(self.layer, self.work.plan.layers), self.tensors, self.facts)

    def _any(self, need: str) -> bool:
        return any(need in wanted for wanted in self.wanted.values())

    def _round_step(self, step: int | None, stats: dict[str, LayerStats]) -> None:
        """Every stage of a step, then the streams pass it."""
        stages = self._stages(step)
        comparing = [stage for stage in stages if any("cross" in self.wanted.get(name, ()) for name in stage)]
        for stage in stages:
            self._round_stage(step, stage, stats, advance=bool(comparing) and stage is comparing[-1])
        with self.timed("forward"):
            if self.streams.exact is not None and not comparing:
                self.walk.forward(self.float_block, self.layer, self.streams.exact, step)
            self.walk.forward(self.block, self.layer, self.streams.rounded, step)

    def _stages(self, step: int | None) -> list[list[str]]:
        """Local names of the quantized linears of a step, stage by stage."""
        inside = "" if step is None else self.work.family.residuals[step][1] + "."
        quantized = {
            name for name, tensor in self.by_name.items() if tensor.spec is not None and name.startswith(inside)
        }
        groups = [[name for name in group if name in quantized] for group in self.work.family.inputs]
        return [group for group in groups if group]

    def _fold(self) -> dict[str, LayerStats]:
        """Run the rescaling passes; returns statistics where rounding asks for no others."""
        scaled = [name for name, tensor in self.by_name.items() if rescaling(tensor)]
        self.folds = Folds()
        if not scaled:
            return {}
        with self.timed("statistics"):
            stats = self.walk.collect(self.block, self.layer, self.streams.rounded, scaled)
        with self.timed("rescaling"):
            return self._rescale(stats)

    def _rescale(self, stats: dict[str, LayerStats]) -> dict[str, LayerStats]:
        """Fold, and prove that the block computes what it computed."""
        probe = self.streams.rounded[:1]
        before = self.walk.output(self.block, self.layer, probe[0])
        dims = self.work.family.dims(self.work.checkpoint.config)
        rescaler = Rescaler(
            self.work.family,
            self.block,
            self.by_name,
            stats,
            heads=dims["heads"] // dims["kv_heads"],
            head_dim=dims["head_dim"],
            device=self.work.device,
        )
        self.folds = rescaler.run()
        drift = moved(before, self.walk.output(self.block, self.layer, probe[0]))
        if not drift <= TOLERANCE:
            self._take_back(drift)
            return {}
        return {
            name: found
            for name, found in self.folds.stats.items()
            if self.wanted.get(name, frozenset()) == frozenset({"hessian"})
        }

    def _take_back(self, drift: float) -> None:
        """A fold moved the output: start from the stored block again, without folds."""
        sentence = f"rescaling moved the block's output by {drift:.2g} of its size and was taken back"
        if self.work.strict:
            raise CompressorError(
                f"{self.prefix.removesuffix('.')}: {sentence}", hint="run without --strict to accept this"
            )
        self.walk.release(self.block)
        self.block = self.walk.block(self.layer)
        self.folds = Folds(notes=[sentence])

    def _round_stage(
        self, step: int | None, stage: Sequence[str], stats: dict[str, LayerStats], *, advance: bool
    ) -> None:
        wanted = [name for name in stage if name in self.wanted and name not in stats]
        found = {**stats, **self._collect(step, wanted, advance)} if wanted else stats
        for name in stage:
            tensor = self.by_name[name]
            with self.timed("rounding"):
                weight = self.block.get_submodule(name).weight.detach().cpu().numpy()  # type: ignore[operator]
                encoded, rounded, facts = round_tensor(self.work, tensor, weight, found.get(name))
                self._use(name, rounded.dequantize())
            self.tensors.update(encoded)
            self.facts[tensor.name] = facts | self._fold_facts(name)

    def _collect(self, step: int | None, wanted: list[str], advance: bool) -> dict[str, LayerStats]:
        """Statistics of a stage; with the last stage that compares, the float model's stream passes the step."""
        exact = None
        if self.streams.exact is not None and any("cross" in self.wanted[name] for name in wanted):
            exact = FloatModel(self.float_block, self.streams.exact, advance)
        held_out = len(self.streams.rounded) // HELD_OUT if self._any("held_out") else 0
        with self.timed("statistics"):
            return self.walk.collect(
                self.block,
                self.layer,
                self.streams.rounded,
                wanted,
                step=step,
                exact=exact,
                held_out=held_out,
            )

    def _use(self, name: str, rounded: NDArray[np.float32]) -> None:
        """The block goes on with the rounded weight."""
        with torch.no_grad():
            self.block.get_submodule(name).weight.copy_(torch.from_numpy(rounded))  # type: ignore[operator]

    def _fold_facts(self, name: str) -> dict[str, Any]:
        """What rescaling did to a module's weight."""
        pairs = self.folds.touched.get(name, [])
        return {"rescaled": {pair: self.folds.facts[pair] for pair in pairs}} if pairs else {}

    def _keep_the_rest(self) -> None:
        """What is not rounded: as stored, or as a fold left it."""
        for tensor in self.planned:
            if tensor.spec is not None:
                continue
            changed = self.folds.changed.get(tensor.name.removeprefix(self.prefix))
            if changed is None:
                self.tensors[tensor.name] = self.work.checkpoint.raw(tensor.name)
            else:
                data = encode_float(changed, tensor.dtype)
                self.tensors[tensor.name] = RawTensor(tensor.dtype, changed.shape, data)
                folded = self._fold_facts(tensor.module.removeprefix(self.prefix))
                self.facts[tensor.name] = {"format": tensor.dtype.lower(), "degraded": [], **folded}
