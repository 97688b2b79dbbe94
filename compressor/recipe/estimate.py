"""Sizes exact to the byte, and the memory and disk a run will need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compressor.arch.base import Family
from compressor.core.plan import PlannedTensor
from compressor.core.spec import PACK_QUANTIZED, Spec, packed_words
from compressor.kernels.floats import FLOAT_BYTES
from compressor.passes import base as passes

SHAPE_RECORD_BYTES = 16  # weight_shape: int64 [2]
BASELINE_BYTES = 620_000_000  # interpreter, torch, transformers and numba loaded, measured
BATCH_TOKENS = 2048
SIDE_FILES_BYTES = 50_000_000  # tokenizer, configs, manifest, report


@dataclass(frozen=True)
class RunShape:
    """How much calibration data flows through the walk."""

    samples: int = 48
    sequence_length: int = 512

    @property
    def tokens(self) -> int:
        """Calibration tokens."""
        return self.samples * self.sequence_length


def artifact_nbytes(spec: Spec, out_features: int, in_features: int) -> int:
    """Bytes of a rounded matrix in the artifact (compressed-tensors).

    FP8, and integers with quantized activations: a byte per weight, and scales. Other integers:
    weight_packed int32 [out, packed_words(in)], weight_scale, weight_zero_point int32 [packed_words(out), groups]
    for asymmetric formats (int8 [1] for one scale per tensor), weight_shape int64 [2].
    """
    rows, groups = spec.scales_shape(out_features, in_features)
    scales = FLOAT_BYTES[spec.scale_dtype] * rows * groups
    if spec.layout != PACK_QUANTIZED:
        return out_features * in_features + scales
    packed = 4 * out_features * packed_words(in_features, spec.bits)
    packed_zeros = 4 * packed_words(rows, spec.bits) * groups
    zeros = 0 if spec.symmetric else 1 if spec.strategy == "tensor" else packed_zeros
    return packed + scales + zeros + SHAPE_RECORD_BYTES


def peak_parts(
    planned: Sequence[PlannedTensor], family: Family, dims: Mapping[str, int], run: RunShape
) -> dict[str, int]:
    """Predicted peak resident bytes of ``quantize``, by part.

    - the largest tensor outside the blocks (embedding or head) as stored, while it is read and written;
    - the largest block in float32, and its bytes as stored; twice where passes compare with the float model
      while the block is being rounded;
    - one Hessian (float32 [in, in]) per distinct input of a block, where a pass wants Hessians, of which one is
      at work at a time, and as much again for the comparison with the float model;
    - what rounding the largest tensor takes: its float32 copies (weight, permuted, errors, rounded), and
      with a Hessian three matrices of its size (damped, factor, inverse);
    - the hidden states of all calibration tokens, and the activations of one batch.
    """
    wanted = {t.name: frozenset[str]().union(*(passes.needs(call) for call in t.passes)) for t in planned}
    hungry = {name for name, needs in wanted.items() if "hessian" in needs}
    inside = frozenset[str]().union(*(wanted[t.name] for t in planned if t.layer is not None))
    outside = (t.source_nbytes for t in planned if t.layer is None)
    blocks: dict[int, int] = defaultdict(int)
    for t in planned:
        if t.layer is not None:
            blocks[t.layer] += 4 * t.elements + t.source_nbytes
    copies = _streams(inside)
    batch = max(BATCH_TOKENS, run.sequence_length)
    return {
        "interpreter and libraries": BASELINE_BYTES,
        "embedding or head, as stored": max(outside, default=0),
        "one block (float32, and as stored)": max(blocks.values(), default=0) * copies,
        "Hessians": _hessian_bytes(family, dims, inside),
        "rounding the largest tensor": max((_rounding_bytes(t, t.name in hungry) for t in planned), default=0),
        "hidden states": _streams(inside) * 4 * run.tokens * dims["hidden"],
        "activations of one batch": 4 * batch * (4 * dims["hidden"] + 3 * dims["ffn"]),
    }


def _hessian_bytes(family: Family, dims: Mapping[str, int], wanted: frozenset[str]) -> int:
    """Of the largest of the block's inputs: one is at work at a time.

    With its comparison with the float model, and both once more of the tokens held out and of all together.
    """
    if "hessian" not in wanted:
        return 0
    width = {linear.name: dims[linear.in_] for linear in family.linears}
    sizes = [4 * width[group[0]] ** 2 for group in family.inputs]
    each = (1 + ("cross" in wanted)) * (3 if "held_out" in wanted else 1)
    return each * max(sizes)


def _streams(wanted: frozenset[str]) -> int:
    """Hidden states kept per token: the rounded model's, and the float model's where passes compare."""
    return 2 if "cross" in wanted else 1


def _rounding_bytes(tensor: PlannedTensor, hessian: bool) -> int:
    if tensor.spec is None:
        return 0
    return 4 * (4 * tensor.elements + (3 * tensor.shape[1] ** 2 if hessian else 0))


def disk_bytes(planned: Sequence[PlannedTensor], dims: Mapping[str, int], run: RunShape) -> int:
    """Disk a run takes at most: the artifact, its side files, and the hidden states of two blocks.

    Two, because the states after a block are written before those it started from are removed.
    """
    wanted = frozenset[str]().union(*(passes.needs(call) for t in planned for call in t.passes))
    streams = 2 * _streams(wanted) * 4 * run.tokens * dims["hidden"]
    return sum(t.nbytes for t in planned) + streams + SIDE_FILES_BYTES
