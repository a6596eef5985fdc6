"""The directory: one folder a fingerprint, and a lock that keeps other daemons out of all of them.

DIRECTORY/lock                        held while a daemon runs; its process id, for people
DIRECTORY/v1-<32 hex digits>/         of BLAKE3(fingerprint)
    fingerprint                       as text
    index.sqlite, index.sqlite-wal    see index.py
    00000001.kv ...                   see segments.py
"""

import fcntl
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from kvstore.tier.disk.files import FILE_MODE, FOLDER_MODE, OsFiles
from kvstore.tier.types import TierError

VERSION = "v1"
LOCK, FINGERPRINT = "lock", "fingerprint"
OURS = re.compile(r"v\d+-[0-9a-f]{32}")
"""Nothing else in the directory is ever removed: it may be somebody's home."""


@contextmanager
def in_words(directory: Path) -> Iterator[None]:
    """What the system or sqlite says is a TierError that names the directory."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise TierError(f"cannot use the disk cache {directory}: {why}") from error
    except sqlite3.Error as error:
        raise TierError(f"cannot use the index of the disk cache {directory}: {error}") from error


class Lock:
    """That nobody else uses the directory, until it is released or the process ends.

    Raises TierError when somebody does, and OSError when there can be no lock.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(directory / LOCK, flags, FILE_MODE)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            owner = f"{os.getpid()}\n".encode()
            os.pwrite(self._descriptor, owner, 0)  # over another's: the disk may be full
            os.truncate(self._descriptor, len(owner))
        except BlockingIOError as error:
            pid = os.pread(self._descriptor, 20, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            message = f"the disk cache {directory} is in use by another daemon (pid {pid})"
            raise TierError(message) from error
        except BaseException:
            os.close(self._descriptor)
            raise

    def release(self) -> None:
        os.close(self._descriptor)


def folder_of(directory: Path, fingerprint: str) -> Path:
    return directory / f"{VERSION}-{blake3(fingerprint.encode()).hexdigest(length=16)}"


def make_folder(directory: Path, fingerprint: str) -> Path:
    """The fingerprint's own, made where it is not there. Raises OSError."""
    folder = folder_of(directory, fingerprint)
    folder.mkdir(FOLDER_MODE, exist_ok=True)
    folder.chmod(FOLDER_MODE)
    if fingerprint_of(folder) == fingerprint:
        os.utime(folder / FINGERPRINT)
    else:
        OsFiles().write(folder / FINGERPRINT, 0, (fingerprint.encode(),))
    return folder


def folders(directory: Path) -> list[Path]:
    """Of all fingerprints and versions, the one that was opened longest ago first."""
    ours = (it for it in directory.iterdir() if OURS.fullmatch(it.name) and it.is_dir())
    return sorted(ours, key=_last_opened)


def fingerprint_of(folder: Path) -> str:
    """Empty where somebody was killed before it was written, or while the folder was removed. It
    need not be what was written.
    """
    try:
        return (folder / FINGERPRINT).read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _last_opened(folder: Path) -> float:
    try:
        return (folder / FINGERPRINT).stat().st_mtime
    except FileNotFoundError:
        return 0.0
