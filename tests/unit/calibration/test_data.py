"""Text to token windows: sources, packing, determinism, and one clear error per bad input."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from compressor.calibration.data import TokenSet, load_tokenizer, load_tokens
from compressor.checkpoint.base import Checkpoint
from compressor.errors import CompressorError


def byte_tokenizer(bos: bool = False) -> Tokenizer:
    """One token per byte of UTF-8: lengths and contents of windows can be told by looking."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "<s>"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.add_special_tokens(["<s>"])
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return tokenizer


def load(source: object, *, bos: bool = False, **options: Any) -> TokenSet:
    wanted: dict[str, Any] = {"samples": 4, "sequence_length": 16, "seed": 0, **options}
    return load_tokens(str(source), byte_tokenizer(bos), **wanted)


def windows(found: TokenSet) -> list[list[int]]:
    return [row for batch in found.batches for row in batch.tolist()]


def text_of(found: TokenSet) -> str:
    return byte_tokenizer().decode([token for row in windows(found) for token in row])


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_windows_are_the_text_cut_without_padding(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "abcdefghijklmnopqrstuvwxyz")
    found = load(path, samples=3, sequence_length=8)
    assert text_of(found) == "abcdefghijklmnopqrstuvwx"
    assert [len(row) for row in windows(found)] == [8, 8, 8]
    assert found.tokens == 24
    assert found.notes == []


def test_batches_are_int64_of_about_batch_tokens() -> None:
    found = load("prose", samples=7, sequence_length=32, batch_tokens=100)
    assert [tuple(batch.shape) for batch in found.batches] == [(3, 32), (3, 32), (1, 32)]
    assert {batch.dtype for batch in found.batches} == {torch.int64}
    wide = load("prose", samples=2, sequence_length=64, batch_tokens=10)
    assert [tuple(batch.shape) for batch in wide.batches] == [(1, 64), (1, 64)]


def test_every_window_starts_with_bos_and_every_document_ends_with_a_blank_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "one"}\n\n{"text": "two"}\n')
    found = load(path, bos=True, samples=2, sequence_length=6)
    assert text_of(found) in ("<s>one\n\n<s>two\n\n", "<s>two\n\n<s>one\n\n")
    assert [len(row) for row in windows(found)] == [6, 6]
    one_row = load(path, bos=True, samples=1, sequence_length=11)
    assert text_of(one_row) in ("<s>one\n\ntwo\n\n", "<s>two\n\none\n\n")


def test_too_little_text_gives_fewer_windows_and_a_note(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "x" * 38)  # 40 tokens with the closing blank line
    found = load(path, samples=4, sequence_length=16)
    assert [len(row) for row in windows(found)] == [16, 16]
    (note,) = found.notes
    assert "a.txt" in note
    assert "2 windows of 16 tokens, 4 of 16 were asked for" in note


def test_less_than_one_window_gives_one_shorter_window(tmp_path: Path) -> None:
    found = load(write(tmp_path / "a.txt", "hello"), samples=1, sequence_length=512)
    assert text_of(found) == "hello\n\n"
    assert len(windows(found)) == 1
    assert len(found.notes) == 1


def test_same_seed_same_tokens_and_other_seed_other_order() -> None:
    first, again, other = (load("default", seed=seed, sequence_length=64) for seed in (3, 3, 4))
    assert windows(first) == windows(again)
    assert first.sha256 == again.sha256
    assert windows(first) != windows(other)
    assert first.sha256 != other.sha256


def test_sha256_tells_text_tokenizer_and_batching_apart(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "some words " * 20)
    kept = load(path).sha256
    assert load(path, batch_tokens=16).sha256 != kept
    assert load(path, bos=True).sha256 != kept
    write(path, "other words " * 20)
    assert load(path).sha256 != kept


def test_mix_shares_windows_by_weight() -> None:
    found = load("prose:2,code:1", samples=9, sequence_length=64)
    rows = [byte_tokenizer().decode(row) for row in windows(found)]
    assert len(rows) == 9
    assert "".join(rows[:6]) == text_of(load("prose", samples=6, sequence_length=64))
    assert "".join(rows[6:]) == text_of(load("code", samples=3, sequence_length=64))


def test_mix_never_gives_more_windows_than_asked_for() -> None:
    assert len(windows(load("prose:1,code:1,dialogue:1", samples=2))) == 2


def test_mix_keeps_full_windows_only() -> None:
    found = load("prose:1,mathematics:1", samples=2, sequence_length=30_000)
    assert [len(row) for row in windows(found)] == [30_000]  # mathematics holds less than that
    assert "mathematics" in "".join(found.notes)


def test_txt_splits_at_runs_of_blank_lines_and_drops_mark_and_carriage_returns(tmp_path: Path) -> None:
    one, two = "1" * 1000, "    2" * 200
    path = write(tmp_path / "a.txt", f"\ufeff{one}\r\n \t\r\n\r\n{two}\r\n".encode())
    joined = text_of(load(path, samples=2004 + 1, sequence_length=1, seed=0))
    assert set(joined.split("\n\n")) - {"", "\n"} in ({one, two}, {one, f"{two}\n"})
    assert "\r" not in joined


def test_jsonl_takes_text_and_messages(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
    lines = [json.dumps({"messages": turns}), '{"text": "a\u2028b"}', '{"text": "  "}']
    found = load(write(tmp_path / "a.jsonl", "\n".join(lines)), samples=100, sequence_length=1)
    assert sorted(text_of(found).strip().split("\n\n")) == ["User: Hi?\nAssistant: Yes.", "a\u2028b"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", "", ["empty.txt", "holds no text"]),
        ("blank.txt", " \n\n\t\n", ["blank.txt", "holds no text"]),
        ("blank.jsonl", '{"text": " "}\n', ["blank.jsonl", "holds no text"]),
        ("latin.txt", b"caf\xe9", ["latin.txt", "UTF-8", "byte 3"]),
        ("bad.jsonl", '{"text": "ok"}\nnope\n{"text": 3}\n', ["bad.jsonl", "2 unusable", "line 2", "line 3"]),
        ("turns.jsonl", '{"messages": [{"role": "user"}]}', ["turns.jsonl", "line 1"]),
        ("list.jsonl", "[1, 2]", ["list.jsonl", "line 1"]),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: str | bytes, words: list[str]) -> None:
    with pytest.raises(CompressorError) as caught:
        load(write(tmp_path / name, content))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("pros", ["pros", "did you mean 'prose'?", "mathematics"]),
        ("missing.txt", ["missing.txt", "no such text", ".jsonl"]),
        ("prose:40,cod:20", ["cod", "did you mean 'code'?"]),
        ("prose:forty", ["prose:forty", "NAME:WEIGHT"]),
        ("prose:0", ["prose:0", "NAME:WEIGHT"]),
        ("held_out", ["held_out", "evaluation only"]),
        ("prose:1,held_out:1", ["held_out", "evaluation only"]),
    ],
)
def test_unknown_sources_list_what_there_is(source: str, words: list[str]) -> None:
    with pytest.raises(CompressorError) as caught:
        load(source)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("option", ["samples", "sequence_length", "batch_tokens"])
def test_sizes_must_be_positive(option: str) -> None:
    with pytest.raises(CompressorError, match=option.replace("_", "-")):
        load("prose", **{option: 0})


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "words")
    assert load(path, bos=True, vocab_size=257).tokens == 8
    with pytest.raises(CompressorError, match="vocabulary") as caught:
        load(path, bos=True, vocab_size=256)
    assert caught.value.got == 256


def checkpoint(files: dict[str, Path | bytes]) -> Checkpoint:
    return cast(Checkpoint, SimpleNamespace(label="some-model", side_files=lambda: files))


def test_tokenizer_comes_from_path_or_bytes_without_truncation_or_padding(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=32)
    path = write(tmp_path / "tokenizer.json", tokenizer.to_str())
    for stored in (path, path.read_bytes()):
        found = load_tokenizer(checkpoint({"tokenizer.json": stored}))
        assert found.encode("abcdefgh").ids == byte_tokenizer().encode("abcdefgh").ids


def test_missing_or_damaged_tokenizer_names_the_model() -> None:
    with pytest.raises(CompressorError, match=r"some-model.*tokenizer\.json"):
        load_tokenizer(checkpoint({"README.md": b""}))
    with pytest.raises(CompressorError, match=r"some-model.*cannot be read"):
        load_tokenizer(checkpoint({"tokenizer.json": b"{}"}))
    with pytest.raises(CompressorError, match=r"some-model.*cannot be read"):
        load_tokenizer(checkpoint({"tokenizer.json": b"\xff"}))
