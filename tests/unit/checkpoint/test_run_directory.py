"""The run directory: same bytes however often it is interrupted, refusals that touch nothing."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from compressor.checkpoint import writer
from compressor.checkpoint.integrity import scan_safetensors
from compressor.checkpoint.shard import read_arrays, write_arrays, write_safetensors
from compressor.checkpoint.writer import RunDirectory, check_free_space
from compressor.core.tensors import RawTensor
from compressor.errors import CompressorError

KEY = {"recipe": "r1", "model": "m1", "seed": "0"}
SIDE = {"tokenizer.json": b"{}", "sub/notes.txt": b"notes"}
LAYERS = 3


def raw(array, dtype):
    return RawTensor(dtype, array.shape, array.reshape(-1).view(np.uint8))


def tensors(layer):
    rng = np.random.default_rng(layer)
    return {
        f"l{layer}.codes": raw(rng.integers(0, 99, (4, 6), np.int32), "I32"),
        f"l{layer}.scales": raw(rng.random((4, 2), np.float32), "F32"),
    }


def name(layer):
    return f"model-{layer + 1:05d}-of-{LAYERS:05d}.safetensors"


def work(out, key=KEY, fresh=False, stop=lambda point: None):
    """A run as the pipeline does it; ``stop`` may raise at any point."""
    with RunDirectory.open(out, key, fresh) as run:
        if run.already_done:
            return False
        start = run.last_stream() or 0
        state = run.load_stream(start)["h"] if start else np.zeros(5, np.float32)
        for layer in range(start, LAYERS):
            stop(f"before shard {layer}")
            run.write_shard(name(layer), tensors(layer), {"sum": float(state.sum())})
            stop(f"before stream {layer}")
            state = state + layer + 1
            run.save_stream(layer + 1, {"h": state})
        stop("before finish")
        facts = {name(layer): run.facts(name(layer)) for layer in range(LAYERS)}
        run.finish(config={"a": 1}, side_files=SIDE, manifest={"version": "1"}, report=facts)
    return True


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class Killed(BaseException):
    """As good as kill -9 for the files: nothing is cleaned up on purpose."""


@pytest.fixture
def reference(tmp_path):
    work(tmp_path / "reference")
    return content(tmp_path / "reference")


def test_a_finished_run_holds_exactly_its_files(tmp_path, reference):
    shards = [name(layer) for layer in range(LAYERS)]
    others = {"config.json", "model.safetensors.index.json", "compress_manifest.json", "report.json", *SIDE}
    assert set(reference) == {*shards, *others}
    assert os.listdir(tmp_path) == ["reference"]  # noqa: PTH208
    index = json.loads(reference["model.safetensors.index.json"])
    assert index["weight_map"] == {key: name(layer) for layer in range(LAYERS) for key in tensors(layer)}
    assert index["metadata"]["total_size"] == LAYERS * (4 * 6 * 4 + 4 * 2 * 4)
    sums = {file: hashlib.sha256(data).hexdigest() for file, data in reference.items()}
    del sums["compress_manifest.json"]
    assert json.loads(reference["compress_manifest.json"]) == {"version": "1", "key": KEY, "sha256": sums}
    assert json.loads(reference["config.json"]) == {"a": 1}
    assert [json.loads(reference["report.json"])[s]["sum"] for s in shards] == [0.0, 5.0, 15.0]
    assert {n: reference[n] for n in SIDE} == SIDE
    for layer in range(LAYERS):
        loaded = load_file(tmp_path / "reference" / name(layer))
        for key, tensor in tensors(layer).items():
            assert loaded[key].tobytes() == tensor.data.tobytes()


POINTS = [f"before {what} {layer}" for layer in range(LAYERS) for what in ("shard", "stream")]


@pytest.mark.parametrize("point", [*POINTS, "before finish"])
def test_an_interrupted_run_resumes_to_the_same_bytes(tmp_path, reference, point):
    out = tmp_path / "out"

    def stop(now):
        if now == point:
            raise Killed

    with pytest.raises(Killed):
        work(out, stop=stop)
    assert not out.exists()
    kept = (tmp_path / "out.partial").exists()
    assert kept == (point != "before shard 0")
    done = []
    assert work(out, stop=done.append)
    assert content(out) == reference
    first = int(point.split()[-1]) if point != "before finish" else LAYERS
    assert done[0] == ("before finish" if first == LAYERS else f"before shard {first}")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("count", range(1, 17))
def test_death_between_any_two_writes_resumes_to_the_same_bytes(tmp_path, reference, monkeypatch, count):
    out, left = tmp_path / "out", [count]
    replace = Path.replace

    def dying(self, target):
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", dying)
    with pytest.raises(Killed):
        work(out)
    assert not out.exists()
    monkeypatch.undo()
    work(out)
    assert content(out) == reference


def test_kill_minus_nine_leaves_no_lock_and_no_wreck(tmp_path, reference):
    out = tmp_path / "out"
    code = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_run_directory import *
        def stop(point):
            if point == "before stream 1":
                (Path({str(out)!r} + ".partial") / ".half.tmp").write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGKILL)
        work(Path({str(out)!r}), stop=stop)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "out.partial" / ".half.tmp").exists()
    work(out)
    assert content(out) == reference


def test_the_same_run_again_does_nothing(tmp_path, reference):
    out = tmp_path / "reference"
    stamps = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    assert work(out) is False
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == stamps
    assert not (tmp_path / "reference.partial").exists()


def interrupted(out):
    def stop(point):
        if point == "before shard 1":
            raise Killed

    with pytest.raises(Killed):
        work(out, stop=stop)


def test_another_run_does_not_resume_and_hears_why(tmp_path):
    out, other = tmp_path / "out", {**KEY, "seed": "1", "device": "cuda"}
    interrupted(out)
    before = content(tmp_path)
    with pytest.raises(CompressorError, match="cannot be resumed") as caught:
        work(out, other)
    assert "different: device (none before, cuda now), seed (0 before, 1 now)" in str(caught.value)
    assert "recipe" not in str(caught.value)
    assert "--fresh" in caught.value.hint
    assert content(tmp_path) == before
    work(out, other, fresh=True)
    assert json.loads((out / "compress_manifest.json").read_text())["key"] == other


def test_fresh_starts_over(tmp_path, reference):
    out, done = tmp_path / "out", []
    interrupted(out)
    work(out, fresh=True, stop=done.append)
    assert done[0] == "before shard 0"
    assert content(out) == reference


def test_fresh_replaces_our_own_finished_run_only_at_the_end(tmp_path, reference):
    out, other = tmp_path / "reference", {**KEY, "seed": "7"}
    with pytest.raises(CompressorError, match="already holds another run") as caught:
        work(out, other)
    assert "seed (0 before, 7 now)" in str(caught.value)

    def stop(point):
        assert content(out) == reference

    work(out, other, fresh=True, stop=stop)
    assert json.loads((out / "compress_manifest.json").read_text())["key"] == other
    assert os.listdir(tmp_path) == ["reference"]  # noqa: PTH208


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("suffix", ["", ".partial"])
def test_foreign_directories_are_never_touched(tmp_path, fresh, suffix):
    foreign = tmp_path / f"out{suffix}"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(CompressorError, match="left untouched"):
        work(tmp_path / "out", fresh=fresh)
    assert content(tmp_path) == {f"out{suffix}/thesis.txt": b"mine"}
    assert list(tmp_path.iterdir()) == [foreign]


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(CompressorError, match="left untouched"):
        work(tmp_path / "out", fresh=True)
    with pytest.raises(CompressorError, match="cannot be used as output directory"):
        work(tmp_path / "out" / "below")
    assert (tmp_path / "out").read_text() == "mine"


def test_an_empty_directory_is_fine(tmp_path, reference):
    (tmp_path / "out").mkdir()
    work(tmp_path / "out")
    assert content(tmp_path / "out") == reference


def test_out_that_appears_meanwhile_is_kept_and_so_is_the_result(tmp_path, reference):
    out = tmp_path / "out"

    def stop(point):
        if point == "before finish":
            out.mkdir()
            (out / "thesis.txt").write_text("mine")

    with pytest.raises(CompressorError, match="appeared while the run was working"):
        work(out, stop=stop)
    assert content(out) == {"thesis.txt": b"mine"}
    out.rename(tmp_path / "moved")
    assert work(out) is False  # the finished result only gets its name
    assert content(out) == reference


def test_death_between_the_two_renames_of_a_replacement(tmp_path, monkeypatch):
    out, other = tmp_path / "out", {**KEY, "seed": "7"}
    work(out)
    rename = Path.rename

    def dying(self, target):
        if self.name == "out.partial":
            raise Killed
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", dying)
    with pytest.raises(Killed):
        work(out, other, fresh=True)
    monkeypatch.undo()
    assert not out.exists()
    work(out, other)
    assert json.loads((out / "compress_manifest.json").read_text())["key"] == other
    assert os.listdir(tmp_path) == ["out"]  # noqa: PTH208


def test_two_runs_do_not_work_in_one_place(tmp_path, reference):
    out = tmp_path / "out"
    with RunDirectory.open(out, KEY) as first:
        first.write_shard(name(0), tensors(0), {})
        before = content(tmp_path)
        for fresh in (False, True):
            with pytest.raises(CompressorError, match="another run is working here"):
                work(out, fresh=fresh)
        assert content(tmp_path) == before
    work(out)
    assert content(out) == reference


def test_facts_are_there_whenever_the_shard_is(tmp_path, monkeypatch):
    with RunDirectory.open(tmp_path / "out", KEY) as run:
        seen = []
        original = writer.write_safetensors
        facts_file = tmp_path / "out.partial" / "run-state" / f"{name(0)}.json"
        monkeypatch.setattr(
            writer, "write_safetensors", lambda *a: (seen.append(facts_file.exists()), original(*a))
        )
        with pytest.raises(KeyError):
            run.facts(name(0))
        assert not run.has_shard(name(0))
        run.write_shard(name(0), tensors(0), {"x": {"error": 0.5}})
        assert seen == [True]
        assert run.has_shard(name(0))
        assert run.facts(name(0)) == {"x": {"error": 0.5}}


def test_streams_are_kept_one_at_a_time(tmp_path):
    with RunDirectory.open(tmp_path / "out", KEY) as run:
        assert run.last_stream() is None
        for layer in (1, 2, 11):
            run.save_stream(layer, {"0": np.full((2, 3, 4), layer, np.float32), "1": np.arange(3)})
            assert run.last_stream() == layer
        files = list((tmp_path / "out.partial" / "run-state").glob("stream-*"))
        assert [p.name for p in files] == ["stream-11.safetensors"]
        loaded = run.load_stream(11)
        assert np.array_equal(loaded["0"], np.full((2, 3, 4), 11, np.float32))
        assert loaded["0"].dtype == np.float32
        assert loaded["0"].flags.writeable
        assert np.array_equal(loaded["1"], np.arange(3))


@pytest.mark.parametrize("bad", ["../x", "/x", "config.json", "run.json", "run-state/x", "report.json"])
def test_impossible_side_files_are_refused(tmp_path, bad):
    with (
        pytest.raises(CompressorError, match="must not have this name"),
        RunDirectory.open(tmp_path / "o", KEY) as r,
    ):
        r.finish(config={}, side_files={bad: b""}, manifest={}, report={})


def test_side_files_are_copied_byte_for_byte(tmp_path):
    source = tmp_path / "tokenizer.model"
    source.write_bytes(os.urandom(3 << 20))
    with RunDirectory.open(tmp_path / "out", KEY) as run:
        run.finish(config={}, side_files={"deep/er/t.model": source}, manifest={}, report={})
    assert (tmp_path / "out" / "deep/er/t.model").read_bytes() == source.read_bytes()


def test_bytes_equal_the_safetensors_librarys(tmp_path):
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.arange(5, dtype=np.int8),
        "zé\"\n/": np.zeros((0, 3), np.float16), "scalar": np.array(7, np.int64),
        "u": np.arange(3, dtype=np.uint8), "h": np.ones((2, 2), np.float16), "i": np.arange(4, dtype=np.int32),
        "flag": np.array([True, False]),
    }  # fmt: skip
    names = {"float32": "F32", "int8": "I8", "float16": "F16", "int64": "I64", "uint8": "U8", "int32": "I32"}
    names["bool"] = "BOOL"
    write_safetensors(tmp_path / "x", {n: raw(a.copy(), names[a.dtype.name]) for n, a in arrays.items()})
    assert (tmp_path / "x").read_bytes() == save(arrays, {"format": "pt"})
    assert set(scan_safetensors(tmp_path / "x")) == set(arrays)


def test_arrays_come_back(tmp_path):
    arrays = {"x": np.random.default_rng(0).random((2, 3), np.float32), "s": np.array(3.5), "e": np.zeros((0, 2))}
    write_arrays(tmp_path / "x", arrays)
    loaded = read_arrays(tmp_path / "x")
    for key, array in arrays.items():
        assert np.array_equal(loaded[key], array)
        assert loaded[key].dtype == array.dtype
        assert loaded[key].shape == array.shape


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_keeps_finished_blocks(tmp_path, reference, monkeypatch, code):
    out = tmp_path / "out"

    def failing(handle):
        raise OSError(code, os.strerror(code))

    def stop(point):
        if point == "before shard 1":
            write = writer.write_safetensors

            def full(path, tensors):
                monkeypatch.setattr(os, "fsync", failing)
                write(path, tensors)

            monkeypatch.setattr(writer, "write_safetensors", full)

    with pytest.raises(CompressorError, match="the disk is full") as caught:
        work(out, stop=stop)
    monkeypatch.undo()
    message = str(caught.value)
    size = (tmp_path / "reference" / name(1)).stat().st_size
    assert f"expected: {size:,} bytes" in message
    assert "bytes free" in message
    assert "finished blocks are kept" in message
    partial = tmp_path / "out.partial"
    assert (partial / name(0)).exists()
    assert not (partial / name(1)).exists()
    assert not list(partial.rglob(".*.tmp"))
    work(out)
    assert content(out) == reference


def test_a_real_file_size_limit(tmp_path):
    code = f"""
        import resource, sys
        import numpy as np
        from pathlib import Path
        from compressor.checkpoint.writer import RunDirectory
        from compressor.core.tensors import RawTensor
        from compressor.errors import CompressorError
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        big = RawTensor("U8", (200_000,), np.zeros(200_000, np.uint8))
        small = RawTensor("U8", (10,), np.zeros(10, np.uint8))
        try:
            with RunDirectory.open(Path({str(tmp_path / "out")!r}), {{"a": "b"}}) as run:
                run.write_shard("a.safetensors", {{"w": small}}, {{}})
                run.write_shard("b.safetensors", {{"w": big}}, {{}})
        except CompressorError as error:
            print(error)
            sys.exit(error.exit_code)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "b.safetensors: cannot be written, the disk is full" in done.stdout
    assert "File too large" in done.stdout
    assert "expected: 200,1" in done.stdout
    names = {p.name for p in (tmp_path / "out.partial").rglob("*") if p.is_file()}
    assert names == {"run.json", "a.safetensors", "a.safetensors.json", "b.safetensors.json"}


def test_free_space_is_checked_before_work(tmp_path, monkeypatch):
    out = tmp_path / "a" / "b" / "out"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2000, 1000, 1000))
    check_free_space(out, 1000)
    with pytest.raises(CompressorError, match="not enough free space") as caught:
        check_free_space(out, 1001)
    assert (caught.value.got, caught.value.expected) == ("1,000 bytes free", "1,001 bytes")
    partial = tmp_path / "a" / "b" / "out.partial"
    partial.mkdir(parents=True)
    (partial / "x").write_bytes(b"\0" * 500)
    check_free_space(out, 1500)
    assert not out.exists()


def test_writing_a_mapped_tensor_copies_nothing(tmp_path):
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc")
    code = f"""
        from pathlib import Path
        from compressor.checkpoint.files import mapped
        from compressor.checkpoint.shard import write_safetensors
        from compressor.core.tensors import RawTensor
        size, folder = 96 << 20, Path({str(tmp_path)!r})
        with (folder / "data").open("wb") as file:
            file.truncate(size)
        def private(key="VmData:"):
            return int(Path("/proc/self/status").read_text().split(key)[1].split()[0]) << 10
        import resource
        tensor = RawTensor("U8", (size,), mapped(folder / "data", 0, size))
        resource.setrlimit(resource.RLIMIT_DATA, (private() + (32 << 20),) * 2)
        write_safetensors(folder / "x", {{"w": tensor}})
        try:
            tensor.data.copy()
        except MemoryError:
            print("the limit works")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "the limit works"
    assert (tmp_path / "x").stat().st_size > 96 << 20
