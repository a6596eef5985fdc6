"""The files of images: bytes as they came, by their digest, and arrays that vision towers read."""

import fcntl
import os
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from threading import Lock

from server.errors import RETRY_AFTER_SECONDS, busy

_LOCK = "lock"


@dataclass(slots=True)
class _File:
    n_bytes: int
    n_pins: int = 0


class ImageStore:
    """Files in a private folder of this daemon, of at most `max_bytes`: the least recently used are
    evicted, and those in use are pinned. It belongs to one event loop, except for `new_file`.

    The folder is made when it is needed, and locked. Folders of daemons that have died, which hold
    no lock any more, are removed then.
    """

    def __init__(self, parent: Path, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.total_bytes = 0
        self.n_evicted = 0
        self._parent = parent
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._numbers = count()
        self._making = Lock()
        self._folder: Path | None = None
        self._lock_file = -1

    @property
    def folder(self) -> Path:
        """The folder, made at first."""
        with self._making:
            if self._folder is None:
                self._folder = self._made()
            return self._folder

    def new_file(self) -> Path:
        """The name of a file for bytes that are arriving. It counts when it is added."""
        return self.folder / f"new-{next(self._numbers)}"

    def path(self, name: str) -> Path:
        """The path of a file, which may not be there."""
        return self.folder / name

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def add(self, name: str, n_bytes: int) -> None:
        """Count a file, which is there. Raises ApiError (503) where it does not fit next to the
        files in use.
        """
        known = self._files.setdefault(name, _File(0))
        self.total_bytes += n_bytes - known.n_bytes
        known.n_bytes = n_bytes
        known.n_pins += 1
        try:
            self._evict()
        finally:
            known.n_pins -= 1
        if self.total_bytes > self.max_bytes:
            if not known.n_pins:
                self._remove(name)
            message = (
                "The images of running requests take all the room that there is for images "
                f"({self.max_bytes} bytes, image_store_bytes)."
            )
            raise busy(503, message, "images_busy", RETRY_AFTER_SECONDS)

    @contextmanager
    def pinned(self, name: str) -> Iterator[Path]:
        """The path of a file that is there, which stays there for the time of the block."""
        file = self._files[name]
        self._files.move_to_end(name)
        file.n_pins += 1
        try:
            yield self.path(name)
        finally:
            file.n_pins -= 1
            self._evict()

    def close(self) -> None:
        """Remove the folder."""
        with self._making:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                os.close(self._lock_file)
                self._folder = None
        self._files.clear()
        self.total_bytes = 0

    def _evict(self) -> None:
        if self.total_bytes <= self.max_bytes:
            return
        for name in [name for name, file in self._files.items() if not file.n_pins]:
            self._remove(name)
            self.n_evicted += 1
            if self.total_bytes <= self.max_bytes:
                return

    def _remove(self, name: str) -> None:
        self.total_bytes -= self._files.pop(name).n_bytes
        self.path(name).unlink(missing_ok=True)

    def _made(self) -> Path:
        self._parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self._parent.iterdir():
            with suppress(OSError):
                _remove_if_left(left)
        folder = Path(mkdtemp(dir=self._parent))  # with mode 0700
        self._lock_file = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_file, fcntl.LOCK_EX)
        return folder


def _remove_if_left(folder: Path) -> None:
    """Remove a daemon's folder unless the daemon lives. One without a lock file is being made, or
    its daemon died then.
    """
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
