"""Locks of the file system, which end with the process that holds them, however it ends."""

import fcntl
import os
from pathlib import Path
from types import TracebackType

from kvstore.tier.disk.files import FILE_MODE, NO_WAITING

SHARED, ALONE = fcntl.LOCK_SH, fcntl.LOCK_EX
MOST_TEXT = 256


class FileLock:
    """A file that may be locked, and says who has it. Made where it is missing; raises OSError."""

    def __init__(self, path: Path) -> None:
        self._descriptor = _open(path)

    def take(self, how: int) -> bool:
        """Lock it, `SHARED` or `ALONE`, in place of how it was locked; False if others have it."""
        try:
            fcntl.flock(self._descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @property
    def owner(self) -> str:
        return os.pread(self._descriptor, MOST_TEXT, 0).decode(errors="replace").strip()

    def sign(self, owner: str) -> None:
        """Over another's name, and then cut: the disk may be full."""
        text = f"{owner}\n".encode()
        os.pwrite(self._descriptor, text, 0)
        os.truncate(self._descriptor, len(text))

    def release(self) -> None:
        """Of no use any more."""
        os.close(self._descriptor)


class WriteLock:
    """Who holds it may change what is in the directory; who enters waits for that. Raises OSError.

    Two of one process exclude each other as those of two processes do.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = _open(path)

    def __enter__(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def release(self) -> None:
        """Of no use any more."""
        os.close(self._descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | NO_WAITING, FILE_MODE)
