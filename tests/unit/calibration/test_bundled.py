"""The bundled texts: what they are, that they are clean, different from each other, and enough."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from compressor.calibration import data
from compressor.calibration.chat import plain, renderer_of
from compressor.calibration.data import bundled_names, bundled_text, load_tokenizer, load_tokens
from compressor.calibration.sources import bundled_documents
from compressor.checkpoint.base import Checkpoint
from compressor.errors import CompressorError

CALIBRATION = {"prose", "code", "dialogue", "mathematics", "languages"}
FOLDER = Path(data.__file__).parents[2] / "calibration_data"


def texts() -> list[Path]:
    return [path for path in FOLDER.iterdir() if path.suffix in (".txt", ".jsonl")]


def documents() -> dict[str, str]:
    """Every bundled document, calibration and evaluation, by set and number."""
    return {
        f"{name} {number}": document
        for name in [*sorted(CALIBRATION), "held_out"]
        for number, document in enumerate(bundled_documents(name, plain), start=1)
    }


def shingles(text: str, size: int) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}


def test_the_sets_are_these() -> None:
    assert set(bundled_names()) == CALIBRATION
    assert {path.stem for path in texts()} == CALIBRATION | {"held_out"}


def test_bundled_text_names_the_sets_for_an_unknown_one() -> None:
    with pytest.raises(CompressorError) as caught:
        bundled_text("novels")
    assert "held_out" in str(caught.value)


def test_readme_lists_every_text_with_its_licence_size_and_checksum() -> None:
    row = re.compile(r"\| `([\w.]+)` \|.*\| written for this project \| CC0-1\.0 \| (\d+) \| `(\w{64})` \|")
    listed = {name: (int(size), sha) for name, size, sha in row.findall((FOLDER / "README.md").read_text())}
    stored = {path.name: path.read_bytes() for path in texts()}
    assert listed == {name: (len(raw), hashlib.sha256(raw).hexdigest()) for name, raw in stored.items()}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_texts_are_clean(path: Path) -> None:
    text = path.read_bytes().decode("utf-8")
    assert text.endswith("\n")
    assert not re.search(r"\r|\n\s*\n\s*\n|\n\n\Z|\A\s", text)


def test_dialogues_alternate_from_user_to_assistant() -> None:
    lines = bundled_text("dialogue").splitlines()
    assert len(lines) > 40
    for line in lines:
        roles = [message["role"] for message in json.loads(line)["messages"]]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2), line[:80]
        assert all(message["content"].strip() == message["content"] for message in json.loads(line)["messages"])
    assert sum('"system"' in line for line in lines) >= 5


def test_no_two_documents_share_a_passage() -> None:
    """Thirteen words in a row, or a fifth of all five-word sequences of a document, would be a copy."""
    found = documents()
    assert len(found) > 250
    owner: dict[tuple[str, ...], str] = {}
    for name, text in found.items():
        for shingle in shingles(text, 13):
            assert owner.setdefault(shingle, name) == name, f"{name} and {owner[shingle]}: {' '.join(shingle)}"
    short = {name: shingles(text, 5) for name, text in found.items()}
    names = sorted(name for name in short if short[name])
    for index, one in enumerate(names):
        for other in names[:index]:
            shared = len(short[one] & short[other]) / min(len(short[one]), len(short[other]))
            assert shared < 0.2, f"{one} and {other} share {shared:.0%}"


def test_no_document_repeats_itself() -> None:
    for name, text in documents().items():
        words = re.findall(r"\w+", text.lower())
        if len(words) > 60:
            assert len(shingles(text, 5)) > 0.75 * (len(words) - 4), name


def test_default_draws_on_every_set_and_never_on_held_out(tmp_path: Path) -> None:
    from test_data import load, text_of

    whole = text_of(load("default", samples=200_000, sequence_length=1))
    for name in CALIBRATION:
        assert bundled_documents(name, plain)[0] in whole
    for document in bundled_documents("held_out", plain):
        assert document not in whole


def test_default_fills_128_windows_for_the_demo_model(demo: Checkpoint, demo_tokenizer: Tokenizer) -> None:
    found = load_tokens(
        "default", demo_tokenizer, samples=128, sequence_length=512, seed=0, vocab_size=49152, checkpoint=demo
    )
    assert found.tokens == 128 * 512
    assert found.notes == []
    assert len(demo_tokenizer.encode(bundled_text("held_out")).ids) >= 10_500


def test_dialogues_go_through_the_demo_models_template(demo: Checkpoint, demo_tokenizer: Tokenizer) -> None:
    first = bundled_documents("dialogue", renderer_of(demo))[0]
    assert first.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert (
        "<|im_end|>\n<|im_start|>user\nMy sourdough starter smells like nail varnish. Did I kill it?<|im_end|>"
        in first
    )
    ids = demo_tokenizer.encode(first, add_special_tokens=False).ids
    assert ids.count(1) == first.count("<|im_start|>") > 2  # one token each, not letters


@pytest.fixture(scope="module")
def demo(demo_available: Path) -> Checkpoint:
    from compressor.models import open_model

    return open_model("demo")


@pytest.fixture(scope="module")
def demo_tokenizer(demo: Checkpoint) -> Tokenizer:
    return load_tokenizer(demo)
