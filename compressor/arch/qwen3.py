"""Qwen3 (dense): Llama's block with a norm on each query and key head."""

from dataclasses import replace

from compressor.arch import llama
from compressor.arch.base import Norm

FAMILY = replace(
    llama.FAMILY,
    name="qwen3",
    model_types=("qwen3",),
    linears=tuple(
        replace(linear, bias=linear.bias if linear.role == "attention" else False, rope_heads=None)
        for linear in llama.LINEARS
    ),
    norms=(
        *llama.NORMS,
        Norm("self_attn.q_norm", "head_dim", "attn_q_norm"),
        Norm("self_attn.k_norm", "head_dim", "attn_k_norm"),
    ),
    gguf_arch=None,
)
