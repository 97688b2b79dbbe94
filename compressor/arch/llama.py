"""Llama (and SmolLM, Vicuna, TinyLlama...): rotary attention with grouped heads, SwiGLU, RMSNorm."""

from compressor.arch.base import Family, Linear, Norm, Pair

LINEARS = (
    Linear("self_attn.q_proj", "attention", "q", "hidden", "attn_q", "attention_bias", "heads"),
    Linear("self_attn.k_proj", "attention", "kv", "hidden", "attn_k", "attention_bias", "kv_heads"),
    Linear("self_attn.v_proj", "attention", "kv", "hidden", "attn_v", "attention_bias"),
    Linear("self_attn.o_proj", "attention", "hidden", "q", "attn_output", "attention_bias"),
    Linear("mlp.gate_proj", "ffn", "ffn", "hidden", "ffn_gate", "mlp_bias"),
    Linear("mlp.up_proj", "ffn", "ffn", "hidden", "ffn_up", "mlp_bias"),
    Linear("mlp.down_proj", "ffn", "hidden", "ffn", "ffn_down", "mlp_bias"),
)
NORMS = (
    Norm("input_layernorm", "hidden", "attn_norm"),
    Norm("post_attention_layernorm", "hidden", "ffn_norm"),
)
INPUTS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
PAIRS = (
    Pair("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "norm"),
    Pair("self_attn.v_proj", ("self_attn.o_proj",), "linear", heads=True),
    Pair("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), "norm"),
    Pair("mlp.up_proj", ("mlp.down_proj",), "linear"),
)

FAMILY = Family(
    name="llama",
    model_types=("llama",),
    linears=LINEARS,
    norms=NORMS,
    inputs=INPUTS,
    pairs=PAIRS,
    writers=("self_attn.o_proj", "mlp.down_proj"),
    norm_kind="rms",
    residuals=(("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp")),
    gguf_arch="llama",
)
