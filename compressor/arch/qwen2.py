"""Qwen2 and Qwen2.5: Llama's block with biases on q, k and v."""

from dataclasses import replace

from compressor.arch import llama

_BIASED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

FAMILY = replace(
    llama.FAMILY,
    name="qwen2",
    model_types=("qwen2",),
    linears=tuple(replace(linear, bias=linear.name in _BIASED, rope_heads=None) for linear in llama.LINEARS),
    gguf_arch=None,
)
