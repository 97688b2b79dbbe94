"""Mistral: Llama's block without biases; a sliding window may limit attention."""

from dataclasses import replace

from compressor.arch import llama

FAMILY = replace(
    llama.FAMILY,
    name="mistral",
    model_types=("mistral",),
    linears=tuple(replace(linear, bias=False) for linear in llama.LINEARS),
)
