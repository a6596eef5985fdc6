"""The file with what comparisons of attentions have found on this machine: `attention.json` in the
user's cache folder. Imports no MLX arrays: `doctor` reads the file, too.

Each entry is for one kind of layer on one device, with one driver, one version of MLX and one
source of the kernel. It is written before a comparison begins, because the device may take the
machine down: an entry that is left so is not tried again.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from engine.api import one_line
from engine.mlx_backend.tuning.kinds import LayerKind
from engine.process.folders import cache_folder
from engine.values.attention import AttentionTrial

MOST_ENTRIES = 200
"""Entries that are kept, those written last."""

LOCK_SECONDS = 60.0
"""How long to wait for another process that compares."""

_POLL_SECONDS = 0.05


class RecordError(Exception):
    """The file cannot be read or written, with a message for the user."""


@dataclass(frozen=True, slots=True)
class TrialKey:
    """What a comparison holds for. When any of it changes, attentions are compared again."""

    device: str
    driver: str
    mlx: str
    source: str  # a digest of the kernel's source; "" without a kernel
    kind: LayerKind


@dataclass(frozen=True, slots=True)
class _Entry:
    key: TrialKey
    trial: AttentionTrial


@dataclass(frozen=True, slots=True)
class _File:
    entries: tuple[_Entry, ...]
    version: Literal[1] = 1  # raised whenever the file means something else


_FILE = TypeAdapter(_File)


class TrialRecord:
    """The file in one folder. Several processes may use it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "attention.json"

    @classmethod
    def of_user(cls) -> "TrialRecord":
        """The record of the user. Raises RecordError for a user without a home."""
        try:
            return cls(cache_folder())
        except RuntimeError as error:
            raise RecordError(f"there is no cache folder: {one_line(error)}") from error

    @contextmanager
    def locked(
        self,
        seconds: float = LOCK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Iterator[None]:
        """Hold the lock that one process at a time can hold. The kernel drops it with the process.

        Raises RecordError where another process holds it for `seconds`, or where the folder cannot
        be written.
        """
        with self._wrapped():
            self.file.parent.mkdir(parents=True, exist_ok=True)
            lock = self.file.with_suffix(".lock").open("w")
        end = clock() + seconds
        with lock:
            while not self._has_locked(lock.fileno()):
                if clock() >= end:
                    raise RecordError(f"another process holds {lock.name}")
                sleep(_POLL_SECONDS)
            yield

    def find(self, key: TrialKey) -> AttentionTrial | None:
        """The entry of a key; None if there is none. Raises RecordError."""
        return self._read().get(key)

    def write(self, key: TrialKey, trial: AttentionTrial) -> None:
        """Add or replace an entry. It survives a crash of the machine once this returns. The caller
        holds the lock. Raises RecordError.
        """
        entries = self._read()
        entries.pop(key, None)
        self._replace({**entries, key: trial})

    def remove(self, key: TrialKey) -> None:
        """Remove an entry. The caller holds the lock. Raises RecordError."""
        entries = self._read()
        if entries.pop(key, None) is not None:
            self._replace(entries)

    def clear(self) -> None:
        """Forget all entries, also those of a file that cannot be read. Raises RecordError."""
        with self._wrapped():
            self.file.unlink(missing_ok=True)

    def _read(self) -> dict[TrialKey, AttentionTrial]:
        with self._wrapped():
            try:
                text = self.file.read_bytes()
            except FileNotFoundError:
                return {}
        try:
            found = _FILE.validate_json(text)
        except ValueError as error:
            raise RecordError(f"{self.file} is damaged, or another version wrote it") from error
        return {entry.key: entry.trial for entry in found.entries}

    def _replace(self, trials: dict[TrialKey, AttentionTrial]) -> None:
        entries = tuple(_Entry(key, trial) for key, trial in trials.items())[-MOST_ENTRIES:]
        part = self.file.with_suffix(f".{os.getpid()}.part")
        with self._wrapped():
            try:
                with part.open("wb") as opened:
                    opened.write(_FILE.dump_json(_File(entries), indent=1))
                    opened.flush()
                    os.fsync(opened.fileno())
                part.replace(self.file)
            finally:
                part.unlink(missing_ok=True)
            _sync(self.file.parent)

    def _has_locked(self, descriptor: int) -> bool:
        """Lock a file, unless another process holds its lock."""
        with self._wrapped(), suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    @contextmanager
    def _wrapped(self) -> Iterator[None]:
        """Raise RecordError for an OSError."""
        try:
            yield
        except OSError as error:
            raise RecordError(f"{self.file} cannot be used: {one_line(error)}") from error


def _sync(folder: Path) -> None:
    """Have the names in a folder survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
