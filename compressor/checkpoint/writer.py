"""The run directory: ``OUT.partial`` while a run lives, ``OUT`` when it is finished.

Inside ``OUT.partial``: ``run.json`` (what the run is made of), finished shards, and ``run-state`` with the
facts of each shard and the hidden states between blocks. Every file appears whole or not at all, so a
killed run goes on from its last finished block. The manifest is written last: a directory that holds it
only needs its new name.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.checkpoint.files import file_sha256, parse_json
from compressor.checkpoint.integrity import scan_safetensors
from compressor.checkpoint.lock import FolderLock
from compressor.checkpoint.safetensors import CONFIG, INDEX, MANIFEST, REPORT
from compressor.checkpoint.shard import (
    atomic_write,
    read_arrays,
    sync_folder,
    write_arrays,
    write_safetensors,
)
from compressor.core.tensors import RawTensor
from compressor.errors import CompressorError

RUN, STATE = "run.json", "run-state"
_OURS = (CONFIG, INDEX, MANIFEST, REPORT, RUN)


def check_free_space(out: Path, needed: int) -> None:
    """Refuse before any work when a run cannot fit beside ``out``.

    Args:
        out: The final directory; what its ``.partial`` already holds counts as written.
        needed: Bytes of the whole run.

    Raises:
        CompressorError: naming both numbers.
    """
    partial = partial_of(out)
    written = sum(p.stat().st_size for p in partial.rglob("*") if p.is_file()) if partial.is_dir() else 0
    folder = next(parent for parent in (partial, *partial.parents) if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if needed - written > free:
        raise CompressorError(
            f"{out}: not enough free space",
            got=f"{free:,} bytes free",
            expected=f"{needed - written:,} bytes",
            hint="free some space or choose --out on another disk",
        )


def partial_of(out: Path) -> Path:
    """Where a run lives until it is finished."""
    out = Path(os.path.abspath(out))  # noqa: PTH100 - resolve() would follow a link named OUT
    return out.with_name(out.name + ".partial")


def check_side_names(names: Iterable[str]) -> list[CompressorError]:
    """Names of model files that an artifact cannot hold: ours, or outside the directory."""
    problems = []
    for name in names:
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or name in _OURS or parts.parts[0] == STATE:
            problems.append(
                CompressorError(f"{name}: a model file must not have this name", hint="rename or remove it")
            )
    return problems


class RunDirectory:
    """One run's directory, locked while open. Use as a context manager.

    Attributes:
        out: The final directory.
        partial: The working directory.
        already_done: ``out`` holds this very run, finished: nothing to do, nothing is locked.
    """

    def __init__(self, out: Path, key: Mapping[str, str], fresh: bool) -> None:
        self.out = partial_of(out).with_name(Path(os.path.abspath(out)).name)  # noqa: PTH100
        self.partial, self.key, self.fresh = partial_of(out), dict(key), fresh
        self.already_done = False
        self._lock = FolderLock(self.partial)

    @classmethod
    def open(cls, out: Path, key: Mapping[str, str], fresh: bool = False) -> RunDirectory:
        """Start, resume or find finished the run ``key`` describes.

        Args:
            out: Where the result will appear.
            key: What its bytes depend on, by the name a user knows it under.
            fresh: Discard an unfinished run, and replace ``out`` if it is a finished run of ours.

        Raises:
            CompressorError: ``out`` or its partial holds something else, or another process works there.
        """
        run = cls(out, key, fresh)
        try:
            run._open()
        except BaseException as error:
            run._abandon()
            if isinstance(error, OSError):
                raise CompressorError(f"{out}: cannot be used as output directory", got=error) from error
            raise
        return run

    def _open(self) -> None:
        self._check_out()
        if self.already_done:
            return
        _check_partial(self.partial)
        self._lock.acquire()
        for leftover in self.partial.rglob(".*.tmp"):
            leftover.unlink()
        if _json(self.partial / MANIFEST) is not None:
            self._resume_finished()
        elif (run := _json(self.partial / RUN)) is not None:
            self._resume(run)
        if not self.already_done:
            self._write_json(self.partial / RUN, {"key": self.key})
            (self.partial / STATE).mkdir(exist_ok=True)

    def _abandon(self) -> None:
        """Unlock after a failed start; an empty directory goes again."""
        if self._lock.held and _is_empty_folder(self.partial):
            self.partial.rmdir()
        self._lock.release()

    def _check_out(self) -> None:
        """Whatever stands at ``out`` is this run, or ours to replace, or empty; else refuse."""
        if not os.path.lexists(self.out) or _is_empty_folder(self.out):
            return
        manifest = _json(self.out / MANIFEST)
        if manifest is None or "key" not in manifest:
            raise CompressorError(
                f"{self.out}: exists and is not a finished run of this tool; it is left untouched",
                hint="choose another --out, or remove it yourself",
            )
        if self.fresh:
            return
        if manifest["key"] != self.key:
            raise CompressorError(
                f"{self.out}: already holds another run",
                got=f"different: {_differences(manifest['key'], self.key)}",
                expected="a new directory, or the same run",
                hint="choose another --out, or --fresh to replace it when the new run is finished",
            )
        self.already_done = True

    def _resume(self, run: dict[str, Any]) -> None:
        """Go on with an unfinished run, or discard it when asked to."""
        if self.fresh:
            self._clear()
        elif run.get("key") != self.key:
            raise CompressorError(
                f"{self.partial}: holds an unfinished run that cannot be resumed by this one",
                got=f"different: {_differences(run.get('key'), self.key)}",
                expected="the same ingredients",
                hint="repeat the earlier command to finish it, or --fresh to discard it",
            )

    def _resume_finished(self) -> None:
        """A run that was finished but killed before it got its name."""
        manifest = _json(self.partial / MANIFEST) or {}
        if not self.fresh and manifest.get("key") == self.key:
            self._publish()
        else:
            self._resume(manifest)

    def _clear(self) -> None:
        """Empty the partial directory; what proves it ours goes last."""
        for path in sorted(self.partial.iterdir(), key=lambda p: p.name in (RUN, MANIFEST)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unlock; a run that failed before its first shard leaves nothing behind."""
        if kind is not None and self._lock.held and not any(self.partial.glob("*.safetensors")):
            shutil.rmtree(self.partial, ignore_errors=True)
        self._lock.release()

    def write_shard(self, file_name: str, tensors: Mapping[str, RawTensor], facts: Mapping[str, Any]) -> None:
        """Write a finished block's tensors, atomically; its facts are safe before the shard appears.

        Raises:
            CompressorError: the disk is full; earlier shards are kept.
        """
        self._write_json(self._facts_path(file_name), facts)
        write_safetensors(self.partial / file_name, tensors)

    def has_shard(self, file_name: str) -> bool:
        """Whether the shard is finished."""
        return (self.partial / file_name).is_file()

    def facts(self, file_name: str) -> dict[str, Any]:
        """The facts written with a shard.

        Raises:
            KeyError: no such shard.
        """
        found = _json(self._facts_path(file_name))
        if found is None or not self.has_shard(file_name):
            raise KeyError(file_name)
        return found

    def _facts_path(self, file_name: str) -> Path:
        return self.partial / STATE / f"{file_name}.json"

    def save_stream(self, layer: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep the hidden states that enter block ``layer``; older ones are then dropped.

        Raises:
            CompressorError: the disk is full.
        """
        write_arrays(self._stream_path(layer), arrays)
        for other in self._streams():
            if other < layer:
                self._stream_path(other).unlink()

    def load_stream(self, layer: int) -> dict[str, NDArray[np.generic]]:
        """What ``save_stream`` kept, as fresh arrays."""
        return read_arrays(self._stream_path(layer))

    def last_stream(self) -> int | None:
        """The last block whose input is kept: every block before it is written."""
        return max(self._streams(), default=None)

    def _stream_path(self, layer: int) -> Path:
        return self.partial / STATE / f"stream-{layer}.safetensors"

    def _streams(self) -> list[int]:
        names = [path.stem for path in (self.partial / STATE).glob("stream-*.safetensors")]
        return [int(name.removeprefix("stream-")) for name in names]

    def finish(
        self,
        *,
        config: Mapping[str, Any],
        side_files: Mapping[str, Path | bytes],
        manifest: Mapping[str, Any],
        report: Mapping[str, Any],
    ) -> None:
        """Write everything beside the shards, drop the run's state, and give the directory its name.

        Args:
            config: config.json.
            side_files: Other files by relative name: copied, or written where bytes are given.
            manifest: What ``compress_manifest.json`` says besides the run's key and every file's sha256.
            report: report.json.

        Raises:
            CompressorError: the disk is full, or a side file has an impossible name.
        """
        for name, source in sorted(side_files.items()):
            self._write_side_file(name, source)
        self._write_json(self.partial / CONFIG, config)
        self._write_json(self.partial / REPORT, report)
        self._write_json(self.partial / INDEX, self._index())
        sums = {"sha256": self._checksums()}
        self._write_json(self.partial / MANIFEST, {**manifest, "key": self.key, **sums})
        self._publish()

    def _checksums(self) -> dict[str, str]:
        """sha256 of every file of the artifact, by relative name."""
        files = (p for p in sorted(self.partial.rglob("*")) if p.is_file() and not p.is_symlink())
        relative = {path.relative_to(self.partial).as_posix(): path for path in files}
        kept = {name: path for name, path in relative.items() if not name.startswith((RUN, f"{STATE}/"))}
        return {name: file_sha256(path) for name, path in kept.items() if name != MANIFEST}

    def _index(self) -> dict[str, Any]:
        """model.safetensors.index.json, from the shards' own headers."""
        weight_map: dict[str, str] = {}
        total = 0
        for shard in sorted(self.partial.glob("*.safetensors")):
            tensors = scan_safetensors(shard)
            weight_map.update(dict.fromkeys(tensors, shard.name))
            total += sum(tensor.nbytes for tensor in tensors.values())
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}

    def _write_side_file(self, name: str, source: Path | bytes) -> None:
        for problem in check_side_names([name]):
            raise problem
        target = self.partial / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, bytes):
            with atomic_write(target, len(source)) as file:
                file.write(source)
            return
        with source.open("rb") as original, atomic_write(target, source.stat().st_size) as file:
            shutil.copyfileobj(original, file, 1 << 20)

    def _write_json(self, path: Path, value: Mapping[str, Any]) -> None:
        text = json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
        with atomic_write(path, len(text)) as file:
            file.write(text)

    def _publish(self) -> None:
        """From a complete partial directory (its manifest is written) to ``out``."""
        shutil.rmtree(self.partial / STATE, ignore_errors=True)
        (self.partial / RUN).unlink(missing_ok=True)
        replaced = self.out.with_name(f".{self.out.name}.replaced")
        try:
            if self.fresh and _json(self.out / MANIFEST) is not None:
                _remove_run(replaced)
                self.out.rename(replaced)
            self.partial.rename(self.out)
        except OSError as error:
            raise CompressorError(
                f"{self.out}: appeared while the run was working; the finished result is in {self.partial}",
                got=error,
                hint=f"move {self.out} away and run the same command again",
            ) from error
        sync_folder(self.out.parent)
        _remove_run(replaced)
        self.already_done = True
        self._lock.release()


def _check_partial(partial: Path) -> None:
    """A directory of that name that is not ours is never touched."""
    if not os.path.lexists(partial):
        return
    names = {path.name for path in partial.iterdir()}
    if names - {f".{RUN}.tmp"} and not names & {RUN, MANIFEST}:
        raise CompressorError(
            f"{partial}: exists and is not an unfinished run of this tool; it is left untouched",
            hint="choose another --out, or remove it yourself",
        )


def _remove_run(folder: Path) -> None:
    """Delete a finished run of ours; anything else stays."""
    if _json(folder / MANIFEST) is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _json(path: Path) -> dict[str, Any] | None:
    """A JSON file's object, None when there is no such file."""
    return parse_json(path.read_bytes(), path, path.name) if path.is_file() else None


def _differences(before: object, after: Mapping[str, str]) -> str:
    """Names of the ingredients that changed, with short values before and after."""
    old = before if isinstance(before, dict) else {}
    changed = [name for name in sorted({*old, *after}) if old.get(name) != after.get(name)]
    shown = [f"{name} ({_short(old.get(name))} before, {_short(after.get(name))} now)" for name in changed]
    return ", ".join(shown) or "nothing recorded"


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 16 else text[:8] + "..."
