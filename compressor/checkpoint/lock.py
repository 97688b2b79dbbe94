"""One process per directory: a lock that dies with its holder, kill -9 included."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from compressor.errors import CompressorError


class FolderLock:
    """An advisory lock (flock) on a directory itself; no lock file is left anywhere."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handle: int | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._handle is not None

    def acquire(self) -> None:
        """Create the directory if needed and lock it.

        Raises:
            CompressorError: another process holds it.
        """
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self.folder, os.O_RDONLY)
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self.release()
                raise CompressorError(
                    f"{self.folder}: another run is working here",
                    hint="wait for it to finish, or choose another --out",
                ) from error
            if self._is_current():
                return
            self.release()

    def _is_current(self) -> bool:
        """Whether the path still leads to what was locked (its last holder may have renamed it)."""
        assert self._handle is not None
        try:
            return os.path.samestat(os.fstat(self._handle), self.folder.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give it up."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
