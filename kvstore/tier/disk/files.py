"""The few things the tier asks of an operating system: the seam where tests put faults.

Files are opened for one call and closed again: 10 us beside megabytes, and no descriptor to lose.
"""

import os
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kvstore.tier.types import Buffer

FOLDER_MODE, FILE_MODE = 0o700, 0o600
MOST_BUFFERS = 1024  # IOV_MAX of Linux and macOS
NANOSECONDS = 1_000_000_000
STAT_BLOCK = 512  # st_blocks counts these on any file system
NO_WAITING = os.O_CLOEXEC | os.O_NONBLOCK
"""To open a pipe that somebody has put in a file's place is an error then, and does not hang."""


class Files(Protocol):
    """See OsFiles, whose methods these are. All but `connect` raise OSError."""

    def write(self, path: Path, offset: int, buffers: Sequence[Buffer]) -> None: ...

    def read(self, path: Path, offset: int, n_bytes: int) -> memoryview: ...

    def size(self, path: Path) -> int: ...

    def truncate(self, path: Path, n_bytes: int) -> None: ...

    def stamp(self, path: Path, seconds: float) -> None: ...

    def stamped(self, path: Path) -> float: ...

    def remove(self, path: Path) -> None: ...

    def allocated(self, folder: Path) -> int: ...

    def disk(self, folder: Path) -> tuple[int, int]: ...

    def connect(self, path: Path) -> sqlite3.Connection: ...


class OsFiles:
    """Files as they are."""

    def write(self, path: Path, offset: int, buffers: Sequence[Buffer]) -> None:
        """All of the buffers, one after the other; the file is made where there is none."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | NO_WAITING, FILE_MODE)
        try:
            for start in range(0, len(buffers), MOST_BUFFERS):
                offset = _write_all(descriptor, offset, buffers[start : start + MOST_BUFFERS])
        finally:
            os.close(descriptor)

    def read(self, path: Path, offset: int, n_bytes: int) -> memoryview:
        """Fewer bytes than were asked for when the file ends before."""
        descriptor = os.open(path, os.O_RDONLY | NO_WAITING)
        try:
            view, n_read = memoryview(bytearray(n_bytes)), 0
            while n_read < n_bytes:
                got = os.preadv(descriptor, [view[n_read:]], offset + n_read)
                if not got:
                    break
                n_read += got
            return view[:n_read].toreadonly()
        finally:
            os.close(descriptor)

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def truncate(self, path: Path, n_bytes: int) -> None:
        os.truncate(path, n_bytes)

    def stamp(self, path: Path, seconds: float) -> None:
        """Set when it was last changed. Raises ValueError for what is no time, too."""
        try:
            nanoseconds = int(seconds * NANOSECONDS)
            os.utime(path, ns=(nanoseconds, nanoseconds))
        except OverflowError as error:
            raise ValueError(f"{seconds} is no time") from error

    def stamped(self, path: Path) -> float:
        """When it was last changed, in Unix seconds."""
        return path.stat().st_mtime_ns / NANOSECONDS

    def remove(self, path: Path) -> None:
        """A file, or a folder and all in it. It need not be there."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def allocated(self, folder: Path) -> int:
        """Bytes of disk that the folder and all in it take, as `du` counts them: without what
        stands in folders that we may not look into, as in `lost+found` of a disk of its own.
        """
        total = folder.stat().st_blocks
        with os.scandir(folder) as found:
            for item in found:
                try:
                    if item.is_dir(follow_symlinks=False):
                        total += self.allocated(Path(item.path)) // STAT_BLOCK
                    else:
                        total += item.stat(follow_symlinks=False).st_blocks
                except (FileNotFoundError, PermissionError):  # removed while we looked, or root's
                    continue
        return total * STAT_BLOCK

    def disk(self, folder: Path) -> tuple[int, int]:
        """Bytes that are free for us, and bytes in all, of the file system."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def connect(self, path: Path) -> sqlite3.Connection:
        """To a database whose files nobody else may read: sqlite gives its log the same mode."""
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1)


def _write_all(descriptor: int, offset: int, buffers: Sequence[Buffer]) -> int:
    """Returns the offset behind what was written."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    while views:
        n_written = os.pwritev(descriptor, views, offset)
        offset += n_written
        while views and n_written >= len(views[0]):
            n_written -= len(views.pop(0))
        if views:
            views[0] = views[0][n_written:]
    return offset
