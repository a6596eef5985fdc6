"""The cache directory: one folder for each model, shared by the processes of one daemon.

DIRECTORY/lock                  shared by the processes of a daemon; contains its name
DIRECTORY/write.lock            held by the one process that changes anything
DIRECTORY/written               today's date and the bytes written, see `DailyBudget`
DIRECTORY/v3-<32 hex digits>/   of BLAKE3(fingerprint); with -2 appended for a second process
    lock                        held while a process has the folder open; contains its pid
    fingerprint                 as text
    model                       its name, for people; missing where nobody has given one
    <16 hex digits>.kv          an extent, see `extent.py`

Nothing else in the directory is measured or removed: it may be somebody's home. What has one of
these names and is something else, such as a link, is removed, and never followed.
"""

import errno
import fcntl
import itertools
import logging
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType

from blake3 import blake3

from kvstore.disk.extent import FOLDER_MODE, SUFFIX, UNFINISHED, OsFiles, open_own
from kvstore.disk.types import DiskError

logger = logging.getLogger(__name__)

VERSION = "v4"
LOCK, WRITE_LOCK, FINGERPRINT, WRITTEN = "lock", "write.lock", "fingerprint", "written"
MODEL = "model"
FOLDERS = re.compile(r"(v\d+)-[0-9a-f]{32}(-\d+)?")
EXTENTS = re.compile(rf"[0-9a-f]{{16}}{re.escape(SUFFIX)}")

SHARED, EXCLUSIVE = fcntl.LOCK_SH, fcntl.LOCK_EX
MOST_TEXT, MOST_NAME_BYTES = 256, 1 << 16
SECONDS_OF_DAY = 86_400

TMUTIL_SECONDS = 5.0

LINGER_SECONDS, LOOK_SECONDS = 10.0, 0.05
"""How long the engines of a killed daemon may take to end, and how often one looks."""


@contextmanager
def wrap_errors(directory: Path) -> Iterator[None]:
    """Turns an OSError into a DiskError that names the directory."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise DiskError(f"cannot use the disk cache {directory}: {why}") from error


class FileLock:
    """A lock of the file system, which ends with the process that holds it, however that ends.

    The file is made where it is missing and says who holds the lock. As a context manager it waits
    for the exclusive lock; two of one process exclude each other as well. Methods raise OSError.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = open_own(path, os.O_RDWR)

    def take(self, mode: int) -> bool:
        """Lock it in this mode, in place of the present one; False if others hold it."""
        try:
            fcntl.flock(self._descriptor, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @property
    def owner(self) -> str:
        return os.pread(self._descriptor, MOST_TEXT, 0).decode(errors="replace").strip()

    def sign(self, owner: str) -> None:
        """Overwrite the owner's name, and only then cut the rest off: the disk may be full."""
        text = f"{owner}\n".encode()
        os.pwrite(self._descriptor, text, 0)
        os.truncate(self._descriptor, len(text))

    def close(self) -> None:
        """Close the file; the kernel drops the lock."""
        os.close(self._descriptor)

    def __enter__(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def new_daemon() -> str:
    """A name that no other daemon has. It begins with the process's id; in containers all daemons
    may have the same id.
    """
    return f"{os.getpid()} {secrets.token_hex(8)}"


@contextmanager
def joined(directory: Path, daemon: str) -> Iterator[FileLock]:
    """Take part in the directory, which is made where it does not exist. Keeps other daemons out
    until the end. Yields the lock under which its contents may be changed.

    Waits a moment for the engines of a daemon that was killed, which end by themselves. Raises
    DiskError when another daemon is in, and OSError when there can be no lock.
    """
    directory.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    with ExitStack() as held:
        writing = FileLock(directory / WRITE_LOCK)
        held.callback(writing.close)
        lock = FileLock(directory / LOCK)
        held.callback(lock.close)
        until = monotonic() + LINGER_SECONDS
        while not _is_in(lock, daemon, writing):
            pid = lock.owner.partition(" ")[0]
            if monotonic() > until or not _has_ended(pid):
                raise DiskError(
                    f"the disk cache {directory} is in use by another daemon (pid {pid})"
                )
            sleep(LOOK_SECONDS)
        yield writing


def take_folder(directory: Path, fingerprint: str, model: str = "") -> tuple[Path, FileLock]:
    """The first folder of the fingerprint that no process has open, made where there is none, and
    its lock. A checkpoint may be served under two names; the folder notes `model`, the last one.
    Raises OSError.
    """
    digits = blake3(fingerprint.encode()).hexdigest(length=16)
    for number in itertools.count(1):
        folder = directory / f"{VERSION}-{digits}{f'-{number}' if number > 1 else ''}"
        if not _is_folder(folder):
            folder.unlink(missing_ok=True)
        folder.mkdir(FOLDER_MODE, exist_ok=True)
        folder.chmod(FOLDER_MODE)
        lock = _lock_of(folder)
        try:
            if lock.take(EXCLUSIVE):
                for unfinished in folder.glob(f"*{UNFINISHED}"):
                    OsFiles().remove(unfinished)
                lock.sign(str(os.getpid()))
                _sign(folder, FINGERPRINT, fingerprint)
                if model:
                    _sign(folder, MODEL, model)
                return folder, lock
        except BaseException:
            lock.close()
            raise
        lock.close()
    raise AssertionError


def is_open(folder: Path) -> bool:
    """Whether a process has the folder open. Raises OSError."""
    lock = _lock_of(folder)
    try:
        return not lock.take(EXCLUSIVE)
    finally:
        lock.close()


def folders(directory: Path) -> list[Path]:
    """The folders of all models in the format of this version, the last opened one last."""
    found = (path for path, version in _folders(directory) if version == VERSION)
    return sorted(found, key=_last_opened)


def remove_old_formats(directory: Path, files: OsFiles) -> None:
    """Remove folders in the format of another version, which are never read, and what has the name
    of a folder and is none. Raises OSError.
    """
    for path in directory.iterdir():
        if FOLDERS.fullmatch(path.name) and not _is_folder(path):
            files.remove(path)
            logger.info("disk cache: %s is no folder and was removed", path)
    for folder, version in _folders(directory):
        if version != VERSION and not is_open(folder):
            files.remove(folder)
            logger.info("disk cache: %s has the old format %s and was removed", folder, version)


def keep_out_of_backups(directory: Path) -> None:
    """On macOS, exclude the directory from Time Machine: its contents can be recomputed. There, an
    attribute of the directory says so, which `tmutil` sets without special rights.
    """
    if sys.platform == "darwin":
        command = ["/usr/bin/tmutil", "addexclusion", str(directory)]
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, check=False, capture_output=True, timeout=TMUTIL_SECONDS)


def fingerprint_of(folder: Path) -> str:
    """The fingerprint in the folder's file; empty if the file is missing. Damage is not
    detected.
    """
    return _text_of(folder / FINGERPRINT)


def model_of(folder: Path) -> str:
    """The name of the model; empty if none was given."""
    return _text_of(folder / MODEL)


class DailyBudget:
    """The bytes that all processes together may still write on one day of UTC.

    `DIRECTORY/written` has the day, counted from 1970, and the bytes, as text. For the holder of
    the write lock. What raises OSError changes nothing.

    A day that has been granted is not granted again by a clock that goes back. Of a day further
    ahead than tomorrow the clock was wrong: its bytes count until tomorrow ends.
    """

    def __init__(
        self, files: OsFiles, directory: Path, daily_bytes: float, clock: Callable[[], float]
    ) -> None:
        self._files = files
        self._path = directory / WRITTEN
        self._daily_bytes = daily_bytes
        self._clock = clock

    def left(self) -> float:
        """Bytes."""
        day, n_bytes = self._written()
        if day > self._tomorrow():
            self.spend(0)
        return self._daily_bytes - n_bytes

    def spend(self, n_bytes: int) -> None:
        day, written = self._written()
        text = f"{min(day, self._tomorrow())} {written + n_bytes:020}\n"  # always of one length
        self._files.write(self._path, (text.encode(),))

    def _tomorrow(self) -> int:
        return int(self._clock() // SECONDS_OF_DAY) + 1

    def _written(self) -> tuple[int, int]:
        """The day of the bytes that count now, today or later, and the bytes."""
        today = self._tomorrow() - 1
        try:
            day, n_bytes = map(int, bytes(self._files.read(self._path, 0, MOST_TEXT)).split())
        except ValueError:  # damaged
            return today, 0
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.EINVAL):  # no file
                return today, 0
            raise
        return (today, 0) if day < today else (day, max(n_bytes, 0))


def _folders(directory: Path) -> Iterator[tuple[Path, str]]:
    """Each folder of ours with its version."""
    for path in directory.iterdir():
        if (name := FOLDERS.fullmatch(path.name)) and _is_folder(path):
            yield path, name[1]


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _lock_of(folder: Path) -> FileLock:
    """The lock of a model's folder, in which all is this cache's own."""
    if _is_folder(folder / LOCK):
        OsFiles().remove(folder / LOCK)
    return FileLock(folder / LOCK)


def _last_opened(folder: Path) -> int:
    """The time at which a process last opened the folder: opening it writes to its lock."""
    try:
        return (folder / LOCK).lstat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _is_in(lock: FileLock, daemon: str, writing: FileLock) -> bool:
    with writing:
        if lock.take(EXCLUSIVE):
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


def _text_of(path: Path) -> str:
    try:
        return bytes(OsFiles().read(path, 0, MOST_NAME_BYTES)).decode(errors="replace")
    except OSError:
        return ""


def _sign(folder: Path, name: str, text: str) -> None:
    if _text_of(folder / name) != text:
        if _is_folder(folder / name):
            OsFiles().remove(folder / name)
        OsFiles().create(folder / name, (text.encode(errors="replace"),))
