"""Records and sources: fields, parquet, datasets, boundaries between documents."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_data import byte_tokenizer, load, text_of, windows, write

from compressor.calibration.chat import plain
from compressor.calibration.packing import Marks, pack
from compressor.calibration.records import document
from compressor.calibration.sources import parts_of
from compressor.checkpoint.base import Checkpoint
from compressor.errors import CompressorError

HELLO = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
SHARED = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}]


def whole(source: object) -> list[str]:
    found = text_of(load(source, samples=500, sequence_length=1))
    return sorted(part for part in found.split("\n\n") if part)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"text": "a", "messages": HELLO}, "a"),
        ({"messages": HELLO}, "User: Hi?\nAssistant: Yes."),
        ({"messages": None, "conversations": SHARED}, "User: Hi?\nAssistant: Yes."),
        ({"prompt": "2+2=", "completion": "4"}, "2+2=4"),
        ({"prompt": HELLO[:1], "completion": HELLO[1:]}, "User: Hi?\nAssistant: Yes."),
    ],
)
def test_the_field_is_found(record: dict[str, Any], text: str) -> None:
    assert document(record, plain, None) == text


@pytest.mark.parametrize(
    "record",
    [{}, {"text": 3}, {"text": None}, {"messages": []}, {"messages": [{"role": "user"}]}, {"prompt": "a"}, [], "a",
     {"messages": [{"role": "user", "content": 3}]}, {"text": "\ud800"}, {"conversations": ["hi"]}],
)  # fmt: skip
def test_what_is_no_document_is_refused(record: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        document(record, plain, None)


def test_named_field_holds_text_or_messages(tmp_path: Path) -> None:
    lines = [{"text": "no", "body": "yes"}, {"text": "no", "body": HELLO}]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)))
    assert whole(f"{path}#body") == ["User: Hi?\nAssistant: Yes.", "yes"]
    with pytest.raises(CompressorError, match="2 unusable") as caught:
        whole(f"{path}#bdy")
    assert "'bdy'" in str(caught.value)


def test_text_file_has_no_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "words")
    with pytest.raises(CompressorError, match="no fields"):
        load(f"{path}#body")


def test_file_in_a_mix_with_its_field(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"body": "x" * 300}))
    found = load(f"{path}#body:3,prose:1", samples=4, sequence_length=32)
    assert len(windows(found)) == 4
    assert text_of(found)[:96] == "x" * 96
    assert "x" * 10 not in text_of(found)[96:]


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2], "text": ["one", "two"], "chat": [HELLO, HELLO]}), path)
    assert whole(path) == ["one", "two"]
    assert whole(f"{path}#chat") == ["User: Hi?\nAssistant: Yes."] * 2
    with pytest.raises(CompressorError, match="2 unusable") as caught:
        whole(f"{path}#nothing")
    assert "row 1" in str(caught.value)
    with pytest.raises(CompressorError, match="cannot be read"):
        load(write(tmp_path / "b.parquet", b"PAR1 no"))


def test_directory_saved_by_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"text": [f"text {i}" for i in range(4)]})
    table.save_to_disk(str(tmp_path / "one"))
    assert whole(tmp_path / "one") == ["text 0", "text 1", "text 2", "text 3"]
    both = datasets.DatasetDict({"test": table.select([0]), "train": table.select([1, 2])})
    both.save_to_disk(str(tmp_path / "two"))
    assert whole(tmp_path / "two") == ["text 1", "text 2"]
    (tmp_path / "three").mkdir()
    with pytest.raises(CompressorError, match="save_to_disk"):
        load(tmp_path / "three")


def test_reading_a_dataset_stops_at_the_budget(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["x" * 100] * 50}).save_to_disk(str(tmp_path / "d"))
    (part,) = parts_of(str(tmp_path / "d"), 1, plain, budget=950, seed=0)
    assert part.documents == ["x" * 100] * 10


class Streamed(list[dict[str, Any]]):
    """What ``load_dataset(streaming=True)`` gives, as far as it is used."""

    def shuffle(self, *, seed: int, buffer_size: int) -> list[dict[str, Any]]:
        assert (seed, buffer_size) == (0, 1000)
        return self[::-1]


def test_hub_dataset_is_streamed_from_its_train_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> dict[str, Streamed]:
        asked.append((args, options))
        return {"test": Streamed(), "train": Streamed([{"text": "first"}, {"text": "second"}])}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    (part,) = parts_of("owner/name@small", 1, plain, budget=1000, seed=0)
    assert part.documents == ["second", "first"]
    assert asked == [(("owner/name", "small"), {"streaming": True})]
    parts_of("owner/name", 1, plain, budget=1000, seed=0)
    assert asked[1][0] == ("owner/name", None)


def test_hub_that_cannot_be_reached_and_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*args: Any, **options: Any) -> Any:
        raise ConnectionError("no\nroute")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(CompressorError, match="hub dataset cannot be loaded") as caught:
        load("owner/name")
    assert caught.value.got == "ConnectionError: no route"
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CompressorError, match="needs the package 'datasets'") as caught:
        load("owner/name")
    assert "compressor[data]" in str(caught.value)


def test_mistyped_path_is_no_hub_name() -> None:
    with pytest.raises(CompressorError, match="no such text"):
        load("texts/missing.jsonl")


def packed(documents: list[str], marks: Marks, wanted: int = 9, length: int = 8) -> list[list[int]]:
    return pack(documents, byte_tokenizer(), marks, wanted=wanted, length=length, seed=0, label="x")


def ids(text: str) -> list[int]:
    return list(byte_tokenizer().encode(text).ids)


def test_documents_end_with_the_end_token_and_windows_begin_with_bos() -> None:
    assert packed(["abcdefg"], Marks(eos=300)) == [[*ids("abcdefg"), 300]]
    rows = packed(["abcdef"] * 2, Marks(bos=299, eos=300))
    assert rows == [[299, *ids("abcdef"), 300]] * 2
    assert packed(["abcdefghijklmn"], Marks(bos=299)) == [[299, *ids("abcdefg")], [299, *ids("hijklmn")]]


def test_end_token_written_by_a_template_is_not_doubled() -> None:
    end = byte_tokenizer().token_to_id("!")
    assert packed(["abcdef!\n"], Marks(eos=end)) == [ids("abcdef!\n")]
    assert packed(["abcde!fg"], Marks(eos=end), length=9) == [[*ids("abcde!fg"), end]]


def test_bos_written_by_a_template_is_not_doubled() -> None:
    first = byte_tokenizer().token_to_id("<")
    assert packed(["<abcdef"], Marks(bos=first, eos=300)) == [[first, *ids("abcdef"), 300]]


def test_dialogues_use_the_models_template_and_records_its_end_token(tmp_path: Path) -> None:
    settings = {"chat_template": "{% for m in messages %}[{{ m.content }}]!{% endfor %}", "eos_token": "!"}
    files = {"tokenizer_config.json": json.dumps(settings).encode()}
    model = cast(Checkpoint, SimpleNamespace(label="m", side_files=lambda: files))
    path = write(tmp_path / "a.jsonl", json.dumps({"messages": HELLO}))
    found = load(path, samples=1, sequence_length=13, checkpoint=model)
    assert text_of(found) == "[Hi?]![Yes.]!"
    path = write(tmp_path / "b.jsonl", '{"text": "abc"}')
    assert text_of(load(path, samples=1, sequence_length=4, checkpoint=model)) == "abc!"
    path = write(tmp_path / "b.txt", "abc")  # a text is one text: no end inside it
    assert text_of(load(path, samples=1, sequence_length=5, checkpoint=model)) == "abc\n\n"


def test_refused_dialogues_are_noted(tmp_path: Path) -> None:
    files = {"tokenizer_config.json": json.dumps({"chat_template": "{{ raise_exception('no') }}"}).encode()}
    model = cast(Checkpoint, SimpleNamespace(label="m", side_files=lambda: files))
    path = write(tmp_path / "a.jsonl", json.dumps({"messages": HELLO}))
    found = load(path, samples=1, sequence_length=8, checkpoint=model)
    assert any("refused 1 dialogues (no)" in note for note in found.notes)
