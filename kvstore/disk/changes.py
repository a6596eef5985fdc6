"""The files that were lately made and removed in the folders of all models, for the processes that
share a directory.

Each line of DIRECTORY/changes is about one extent:

    <folder> <extent> <its bytes of disk; - where it was removed> <mtime before> <mtime after>

The mtimes are the folder's, in nanoseconds. A process that knows the folder as of the mtime before
knows it as of the mtime after without listing it. A line that is missing or damaged costs a listing
and nothing else, and so does a change by anybody else, which the folder's mtime shows.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvstore.disk.extent import OsFiles
from kvstore.disk.folder import EXTENTS, FOLDERS

CHANGES = "changes"
MOST_BYTES = 128 << 10
"""A longer file is begun anew: a thousand changes."""

_LINE = re.compile(
    rf"(?P<folder>{FOLDERS.pattern}) (?P<name>{EXTENTS.pattern}) (\d{{1,18}}|-) (\d+) (\d+)"
)


class FileChange(NamedTuple):
    """`n_bytes`: of disk; None: the file was removed. The folder's mtimes, in nanoseconds."""

    folder: str
    name: str
    n_bytes: int | None
    before_ns: int
    after_ns: int


class ChangeLog:
    """The file, for the holder of the write lock. Does not raise."""

    def __init__(self, files: OsFiles, directory: Path) -> None:
        self._files = files
        self._path = directory / CHANGES
        self._read_bytes: int | None = None  # None: nothing has been read yet

    def read(self) -> Iterator[FileChange]:
        """What other processes have changed since the last call; nothing at the first."""
        try:
            size = self._files.status(self._path).size
            start = size if self._read_bytes is None else self._read_bytes
            self._read_bytes = size
            if not 0 < size - start <= MOST_BYTES:
                return
            found = bytes(self._files.read(self._path, start, size - start))
        except OSError:
            self._read_bytes = 0
            return
        for line in found.decode(errors="replace").splitlines():
            if (change := _LINE.fullmatch(line)) is not None:
                *_, n_bytes, before_ns, after_ns = change.groups()
                yield FileChange(
                    change["folder"],
                    change["name"],
                    None if n_bytes == "-" else int(n_bytes),
                    int(before_ns),
                    int(after_ns),
                )

    def append(self, change: FileChange) -> None:
        """Note a change by this process, which has read all others."""
        folder, name, n_bytes, *times = change
        line = " ".join(map(str, (folder, name, "-" if n_bytes is None else n_bytes, *times)))
        encoded = f"{line}\n".encode()
        with suppress(OSError):
            before = self._read_bytes or 0
            if before + len(encoded) > MOST_BYTES:
                self._files.write(self._path, (encoded,))
                before = 0
            else:
                self._files.append(self._path, encoded)
            self._read_bytes = before + len(encoded)
