"""llama.cpp as the judge of what we read from a GGUF: the same text gives the same token ids."""

import pytest
from fixtures_gguf import SPM_VOCAB, sentencepiece_keys, write
from llamacpp import LlamaCpp, require
from tokenizers import Tokenizer

from compressor.checkpoint.reader import open_checkpoint

TEXTS = [
    "The cat and the hat",
    "naïve 猫 🐈\n  in\tthe end",
    "in  12 and 3456\n\n789",
    "a  b   c it's \n\n x",
    "",
]
SPM_TEXTS = ["the cat", "tins  eating the cats", "b é 猫", "  the", "the\n cat", ""]


def check(path, texts):
    tokenizer = Tokenizer.from_str(open_checkpoint(path).side_files()["tokenizer.json"].decode())
    with LlamaCpp(path) as judge:
        for text in texts:
            assert tokenizer.encode(text).ids == judge.tokenize(text), text


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "smaug-bpe"])
def test_byte_level_ids(tmp_path, tiny_llama, pre):
    require()
    extra = [("tokenizer.ggml.pre", pre, 8), ("llama.rope.dimension_count", 16, 4)]
    check(write(tmp_path / "m.gguf", tiny_llama, extra=extra), TEXTS)


@pytest.mark.parametrize("space_prefix", [True, False])
def test_sentencepiece_ids(tmp_path, tiny_model, space_prefix):
    require()
    extra = [*sentencepiece_keys(), ("tokenizer.ggml.add_space_prefix", space_prefix, 7)]
    drop = ["tokenizer.ggml.merges", "tokenizer.ggml.pre"]
    check(
        write(tmp_path / "m.gguf", tiny_model("llama", vocab_size=SPM_VOCAB), extra=extra, drop=drop),
        SPM_TEXTS,
    )


def test_demo_ids(demo_available):
    require()
    check(demo_available, TEXTS)
