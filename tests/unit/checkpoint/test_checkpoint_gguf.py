"""GGUF as a checkpoint: values, names, config and tokenizer against independent readers."""

import json

import gguf
import numpy as np
import pytest
from fixtures_gguf import KIND, SPM_VOCAB, permute, sentencepiece_keys, write
from tokenizers import Tokenizer

from compressor.arch import find_family
from compressor.checkpoint.gguf import GgufCheckpoint, unpermute
from compressor.checkpoint.gguf_config import llama3_factors
from compressor.checkpoint.reader import check_against_family, open_checkpoint
from compressor.errors import CompressorError
from compressor.kernels.floats import decode_float, round_to_dtype

TEXTS = ["The cat and the hat", "naïve 猫 🐈\n  in\tthe end", "  12 and 3456", "a<s>b</s>", "", " "]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", "F32"), ("F16", "F16"), ("BF16", "BF16"), ("Q8_0", "BF16"), ("Q4_1", "BF16")],
)
def test_values_come_back_in_the_models_own_order(tmp_path, tiny_llama, kind, dtype):
    original = open_checkpoint(tiny_llama)
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", tiny_llama, KIND[kind]))
    assert check_against_family(checkpoint, find_family(checkpoint.config, "m")) == []
    assert list(checkpoint.tensors) == list(find_family(checkpoint.config, "m").tensors(checkpoint.config))
    tolerance = {"Q8_0": 0.003, "Q4_1": 0.05, "F16": 1e-3}.get(kind, 0.0)
    for name, info in checkpoint.tensors.items():
        raw, values = checkpoint.raw(name), checkpoint.read(name)
        assert info.dtype == raw.dtype == dtype
        assert info.shape == raw.shape == values.shape
        assert info.nbytes == raw.nbytes
        assert np.array_equal(decode_float(raw.data, raw.dtype).reshape(raw.shape), values)
        assert np.abs(values - original.read(name)).max() <= tolerance
        assert values.flags.writeable
    stored = checkpoint.tensors["model.layers.1.self_attn.k_proj.weight"].stored_as
    assert stored == (None if kind == dtype else kind)
    assert bool(checkpoint.notes) == kind.startswith("Q")


def test_mixed_floats_are_presented_without_loss(tmp_path, tiny_llama):
    extra_head = [("output.weight", np.ones((256, 64), np.float16))]
    path = write(
        tmp_path / "m.gguf", tiny_llama, KIND.BF16, tensors=extra_head, keep=lambda n: n != "lm_head.weight"
    )
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.tensors["lm_head.weight"].dtype == "F32"
    assert checkpoint.tensors["lm_head.weight"].stored_as == "F16"
    assert np.array_equal(
        checkpoint.read("model.embed_tokens.weight"),
        open_checkpoint(tiny_llama).read("model.embed_tokens.weight"),
    )


def test_unpermute_inverts_the_converters_order():
    weight = np.arange(24 * 5, dtype=np.float32).reshape(24, 5)
    for heads in (1, 2, 3, 6):
        permuted = permute(weight, heads)
        assert np.array_equal(unpermute(permuted, heads), weight)
        assert np.array_equal(unpermute(permuted[:, 0], heads), weight[:, 0])
    assert not np.array_equal(permute(weight, 2), weight)


def test_transformers_loads_the_same_weights(tmp_path, tiny_llama):
    from transformers import AutoModelForCausalLM

    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", tiny_llama, KIND.Q4_1))
    state = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf").state_dict()
    assert set(state) == set(checkpoint.tensors)
    for name, tensor in state.items():
        assert np.array_equal(round_to_dtype(tensor.float().numpy(), "BF16"), checkpoint.read(name))


def test_demo_tensors_equal_the_reference(demo_available):
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    checkpoint = open_checkpoint("demo")
    content = np.memmap(demo_available, np.uint8, "r")
    processor = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    cases = {
        "model.layers.0.self_attn.q_proj.weight": ("blk.0.attn_q.weight", "Q4_1"),
        "model.layers.29.self_attn.k_proj.weight": ("blk.29.attn_k.weight", "Q4_1"),
        "model.layers.7.mlp.down_proj.weight": ("blk.7.ffn_down.weight", "Q4_1"),
        "model.embed_tokens.weight": ("token_embd.weight", "Q8_0"),
    }
    for name, (stored, kind) in cases.items():
        place = checkpoint._header.tensors[stored]
        packed = content[place.start : place.start + place.nbytes].reshape(place.shape[0], -1)
        values = processor.process(gguf.dequantize(packed, KIND[kind]), stored).weights
        assert np.array_equal(checkpoint.read(name), round_to_dtype(values, "BF16"))
    assert checkpoint.notes == [
        "weights dequantized from Q4_1 (210 tensors), Q8_0 (1 tensor) to BF16: "
        "requantizing a quantized model loses quality; prefer the original checkpoint"
    ]


def test_demo_config_equals_what_transformers_imports(demo_available):
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    theirs = load_gguf_checkpoint(str(demo_available), return_tensors=False)["config"]
    config = open_checkpoint("demo").config
    compared = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rope_theta", "max_position_embeddings", "model_type",
        "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings",
    )  # fmt: skip
    assert {key: config[key] for key in compared} == {key: theirs[key] for key in compared}
    assert np.float32(config["rms_norm_eps"]) == np.float32(theirs["rms_norm_eps"])
    assert config["rms_norm_eps"] == 1e-5
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_llama3_factors_equal_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, head_dim=64, rope_parameters=rope)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    factors = llama3_factors(500000.0, 64, 32.0)
    assert len(set(factors)) > 3
    assert np.allclose(plain / frequencies.numpy(), factors, rtol=1e-5)


@pytest.mark.parametrize(
    ("extra", "tensors", "expected"),
    [
        ([], [], {"rope_type": "default"}),
        ([("llama.rope.scaling.type", "none", 8)], [], {"rope_type": "default"}),
        ([("llama.rope.scaling.factor", 4.0, 6)], [], {"rope_type": "linear", "factor": 4.0}),
        ([("llama.rope.scale_linear", 2.0, 6)], [], {"rope_type": "linear", "factor": 2.0}),
        (
            [("llama.rope.scaling.type", "yarn", 8), ("llama.rope.scaling.factor", 4.0, 6),
             ("llama.rope.scaling.original_context_length", 64, 4)],
            [],
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        ([], [("rope_freqs.weight", np.ones(8, np.float32))], {"rope_type": "default"}),
        (
            [("llama.rope.freq_base", 1e6, 6)],
            [("rope_freqs.weight", llama3_factors(1e6, 16, 8.0).astype(np.float32))],
            {"rope_theta": 1e6, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        ),
    ],
)  # fmt: skip
def test_rope_variants(tmp_path, tiny_llama, extra, tensors, expected):
    from transformers import AutoConfig

    checkpoint = GgufCheckpoint(write(tmp_path / "m.gguf", tiny_llama, extra=extra, tensors=tensors))
    assert checkpoint.config["rope_parameters"] == {"rope_theta": 10000.0, **expected}
    loaded = AutoConfig.for_model(**checkpoint.config)
    assert loaded.rope_parameters["rope_type"] == expected["rope_type"]


REFUSED = {
    "other architecture": ({"extra": [("general.architecture", "mamba", 8)]}, "'mamba'"),
    "experts": ({"extra": [("llama.expert_count", 8, 4)]}, "expert_count"),
    "split": ({"extra": [("split.count", 2, 2)]}, "merge the parts"),
    "too many blocks": ({"extra": [("llama.block_count", 2**31 - 1, 4)]}, "block_count"),
    "too few blocks": ({"extra": [("llama.block_count", 1, 4)]}, "block_count"),
    "no heads": ({"drop": ["llama.attention.head_count"]}, "lacks llama.attention.head_count"),
    "zero heads": ({"extra": [("llama.attention.head_count", 0, 4)]}, "llama.attention.head_count"),
    "heads per block": ({"extra": [("llama.attention.head_count", [4], 9)]}, "llama.attention.head_count"),
    "text as size": ({"extra": [("llama.embedding_length", "64", 8)]}, "llama.embedding_length"),
    "nan epsilon": (
        {"extra": [("llama.attention.layer_norm_rms_epsilon", float("nan"), 6)]}, "layer_norm_rms_epsilon",
    ),
    "partial rotary": (
        {"extra": [("llama.rope.dimension_count", 8, 4), ("llama.attention.key_length", 16, 4)]},
        "rope.dimension_count",
    ),
    "value size": ({"extra": [("llama.attention.value_length", 8, 4)]}, "value_length"),
    "odd heads": ({"extra": [("llama.attention.head_count_kv", 3, 4)]}, "rows of blk.0.attn_k.weight"),
    "rope type": ({"extra": [("llama.rope.scaling.type", "longrope", 8)]}, "longrope"),
    "rope detail": ({"extra": [("llama.rope.scaling.attn_factor", 2.0, 6)]}, "attn_factor"),
    "rope factors": (
        {"tensors": [("rope_freqs.weight", np.arange(1, 9, dtype=np.float32))]}, "an unknown way",
    ),
    "rope factors' shape": ({"tensors": [("rope_freqs.weight", np.ones(3, np.float32))]}, "rope_freqs"),
    "unknown tensor": ({"tensors": [("blk.0.attn_q_norm.weight", np.ones(16, np.float32))]}, "attn_q_norm"),
    "duplicate tokens": ({"extra": [("tokenizer.ggml.tokens", ["a"] * 256, 9)]}, "duplicates"),
    "token types": ({"extra": [("tokenizer.ggml.token_type", [1, 1], 9)]}, "token_type"),
    "bos out of range": ({"extra": [("tokenizer.ggml.bos_token_id", 256, 4)]}, "bos token id"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_expressed_is_refused(tmp_path, tiny_llama, case):
    arguments, message = REFUSED[case]
    path = write(tmp_path / "m.gguf", tiny_llama, **arguments)
    with pytest.raises(CompressorError) as caught:
        GgufCheckpoint(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_unreadable_types_are_refused(tmp_path, tiny_llama, monkeypatch):
    path = write(tmp_path / "m.gguf", tiny_llama, KIND.Q8_0)

    def unknown(*args):
        raise NotImplementedError

    monkeypatch.setattr(gguf, "dequantize", unknown)
    with pytest.raises(CompressorError, match="ggml type Q8_0 cannot be read"):
        GgufCheckpoint(path)


def test_missing_tensors_and_bad_scales_are_told(tmp_path, tiny_llama):
    lost = "model.layers.0.mlp.up_proj.weight"
    checkpoint = GgufCheckpoint(write(tmp_path / "m.gguf", tiny_llama, KIND.Q8_0, keep=lambda n: n != lost))
    with pytest.raises(CompressorError, match=f"{lost} is missing"):
        check_against_family(checkpoint, find_family(checkpoint.config, "m"))
    place = checkpoint._header.tensors["blk.1.attn_k.weight"]
    content = bytearray((tmp_path / "m.gguf").read_bytes())
    content[place.start + 68 : place.start + 70] = b"\x00\x7c"  # the scale of row 1's first block: infinity
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CompressorError, match=r"k_proj.weight: \d+ values are NaN or infinite \(first at row 8"):
        GgufCheckpoint(tmp_path / "m.gguf").read("model.layers.1.self_attn.k_proj.weight")


def test_tied_heads_and_biases(tmp_path, tiny_model):
    tied = GgufCheckpoint(write(tmp_path / "t.gguf", tiny_model("llama", tie_word_embeddings=True)))
    assert tied.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in tied.tensors
    biased_model = tiny_model("llama", attention_bias=True, mlp_bias=True)
    biased, original = (
        GgufCheckpoint(write(tmp_path / "b.gguf", biased_model)),
        open_checkpoint(biased_model),
    )
    assert (biased.config["attention_bias"], biased.config["mlp_bias"]) == (True, True)
    assert check_against_family(biased, find_family(biased.config, "b")) == []
    for name in original.tensors:
        assert np.array_equal(biased.read(name), original.read(name))


def test_the_fingerprint_sees_a_changed_block(tmp_path, tiny_llama):
    path = write(tmp_path / "m.gguf", tiny_llama, KIND.Q4_1)
    checkpoint = GgufCheckpoint(path)
    first = checkpoint.fingerprint()
    assert GgufCheckpoint(path).fingerprint() == first
    content = bytearray(path.read_bytes())
    content[checkpoint._header.tensors["blk.0.ffn_up.weight"].start + 7] ^= 1
    path.write_bytes(content)
    assert GgufCheckpoint(path).fingerprint() != first


def files_of(tmp_path, tiny_llama, **arguments):
    checkpoint = GgufCheckpoint(write(tmp_path / "m.gguf", tiny_llama, **arguments))
    files = checkpoint.side_files()
    assert files == GgufCheckpoint(tmp_path / "m.gguf").side_files()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config))
    return checkpoint, files


@pytest.mark.parametrize("add_bos", [False, True])
def test_tokenizer_files_give_the_models_ids(tmp_path, tiny_llama, add_bos):
    from transformers import AutoTokenizer

    extra = [("tokenizer.ggml.add_bos_token", add_bos, 7), ("tokenizer.chat_template", "{{ 'x' }}", 8)]
    checkpoint, files = files_of(tmp_path, tiny_llama, extra=extra)
    original = Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))
    ours, loaded = (
        Tokenizer.from_str(files["tokenizer.json"].decode()),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    for text in TEXTS:
        expected = [0] * add_bos + original.encode(text).ids
        assert ours.encode(text).ids == expected
        assert loaded(text)["input_ids"] == expected
        assert ours.decode(expected[add_bos:], skip_special_tokens=False) == text
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == ("<s>", "</s>", "<pad>")
    assert loaded.chat_template == "{{ 'x' }}"
    assert json.loads(files["tokenizer_config.json"])["add_bos_token"] is add_bos
    assert (checkpoint.add_bos_token, checkpoint.pretokenizer) == (add_bos, "gpt-2")
    expected = {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    assert json.loads(files["generation_config.json"]) == expected


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["in", "Ġ", "Ġ123", "!"]),
        ("smollm", ["in", "ĠĠ", "1", "2", "3", "!"]),
        ("llama-bpe", ["in", "Ġ", "Ġ", "123", "!"]),
        ("something-new", ["in", "Ġ", "Ġ123", "!"]),
    ],
)
def test_text_is_split_as_the_pretokenizer_says(tmp_path, tiny_llama, pre, pieces):
    checkpoint, files = files_of(tmp_path, tiny_llama, extra=[("tokenizer.ggml.pre", pre, 8)])
    splitter = Tokenizer.from_str(files["tokenizer.json"].decode()).pre_tokenizer
    assert [piece for piece, _ in splitter.pre_tokenize_str("in  123!")] == pieces
    assert checkpoint.add_bos_token is (pre == "llama-bpe")
    assert any("something-new" in note for note in checkpoint.notes) is (pre == "something-new")


def test_sentencepiece_vocabularies(tmp_path, tiny_model):
    drop = ["tokenizer.ggml.merges", "tokenizer.ggml.pre"]
    checkpoint, files = files_of(
        tmp_path, tiny_model("llama", vocab_size=SPM_VOCAB), extra=sentencepiece_keys(), drop=drop
    )
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert tokenizer.encode("the cat").tokens == ["<s>", "▁the", "▁cat"]
    assert tokenizer.encode("tins  eating").tokens == ["<s>", "▁t", "in", "s", "▁▁", "e", "at", "ing"]
    assert tokenizer.encode("bé").tokens == ["<s>", "▁", "b", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("the bét").ids) == "the bét"
    assert checkpoint.add_bos_token is True


def test_a_vocabulary_of_another_kind_is_told(tmp_path, tiny_llama):
    checkpoint, files = files_of(tmp_path, tiny_llama, extra=[("tokenizer.ggml.model", "t5", 8)])
    assert set(files) == {"generation_config.json"}
    assert any("'t5'" in note for note in checkpoint.notes)


def test_demo_tokenizer_splits_digits_as_trained(demo_available):
    files = open_checkpoint("demo").side_files()
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert tokenizer.encode("The capital of France is").ids == [504, 3575, 282, 4649, 314]
    assert tokenizer.encode("x  42").tokens == ["x", "ĠĠ", "4", "2"]
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1
