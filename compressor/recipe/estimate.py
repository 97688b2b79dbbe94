"""Sizes exact to the byte, and the memory and disk a run will need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compressor.arch.base import Family
from compressor.core.spec import Spec
from compressor.kernels.floats import FLOAT_BYTES

SHAPE_RECORD_BYTES = 16  # weight_shape: int64 [2]
BASELINE_BYTES = 620_000_000  # interpreter, torch, transformers and numba loaded, measured
BATCH_TOKENS = 2048


@dataclass(frozen=True)
class RunShape:
    """How much calibration data flows through the walk."""

    samples: int = 48
    sequence_length: int = 512

    @property
    def tokens(self) -> int:
        """Calibration tokens."""
        return self.samples * self.sequence_length


def words(count: int, bits: int) -> int:
    """32-bit words that hold ``count`` fields of ``bits`` bits."""
    return -(-count * bits // 32)


def artifact_nbytes(spec: Spec, out_features: int, in_features: int) -> int:
    """Bytes of a rounded matrix in the artifact (compressed-tensors pack-quantized).

    weight_packed int32 [out, words(in)], weight_scale, weight_zero_point int32 [words(out), groups]
    for asymmetric formats (int8 [1] for one scale per tensor), weight_shape int64 [2].
    """
    rows, groups = spec.scales_shape(out_features, in_features)
    packed = 4 * out_features * words(in_features, spec.bits)
    scales = FLOAT_BYTES[spec.scale_dtype] * rows * groups
    packed_zeros = 4 * words(rows, spec.bits) * groups
    zeros = 0 if spec.symmetric else 1 if spec.strategy == "tensor" else packed_zeros
    return packed + scales + zeros + SHAPE_RECORD_BYTES


def peak_parts(family: Family, dims: Mapping[str, int], run: RunShape, hessians: bool) -> dict[str, int]:
    """Predicted peak resident bytes of ``quantize``, by part.

    The embedding (or head) while it is written, one block in float32 and its bytes as stored, the Hessians
    of its distinct inputs, GPTQ's working copies of the largest (damped, factor, inverse) and of its weight,
    the hidden states, and the activations of one batch.
    """
    widths = {linear.name: (dims[linear.out], dims[linear.in_]) for linear in family.linears}
    block = sum(rows * columns for rows, columns in widths.values())
    inputs = [widths[group[0]][1] for group in family.inputs]
    largest = max(inputs)
    weight = max(rows * columns for rows, columns in widths.values())
    batch = max(BATCH_TOKENS, run.sequence_length)
    return {
        "interpreter and libraries": BASELINE_BYTES,
        "embedding table, as stored": 2 * dims["vocab"] * dims["hidden"],
        "one block (float32, and as stored)": 6 * block,
        "Hessians of one block": 4 * sum(n * n for n in inputs) if hessians else 0,
        "GPTQ working copies": 4 * (3 * largest * largest + 4 * weight) if hessians else 16 * weight,
        "hidden states": 4 * run.tokens * dims["hidden"],
        "activations of one batch": 4 * batch * (4 * dims["hidden"] + 3 * dims["ffn"]),
    }


def stream_bytes(dims: Mapping[str, int], run: RunShape) -> int:
    """Disk the run's saved hidden states take at most: two blocks' worth while one replaces the other."""
    return 2 * 4 * run.tokens * dims["hidden"]
