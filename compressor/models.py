"""Opens whatever a user may name as a model: directory, GGUF, hub id, ``demo``, or our own artifact."""

from __future__ import annotations

from compressor.checkpoint.base import Checkpoint
from compressor.checkpoint.reader import open_checkpoint
from compressor.errors import CompressorError


def open_model(source: str) -> Checkpoint:
    """A readable model; a compressed-tensors directory reads as its dequantized floats.

    Raises:
        CompressorError: nothing there, not a model, damaged, or quantized in a format we do not read.
    """
    checkpoint = open_checkpoint(source)
    quantized = checkpoint.config.get("quantization_config")
    if quantized is None:
        return checkpoint
    method = quantized.get("quant_method")
    if method != "compressed-tensors":
        raise CompressorError(
            f"{source}: quantized in a format that is not read yet",
            got=f"quant_method {method!r}",
            expected="compressed-tensors (pack-quantized), or unquantized weights",
            hint="start from the original checkpoint",
        )
    from compressor.export.compressed_tensors import ArtifactCheckpoint

    return ArtifactCheckpoint(checkpoint)


def open_source(source: str) -> Checkpoint:
    """A model to quantize: anything open_model takes, except what already has integer codes.

    Raises:
        CompressorError: as open_model, or the model is already quantized.
    """
    checkpoint = open_checkpoint(source)
    if "quantization_config" in checkpoint.config:
        method = checkpoint.config["quantization_config"].get("quant_method")
        raise CompressorError(
            f"{source}: already quantized",
            got=f"config.json has a quantization_config ({method})",
            expected="a float checkpoint: a weight is rounded once",
            hint="quantize the original model; `compress export` converts this one",
        )
    return checkpoint
