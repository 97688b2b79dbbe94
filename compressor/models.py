"""Opens whatever a user may name as a model: directory, GGUF, hub id, ``demo``, or our own artifact."""

from __future__ import annotations

from compressor.checkpoint.base import Checkpoint
from compressor.checkpoint.reader import open_checkpoint
from compressor.errors import CompressorError


def open_model(source: str, *, exact: bool = False) -> Checkpoint:
    """A readable model; a compressed-tensors directory reads as its dequantized floats.

    Args:
        source: What the user named.
        exact: Read a .gguf file's own values rather than those rounded to the dtype ``quantize`` would
            start from (``demo`` always stands for the latter).

    Raises:
        CompressorError: nothing there, not a model, damaged, or quantized in a format we do not read.
    """
    checkpoint = open_checkpoint(source)
    if exact and source != "demo" and hasattr(checkpoint, "exact"):
        checkpoint.exact = True
    method = _method(checkpoint, source)
    if method is None:
        return checkpoint
    if method != "compressed-tensors":
        raise CompressorError(
            f"{source}: quantized in a format that is not read yet",
            got=f"quant_method {method!r}",
            expected="compressed-tensors, or unquantized weights",
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
    if (method := _method(checkpoint, source)) is not None:
        raise CompressorError(
            f"{source}: already quantized",
            got=f"config.json has a quantization_config ({method})",
            expected="a float checkpoint: a weight is rounded once",
            hint="quantize the original model; `compress export` converts this one",
        )
    return checkpoint


def _method(checkpoint: Checkpoint, source: str) -> str | None:
    """``quant_method`` of config.json, None for a float model.

    Raises:
        CompressorError: the section is no section.
    """
    section = checkpoint.config.get("quantization_config")
    if section is None:
        return None
    if not isinstance(section, dict):
        raise CompressorError(
            f"{source}: quantization_config in config.json is not an object", got=repr(section)[:60]
        )
    return str(section.get("quant_method"))
