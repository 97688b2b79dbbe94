"""llama.cpp as the judge of our GGUF files: same logits, same token ids, same perplexity."""

import math
from pathlib import Path

import gguf as foreign
import numpy as np
import pytest
from fixtures_codes import changed_copy, coded
from llamacpp import LlamaCpp, require
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from compressor.calibration.data import load_tokenizer
from compressor.checkpoint.reader import open_checkpoint
from compressor.core.report import Report, no_progress
from compressor.core.spec import Spec
from compressor.eval.score import evaluate
from compressor.eval.windows import encode_text, make_windows
from compressor.export import gguf, gguf_tokenizer

TEXTS = [
    "The capital of France is",
    "It's 12345 and 007, isn't it? I'LL see.",
    "naïve 猫 🐈 Ünïcödé ２４ \u00bd x\u0301",
    "  in\tthe   end \n\n  x\r\n",
    "HelloWorld camelCase/path\n\n// done!",
]
WIKI = Path(__file__).parents[3] / "shared" / "data" / "wiki.test.raw"


def export(checkpoint, out, float_type=None, pretokenizer=None):
    gguf.export(
        checkpoint,
        out,
        pretokenizer=pretokenizer,
        float_type=float_type,
        progress=no_progress,
        report=Report(strict=True),
    )
    return out


def float_model(checkpoint):
    """transformers' model in float32 with the checkpoint's weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**checkpoint.config), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    state = {name: torch.from_numpy(checkpoint.read(name)) for name in checkpoint.tensors}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def logits_of(model, tokens):
    import torch

    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()


ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
VARIANTS = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "wide heads": ("llama", {"head_dim": 32}),
    **{
        f"rope {name}": ("llama", {"rope_parameters": {"rope_theta": 5000.0, **rope}})
        for name, rope in ROPES.items()
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_float_gguf_has_the_logits_of_transformers(tiny_model, tmp_path, variant):
    require()
    family, overrides = VARIANTS[variant]
    directory = tiny_model(family, **overrides)
    if family == "mistral":
        directory = changed_copy(directory, tmp_path / "m", "config.json", sliding_window=None)
    checkpoint = open_checkpoint(str(directory))
    tokens = np.random.default_rng(0).integers(3, 256, 200).tolist()
    model = float_model(checkpoint)
    float32, exact = logits_of(model, tokens), logits_of(model.double(), tokens)
    with LlamaCpp(export(checkpoint, tmp_path / "m.gguf", "F32")) as judge:
        found = judge.logits(tokens)
    assert exact.std() > 0.5
    # Both programs stand 1e-5 from float64 on some processors, llama.cpp 1e-3 on others; a wrong
    # permutation, rope or norm moves logits by their own size.
    difference = np.abs(found - exact)
    said = f"llama.cpp {difference.max():.2e} from float64, torch's float32 {np.abs(float32 - exact).max():.2e}"
    assert np.sqrt((difference**2).mean()) < 1e-3 * exact.std(), said
    assert difference.max() < 1e-2, said


CARRIED = [
    (Spec(4, 32), "Q4_0"),
    (Spec(3, 64), "Q4_0"),
    (Spec(5, 32), "Q5_0"),
    (Spec(8, -1), "Q8_0"),
    (Spec(6, 0), "Q8_0"),
    (Spec(4, 64, symmetric=False), "Q5_0"),
    (Spec(4, 32, symmetric=False, scale_dtype="F16"), "Q5_0"),
    (Spec(2, 32, symmetric=False), "Q4_0"),
]


@pytest.mark.parametrize(("spec", "kind"), CARRIED, ids=lambda x: x.label() if isinstance(x, Spec) else x)
def test_codes_run_in_llama_cpp(tiny_llama, tmp_path, spec, kind):
    require()
    checkpoint = coded(tiny_llama, {"model.layers.*": spec})
    path = export(checkpoint, tmp_path / "m.gguf")
    stored = {tensor.name: tensor for tensor in foreign.GGUFReader(path).tensors}
    tensor = stored["blk.1.ffn_down.weight"]
    assert tensor.tensor_type.name == kind
    theirs = foreign.quants.dequantize(tensor.data, tensor.tensor_type)
    np.testing.assert_array_equal(theirs, checkpoint.read("model.layers.1.mlp.down_proj.weight"))
    tokens = np.random.default_rng(1).integers(3, 256, 64).tolist()
    expected = logits_of(float_model(checkpoint), tokens)
    with LlamaCpp(path) as judge:
        found = judge.logits(tokens)
    assert np.sqrt(((found - expected) ** 2).mean()) < 0.05 * expected.std()


CORPUS = ["it's 123 1234 the  end\n\nIT'S  we'll  New York's café 12/34 //x\n naïve HelloWorld"] * 4


def byte_level(regexes, ignore_merges, folder):
    """Write a tokenizer.json whose merges cross every boundary, so that only the splits keep them apart."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    steps = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in regexes]
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = plain
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=460, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([word for text in CORPUS for word in (text, *text.split("'"))], trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, plain])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize(
    ("regexes", "ignore_merges", "name"),
    [(*structure, name) for structure, name in gguf_tokenizer.STRUCTURES.items()],
    ids=gguf_tokenizer.STRUCTURES.values(),
)
def test_every_known_structure_tokenizes_like_its_name(tiny_model, tmp_path, regexes, ignore_merges, name):
    require()
    directory = changed_copy(tiny_model("llama", vocab_size=512), tmp_path / "m", "tokenizer_config.json")
    tokenizer = byte_level(regexes, ignore_merges, directory)
    path = export(open_checkpoint(str(directory)), tmp_path / "m.gguf")
    field = foreign.GGUFReader(path).fields["tokenizer.ggml.pre"]
    assert field.contents() == name
    with LlamaCpp(path) as judge:
        for text in (*TEXTS, *CORPUS[:1]):
            assert judge.tokenize(text) == tokenizer.encode(text).ids, text


def test_a_wrong_pretokenizer_would_show(tiny_model, tmp_path):
    """The test above can fail: these texts and merges tell names apart."""
    require()
    directory = changed_copy(tiny_model("llama", vocab_size=512), tmp_path / "m", "tokenizer_config.json")
    tokenizer = byte_level((gguf_tokenizer._GPT2,), False, directory)
    path = export(open_checkpoint(str(directory)), tmp_path / "m.gguf", pretokenizer="smollm")
    with LlamaCpp(path) as judge:
        assert judge.tokenize(CORPUS[0]) != tokenizer.encode(CORPUS[0]).ids


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_bpe_tokenizes_the_same(tiny_model, tmp_path, prefix):
    require()
    directory = changed_copy(
        tiny_model("llama", vocab_size=512), tmp_path / "m", "tokenizer_config.json", eos_token="</s>"
    )
    tokenizer = sentencepiece(prefix)
    tokenizer.save(str(directory / "tokenizer.json"))
    path = export(open_checkpoint(str(directory)), tmp_path / "m.gguf")
    with LlamaCpp(path) as judge:
        for text in ("the cat", "  the cats  eating\n tins", "b é 猫 🐈", "the<|x|>cat", ""):
            assert judge.tokenize(text, parse_special=True) == tokenizer.encode(text).ids, text


def sentencepiece(prefix):
    """A Llama 2 style tokenizer: bytes as a fallback, spaces as U+2581, every way to make a token listed."""
    words = ["th", "the", "▁the", "at", "cat", "▁cat", "▁t", "in", "ti", "eat", "▁▁"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *"▁thecainsgb", *words]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [
        (word[:i], word[i:])
        for word in words
        for i in range(1, len(word))
        if word[:i] in vocab and word[i:] in vocab
    ]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if prefix else [replace])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<|x|>"])
    return tokenizer


@pytest.fixture(scope="module")
def demo_f16(demo_available, tmp_path_factory):
    require()
    return export(open_checkpoint(str(demo_available)), tmp_path_factory.mktemp("demo") / "f16.gguf", "F16")


def test_the_demo_model_says_paris(demo_f16):
    with LlamaCpp(demo_f16) as judge:
        assert "Paris" in judge.text(judge.greedy("The capital of France is", 4))


def test_the_demo_model_has_the_token_ids_of_its_tokenizer(demo_f16, demo_available):
    files = open_checkpoint(str(demo_available)).side_files()
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    chat = "<|im_start|>user\nHow many are 2+2? <|im_end|>\n<|im_start|>assistant\n"
    with LlamaCpp(demo_f16) as judge:
        for text in (*TEXTS, chat, " " * 17 + "x", "\n" * 9, "0123456789" * 3):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert judge.tokenize(text, parse_special=True) == ids, text


def window_nll(logits, tokens):
    """llama-perplexity's share of one window: negative log-likelihoods of the second half."""
    first = len(tokens) // 2
    rows = logits[first:-1].astype(np.float64)
    peak = rows.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(rows - peak).sum(axis=1)) + peak[:, 0]
    return log_sum - rows[np.arange(len(rows)), tokens[first + 1 :]]


@pytest.mark.slow
@pytest.mark.skipif(not WIKI.is_file(), reason="the evaluation text is not here")
def test_our_perplexity_equals_llama_cpp_s(demo_available, tmp_path):
    """Eight windows through ``compressor.eval`` and through llama.cpp's logits of our F32 GGUF."""
    require()
    checkpoint = open_checkpoint("demo")
    path = export(checkpoint, tmp_path / "f32.gguf", "F32")
    with LlamaCpp(path) as judge:
        tokens = judge.tokenize(WIKI.read_text(encoding="utf-8")[:40000])
        windows = make_windows(tokens, context=512, chunks=8, protocol="llama.cpp")
        theirs = [window_nll(judge.logits(row.tolist()), row.tolist()) for row in windows.tokens]
    ours = evaluate(checkpoint, None, windows)["perplexity"]
    reference = math.exp(np.concatenate(theirs).mean())
    print(f"\nperplexity over 8 windows: ours {ours:.5f}, llama.cpp {reference:.5f}")
    assert abs(ours / reference - 1) < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(not WIKI.is_file(), reason="the evaluation text is not here")
def test_our_perplexity_equals_the_figure_llama_perplexity_printed(demo_available):
    """SmolLM2 in 16 bits, 40 windows of 512 of WikiText-2 test: llama-perplexity printed 22.4967."""
    checkpoint = open_checkpoint("demo")
    ids, bos = encode_text(load_tokenizer(checkpoint), WIKI.read_bytes().decode("utf-8"))
    windows = make_windows(ids, context=512, chunks=40, protocol="llama.cpp", bos=bos)
    found = evaluate(checkpoint, None, windows)
    print(f"\nperplexity over 40 windows: {found['perplexity']:.4f} +- {found['perplexity_error']:.4f}")
    assert abs(found["perplexity"] / 22.4967 - 1) < 1e-4
