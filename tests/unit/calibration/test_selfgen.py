"""Text the model writes: reproducible, drawn from the model's own distribution, refused when it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.calibration import selfgen
from compressor.calibration.data import load_tokenizer, load_tokens
from compressor.calibration.packing import Marks
from compressor.calibration.selfgen import available_memory, memory_needed, sample_self, whole_model
from compressor.checkpoint.base import Checkpoint
from compressor.errors import CompressorError
from compressor.models import open_model


@pytest.fixture
def model(tiny_llama: Path) -> Checkpoint:
    return open_model(str(tiny_llama))


def sample(model: Checkpoint, count: int = 6, length: int = 24, seed: int = 0, **options: Any) -> list[list[int]]:
    marks = options.pop("marks", Marks(eos=1))
    return sample_self(model, load_tokenizer(model), marks, count=count, length=length, seed=seed, **options)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_whole_model_is_transformers_own(tiny_model, family: str, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny_model(family, tie_word_embeddings=tied)
    judge = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected = judge(ids).logits
        found = whole_model(open_model(str(path)))(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_same_seed_same_text_and_windows_are_full(model: Checkpoint) -> None:
    first, again, other = (sample(model, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert [len(row) for row in first] == [24] * 6
    assert len({tuple(row) for row in first}) == 6


def test_drawing_by_steps_agrees_with_the_whole_text(model: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The greedy choice, made with the cache, is the argmax of one forward over the finished window."""
    monkeypatch.setattr(selfgen, "_draw", lambda logits, age, generator: logits.argmax(-1))
    rows = torch.tensor(sample(model, count=4, length=20))
    with torch.no_grad():
        logits = whole_model(model)(rows).logits
    assert torch.equal(logits[:, 1:-1].argmax(-1), rows[:, 2:])


def test_windows_begin_with_a_boundary_or_a_word(model: Checkpoint) -> None:
    tokenizer = load_tokenizer(model)
    words = {tokenizer.encode(word).ids[0] for word in selfgen.OPENINGS}
    rows = sample(model, count=8)
    assert [row[0] for row in rows[::2]] == [1] * 4
    assert {row[0] for row in rows[1::2]} <= words
    rows = sample(model, count=8, marks=Marks(bos=0, eos=1))
    assert [row[0] for row in rows] == [0] * 8
    assert {row[1] for row in rows[1::2]} <= words
    rows = sample(model, count=4, marks=Marks())
    assert {row[0] for row in rows} <= words


def test_first_tokens_of_a_document_are_drawn_more_freely() -> None:
    """Two tokens, log odds 2: at temperature 1 the second comes in 0.119 of draws, at 0.8 in 0.076."""
    logits = torch.tensor([2.0, 0.0]).repeat(40_000, 1)
    shares = []
    for age in (selfgen.FREE_TOKENS - 1, selfgen.FREE_TOKENS):
        drawn = selfgen._draw(logits, torch.full((40_000,), float(age)), torch.Generator().manual_seed(0))
        shares.append(drawn.float().mean().item())
    assert shares == pytest.approx([0.1192, 0.0759], abs=0.006)


def test_ids_beyond_the_tokenizer_are_never_drawn(tiny_model) -> None:
    model = open_model(str(tiny_model("llama", vocab_size=2048)))
    assert max(max(row) for row in sample(model, count=8, length=40)) < 256


def test_batches_do_not_depend_on_what_follows(model: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfgen, "BATCH", 4)
    told: list[tuple[str, int, int]] = []
    rows = sample(model, count=6, progress=lambda *facts: told.append(facts))
    assert rows[:4] == sample(model, count=4)
    assert told[-1] == ("sampling calibration text", 6 * 24, 6 * 24)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


def test_what_does_not_fit_is_refused_before_work(model: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = memory_needed(model, 6, 24)
    weights = sum(info.nbytes for info in model.tensors.values()) * 2  # bfloat16 to float32
    assert needed == weights + 2 * 4 * 6 * 24 * 32 * 3 + 4 * 4 * 6 * 256
    assert len(sample(model, memory_limit=needed)) == 6
    monkeypatch.setattr(selfgen, "whole_model", lambda *args: pytest.fail("built"))
    with pytest.raises(CompressorError, match="does not fit in memory") as caught:
        sample(model, memory_limit=needed - 1)
    assert "--calibration default" in str(caught.value)


def test_available_memory_respects_the_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1e8 < available_memory() < 1e14
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert selfgen._group_room(tmp_path) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert selfgen._group_room(tmp_path) is None
    assert selfgen._group_room(tmp_path / "none") is None
    monkeypatch.setattr(selfgen, "_group_room", lambda: 600)
    assert available_memory() == 600


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(CompressorError, match="NaN"):
        selfgen._draw(torch.tensor([[float("nan"), 0.0]]), torch.ones(1), torch.Generator())


def test_self_is_a_source_alone_and_in_a_mix(model: Checkpoint) -> None:
    tokenizer = load_tokenizer(model)

    def load(source: str):
        return load_tokens(
            source, tokenizer, samples=4, sequence_length=16, seed=0, vocab_size=256, checkpoint=model
        )

    alone, mixed, prose = load("self"), load("prose:2,self:2"), load("prose")
    assert alone.tokens == mixed.tokens == 64
    rows = [row for batch in mixed.batches for row in batch.tolist()]
    assert rows[:2] == prose.batches[0][:2].tolist()
    assert rows[2:] == sample(model, count=2, length=16)
    with pytest.raises(CompressorError, match="needs the model"):
        load_tokens("self", tokenizer, samples=4, sequence_length=16, seed=0)
