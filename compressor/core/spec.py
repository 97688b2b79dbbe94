"""What an integer number format is: bits, grouping, symmetry, the dtype its scales are stored in."""

from __future__ import annotations

from dataclasses import dataclass

SCALE_DTYPES = ("BF16", "F16", "F32")
CHANNEL = -1
TENSOR = 0


@dataclass(frozen=True)
class Spec:
    """An affine integer format for a matrix [out_features, in_features]: w = (code - zero) * scale.

    Attributes:
        bits: 2 to 8. Codes are signed, -2^(bits-1) .. 2^(bits-1)-1.
        group_size: Columns (along in_features) that share a scale; -1 = one scale per output row
            (channel), 0 = one scale for the tensor.
        symmetric: True = no zero points (zero is code 0).
        scale_dtype: ``BF16``, ``F16`` or ``F32``: the dtype scales are *stored* in. Scales are
            rounded to it before any weight is rounded.
    """

    bits: int
    group_size: int = 128
    symmetric: bool = True
    scale_dtype: str = "BF16"

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits must be 2..8, got {self.bits}")
        if self.group_size < CHANNEL:
            raise ValueError(f"group_size must be -1, 0 or positive, got {self.group_size}")
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"scale_dtype must be one of {SCALE_DTYPES}, got {self.scale_dtype}")

    @property
    def qmin(self) -> int:
        """The smallest code, -2^(bits-1)."""
        return -(1 << (self.bits - 1))

    @property
    def qmax(self) -> int:
        """The largest code, 2^(bits-1) - 1."""
        return (1 << (self.bits - 1)) - 1

    @property
    def strategy(self) -> str:
        """``group``, ``channel`` or ``tensor`` (the names compressed-tensors uses)."""
        return {CHANNEL: "channel", TENSOR: "tensor"}.get(self.group_size, "group")

    def columns_per_scale(self, in_features: int) -> int:
        """How many columns share one scale in a row of in_features columns."""
        return self.group_size if self.group_size > 0 else in_features

    def scales_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Shape of scales (and zeros) for a matrix [out_features, in_features].

        Raises:
            ValueError: group_size does not divide in_features.
        """
        if self.group_size == TENSOR:
            return (1, 1)
        if in_features % self.columns_per_scale(in_features):
            raise ValueError(f"in_features {in_features} is not a multiple of group_size {self.group_size}")
        return (out_features, in_features // self.columns_per_scale(in_features))

    def label(self) -> str:
        """Short name for tables, e.g. ``int4 g128``, ``int8 channel asym``."""
        where = f"g{self.group_size}" if self.group_size > 0 else self.strategy
        return f"int{self.bits} {where}" + ("" if self.symmetric else " asym")


def dividing_group_sizes(in_features: int) -> list[int]:
    """The usual group sizes that divide in_features, for the way out of an error message."""
    return [g for g in (16, 32, 64, 96, 128, 256, 512) if in_features % g == 0]


def packed_words(count: int, bits: int) -> int:
    """32-bit words that hold ``count`` fields of ``bits`` bits."""
    return -(-count * bits // 32)
