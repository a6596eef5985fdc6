"""The directory: one folder a model, which processes of one daemon share, and no other daemon.

DIRECTORY/lock                        shared by the processes of a daemon; its name
DIRECTORY/write.lock                  held while one of them changes anything
DIRECTORY/written                     see daily_budget.py
DIRECTORY/v1-<32 hex digits>/         of BLAKE3(fingerprint); with -2 behind it a second process's
    lock                              held while a process has the folder open
    fingerprint                       as text
    index.sqlite, index.sqlite-wal    see index.py
    00000001.kv ...                   see segments.py
"""

import itertools
import os
import re
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

from blake3 import blake3

from kvstore.tier.disk.files import FOLDER_MODE, OsFiles
from kvstore.tier.disk.locks import ALONE, SHARED, FileLock, WriteLock
from kvstore.tier.types import TierError

VERSION = "v1"
LOCK, WRITE_LOCK, FINGERPRINT = "lock", "write.lock", "fingerprint"
OURS = re.compile(r"v\d+-[0-9a-f]{32}(-\d+)?")
"""Nothing else in the directory is ever removed: it may be somebody's home."""

LINGER_SECONDS, LOOK_SECONDS = 10.0, 0.05
"""How long the engines of a daemon that was killed may take to end, and how often one looks."""


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


def new_daemon() -> str:
    """A name that no other daemon has, its process's id first: containers count from 1, all."""
    return f"{os.getpid()} {secrets.token_hex(8)}"


def write_lock(directory: Path) -> WriteLock:
    """The directory's, which is made where it is not there. Raises OSError."""
    directory.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    return WriteLock(directory / WRITE_LOCK)


def join(directory: Path, daemon: str, writing: WriteLock) -> FileLock:
    """Keeps other daemons out until it is released. Waits a moment for the engines of one that has
    been killed, which end by themselves. Raises TierError when another is in, and OSError when
    there can be no lock.
    """
    lock, until = FileLock(directory / LOCK), monotonic() + LINGER_SECONDS
    try:
        while not _is_in(lock, daemon, writing):
            pid = lock.owner.partition(" ")[0]
            if monotonic() > until or not _has_ended(pid):
                raise TierError(
                    f"the disk cache {directory} is in use by another daemon (pid {pid})"
                )
            sleep(LOOK_SECONDS)
    except BaseException:
        lock.release()
        raise
    return lock


def take_folder(directory: Path, fingerprint: str) -> tuple[Path, FileLock]:
    """The first of the fingerprint's that no process has, made where it is not there, and its
    lock. A checkpoint may be served under two names. Raises OSError.
    """
    digits = blake3(fingerprint.encode()).hexdigest(length=16)
    for number in itertools.count(1):
        folder = directory / f"{VERSION}-{digits}{f'-{number}' if number > 1 else ''}"
        folder.mkdir(FOLDER_MODE, exist_ok=True)
        folder.chmod(FOLDER_MODE)
        lock = FileLock(folder / LOCK)
        try:
            if lock.take(ALONE):
                lock.sign(str(os.getpid()))
                _sign(folder, fingerprint)
                return folder, lock
        except BaseException:
            lock.release()
            raise
        lock.release()
    raise AssertionError


def is_open(folder: Path) -> bool:
    """Whether a process has it. Raises OSError."""
    lock = FileLock(folder / LOCK)
    try:
        return not lock.take(ALONE)
    finally:
        lock.release()


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


def _is_in(lock: FileLock, daemon: str, writing: WriteLock) -> bool:
    with writing:
        if lock.take(ALONE):
            lock.sign(daemon)
        return lock.owner == daemon and lock.take(SHARED)


def _has_ended(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError, ValueError):
        return False
    return False


def _sign(folder: Path, fingerprint: str) -> None:
    if fingerprint_of(folder) == fingerprint:
        os.utime(folder / FINGERPRINT)
    else:
        OsFiles().write(folder / FINGERPRINT, 0, (fingerprint.encode(),))


def _last_opened(folder: Path) -> float:
    try:
        return (folder / FINGERPRINT).stat().st_mtime
    except FileNotFoundError:
        return 0.0
