"""What a number format is: integers or FP8, grouping, symmetry, the dtype its scales are stored in."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.kernels.tiles import Tile

SCALE_DTYPES = ("BF16", "F16", "F32")
PACK_QUANTIZED, INT_QUANTIZED, FLOAT_QUANTIZED = "pack-quantized", "int-quantized", "float-quantized"
CHANNEL = -1
TENSOR = 0


KINDS = ("int", "float")
ACTIVATIONS = {"int8": "int", "fp8": "float"}
"""How a linear's input may be quantized as it runs (symmetric, one scale per token): name -> kind."""


@dataclass(frozen=True)
class Spec:
    """A format for a matrix [out_features, in_features]: w = (code - zero) * scale, or value(code) * scale.

    Attributes:
        bits: 2 to 8. Integer codes are signed, -2^(bits-1) .. 2^(bits-1)-1.
        group_size: Columns (along in_features) that share a scale; -1 = one scale per output row
            (channel), 0 = one scale for the tensor, or per block where ``block`` is given.
        symmetric: True = no zero points (zero is code 0).
        scale_dtype: ``BF16``, ``F16`` or ``F32``: the dtype scales are *stored* in. Scales are
            rounded to it before any weight is rounded.
        kind: ``int``, or ``float`` for FP8 E4M3 (8 bits, symmetric; kernels.fp8).
        block: Rows and columns that share a scale (``float`` only; edge blocks may be smaller), or None.
        activations: What engines do to the layer's input, token by token: ``int8`` (integer formats),
            ``fp8`` (float formats), or None. The codes do not depend on it.

    Raises:
        ValueError: the parts do not go together, in words for whoever wrote the recipe.
    """

    bits: int
    group_size: int = 128
    symmetric: bool = True
    scale_dtype: str = "BF16"
    kind: str = "int"
    block: tuple[int, int] | None = None
    activations: str | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits must be 2..8, got {self.bits}")
        if self.group_size < CHANNEL:
            raise ValueError(f"group_size must be -1, 0 or positive, got {self.group_size}")
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"scale_dtype must be one of {SCALE_DTYPES}, got {self.scale_dtype}")
        if self.kind not in KINDS:
            raise ValueError(f"kind must be int or float, got {self.kind}")
        if self.kind == "float":
            self._check_float()
        elif self.block is not None:
            raise ValueError("blocks are for float formats; integers take a group_size")
        if self.activations is not None:
            self._check_activations()

    def _check_float(self) -> None:
        if self.bits != 8 or not self.symmetric:
            raise ValueError("a float format has 8 bits and is symmetric")
        if self.group_size > 0:
            raise ValueError(f"fp8 takes group_size -1 (row) or 0 (tensor), or block, got {self.group_size}")
        if self.block is not None and (self.group_size != TENSOR or min(self.block) < 1):
            raise ValueError(f"block takes two positive sizes and group_size 0, got {self.block}")

    def _check_activations(self) -> None:
        if ACTIVATIONS.get(str(self.activations)) != self.kind:
            raise ValueError(f"activations must be int8 for int and fp8 for float, got {self.activations}")
        if not self.symmetric or self.block is not None:
            raise ValueError("quantized activations go with symmetric formats without blocks")

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
        """``group``, ``channel``, ``tensor`` or ``block`` (the names compressed-tensors uses)."""
        if self.block is not None:
            return "block"
        return {CHANNEL: "channel", TENSOR: "tensor"}.get(self.group_size, "group")

    @property
    def layout(self) -> str:
        """How compressed-tensors stores it: ``pack-quantized``, or a byte per weight: ``int-`` or ``float-``."""
        if self.kind == "float":
            return FLOAT_QUANTIZED
        return INT_QUANTIZED if self.activations else PACK_QUANTIZED

    def columns_per_scale(self, in_features: int) -> int:
        """How many columns share one scale in a row of in_features columns."""
        return self.group_size if self.group_size > 0 else in_features

    def scales_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Shape of scales (and zeros) for a matrix [out_features, in_features].

        Raises:
            ValueError: group_size does not divide in_features.
        """
        if self.block is not None:
            return (-(-out_features // self.block[0]), -(-in_features // self.block[1]))
        if self.group_size == TENSOR:
            return (1, 1)
        if in_features % self.columns_per_scale(in_features):
            raise ValueError(f"in_features {in_features} is not a multiple of group_size {self.group_size}")
        return (out_features, in_features // self.columns_per_scale(in_features))

    def tile(self, out_features: int, in_features: int) -> Tile:
        """Rows and columns that share a scale."""
        if self.block is not None:
            return Tile(*self.block)
        return Tile(out_features if self.group_size == TENSOR else 1, self.columns_per_scale(in_features))

    def label(self) -> str:
        """Short name for tables, e.g. ``int4 g128``, ``int8 channel asym``, ``fp8 128x128``, ``fp8 channel a8``."""
        where = f"g{self.group_size}" if self.group_size > 0 else self.strategy
        if self.block is not None:
            where = f"{self.block[0]}x{self.block[1]}"
        name = "fp8" if self.kind == "float" else f"int{self.bits}"
        return f"{name} {where}" + ("" if self.symmetric else " asym") + (" a8" if self.activations else "")


def dividing_group_sizes(in_features: int) -> list[int]:
    """The usual group sizes that divide in_features, for the way out of an error message."""
    return [g for g in (16, 32, 64, 96, 128, 256, 512) if in_features % g == 0]


def packed_words(count: int, bits: int) -> int:
    """32-bit words that hold ``count`` fields of ``bits`` bits."""
    return -(-count * bits // 32)
