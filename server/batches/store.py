"""The files and batches of clients, in a folder of their own on disk.

    files/ID         the content of a file; with .part while it is written
    files/ID.json    its StoredFile
    batches/ID.json  a StoredBatch

A record is replaced whole, so a process that is killed leaves the old one or the new one.
"""

import fcntl
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from threading import RLock
from time import time, time_ns
from typing import BinaryIO, Literal, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from server.errors import SERVER, ApiError

FILES_PER_BATCH = 4  # a batch has an input, an output and an error file; some are not used yet
MESSAGES_ENDPOINT = "/v1/messages"
RECORD = ".json"
PART = ".part"
DAMAGED = ".damaged"

Purpose = Literal["batch", "batch_output", "messages", "messages_output"]
Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
LIVE = frozenset({"validating", "in_progress", "finalizing", "cancelling"})

log = logging.getLogger("rootstock.batches")


class Record(BaseModel):
    """What is known of a file or a batch, as it is kept on disk."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(pattern=r"^[a-z]+[-_][0-9a-f]+[oe]?$")
    owner: str  # the name of the API key that it belongs to; empty without keys
    client: str  # whose share of the store it takes
    created_at: int  # seconds since the epoch, as are all times
    order_ns: int = Field(default_factory=time_ns)  # of records of the same second


class StoredFile(Record):
    """A file that has been written."""

    filename: str
    purpose: Purpose
    n_bytes: int
    expires_at: int


class LineError(BaseModel):
    """Why a batch cannot begin: what is wrong with a line of its file, counted from 1."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchUsage(BaseModel):
    """Tokens of all lines that were answered."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


class StoredBatch(Record):
    """A batch, of any dialect, and how far it is."""

    endpoint: str
    input_file_id: str
    status: Status = "validating"
    expires_at: int
    window: str  # the time for it, as its client wrote it
    output_seconds: int  # how long its output is kept
    metadata: dict[str, str] | None = None
    model: str | None = None  # of its first line
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[LineError] = []
    usage: BatchUsage = BatchUsage()

    @property
    def is_live(self) -> bool:
        return self.status in LIVE

    @property
    def is_of_messages(self) -> bool:
        """Whether it came by Anthropic's API. Its files then belong to it alone."""
        return self.endpoint == MESSAGES_ENDPOINT

    @property
    def ended_at(self) -> int | None:
        return self.completed_at or self.failed_at or self.expired_at or self.cancelled_at

    @property
    def output_part_id(self) -> str:
        """The id that its output has, or will have if there is any."""
        return f"file-{self.id.removeprefix('batch_').removeprefix('msgbatch_')}o"

    @property
    def error_part_id(self) -> str:
        """The id that the file of its failed lines has, or will have."""
        return f"{self.output_part_id[:-1]}e"


R = TypeVar("R", bound=Record)


class StoreFull(ApiError):
    """507: the limit is reached, and nothing that could be dropped is left."""

    def __init__(self, message: str) -> None:
        headers = {"x-should-retry": "false"}
        super().__init__(507, message, type=SERVER, code="batch_storage_full", headers=headers)


class BatchStore:
    """Files and batches, within limits of bytes, number and age. Safe from any thread; all methods
    but the lookups and lists wait for the disk.

    What has expired is dropped. Where there is too much, the client that has the most loses its
    oldest file, or its oldest batch that has ended; what a live batch needs is not lost. A folder
    belongs to one daemon.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        max_batches: int,
        now: Callable[[], float] = time,
    ) -> None:
        """Raises OSError where the folder cannot be used, or another daemon has it."""
        self._files_folder, self._batches_folder = folder / "files", folder / "batches"
        self._max_bytes = max_bytes
        self._max_batches = max_batches
        self._now = now
        self.lock = RLock()  # also held while results are written
        self._parts: dict[str, Part] = {}
        self._held = Counter[str]()  # bytes by client
        for path in (folder, self._files_folder, self._batches_folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
        self._lock_file = open(folder / "lock", "ab")  # noqa: SIM115 held until `close`
        try:
            _lock(self._lock_file, folder)
            self._batches = _read(self._batches_folder, StoredBatch)
            self._files = _read(self._files_folder, StoredFile)
            self._tidy()
        except BaseException:
            self._lock_file.close()
            raise

    def close(self) -> None:
        """Let another daemon have the folder."""
        self._lock_file.close()

    @property
    def n_bytes(self) -> int:
        """The bytes of all files, also of those that are being written."""
        return self._held.total()

    def by_state(self) -> dict[str, int]:
        """How many batches are live, and how many have ended."""
        n_live = len(self.live_batches())
        return {"live": n_live, "ended": len(self._batches) - n_live}

    def file(self, owner: str, id: str) -> StoredFile | None:
        """A file of the owner."""
        found = self._files.get(id)
        return found if found is not None and found.owner == owner else None

    def files(self, owner: str, purposes: Collection[str]) -> list[StoredFile]:
        """The owner's files of these purposes, the latest first."""
        files = list(self._files.values())
        own = [file for file in files if file.owner == owner and file.purpose in purposes]
        return sorted(own, key=lambda f: f.order_ns, reverse=True)

    def path(self, file: StoredFile) -> Path:
        """Where the content of a file is."""
        return self._files_folder / file.id

    def delete_file(self, file: StoredFile) -> None:
        """Raises ApiError (409) while a batch reads it."""
        with self.lock:
            if (batch := self._reader(file.id)) is not None:
                message = f"The file {file.id} is the input of {batch.id}, which has not ended."
                raise ApiError(409, message, param="file_id", code="file_in_use")
            self._drop_file(file)

    def batch(self, owner: str, id: str) -> StoredBatch | None:
        """A batch of the owner, of any dialect."""
        found = self._batches.get(id)
        return found if found is not None and found.owner == owner else None

    def batches(self, owner: str, prefix: str) -> list[StoredBatch]:
        """The owner's batches whose ids begin with a prefix, the latest first."""
        own = [batch for batch in list(self._batches.values()) if batch.owner == owner]
        return sorted(
            (batch for batch in own if batch.id.startswith(prefix)),
            key=lambda batch: batch.order_ns,
            reverse=True,
        )

    def live_batches(self) -> list[StoredBatch]:
        """The batches of all owners that have not ended, the oldest first."""
        live = [batch for batch in list(self._batches.values()) if batch.is_live]
        return sorted(live, key=lambda batch: batch.order_ns)

    def add_batch(self, batch: StoredBatch) -> None:
        """Keep a new batch. Raises ApiError (429) where there are too many that have not ended, of
        which a client may have as many as places are free.
        """
        with self.lock:
            live = self.live_batches()
            own, free = sum(b.client == batch.client for b in live), self._max_batches - len(live)
            if own >= free:
                raise ApiError(
                    429,
                    f"{len(live)} batches have not ended, {own} of them this client's, and "
                    f"{self._max_batches} may be (max_batches); a client may have as many as "
                    f"places are free ({free}).",
                    type="rate_limit_error",
                    code="rate_limit_exceeded",
                )
            ended = [b for b in self._batches.values() if not b.is_live]
            while len(ended) + len(live) >= self._max_batches:
                counts = Counter(b.client for b in ended)
                most = counts.most_common(1)[0][0]
                oldest = min((b for b in ended if b.client == most), key=lambda b: b.order_ns)
                ended.remove(oldest)
                self._drop_batch(oldest)
            self.save(batch)

    def save(self, batch: StoredBatch) -> None:
        """Keep a batch as it is now."""
        with self.lock:
            _write(self._batches_folder / f"{batch.id}{RECORD}", batch)
            self._batches[batch.id] = batch

    def delete_batch(self, batch: StoredBatch) -> None:
        """Delete a batch that has ended, and the files that only it refers to."""
        with self.lock:
            self._drop_batch(batch)

    def part(self, id: str, owner: str, client: str) -> "Part":
        """The file of that id, to be written, or written on. Raises OSError and ApiError (507)."""
        with self.lock:
            if id not in self._parts:
                n_files = len(self._files) + len(self._parts)
                if n_files >= FILES_PER_BATCH * self._max_batches:
                    self._evict(f"{n_files} files (max_batches)")
                self._parts[id] = Part(self, self._files_folder / f"{id}{PART}", owner, client)
            return self._parts[id]

    def hold(self, client: str, n_bytes: int) -> None:
        """Count bytes that are about to be written. Raises ApiError (507) where they are too many,
        and nothing may be dropped for them.
        """
        with self.lock:
            while self.n_bytes + n_bytes > self._max_bytes:
                self._evict(f"{self._max_bytes} bytes (max_batch_bytes)")
            self._held[client] += n_bytes

    def give_back(self, client: str, n_bytes: int) -> None:
        """Count bytes that are gone."""
        with self.lock:
            self._held[client] -= n_bytes
            if not self._held[client]:
                del self._held[client]

    def add_file(self, part: "Part", file: StoredFile) -> None:
        """Make a file of a part that is written and closed."""
        with self.lock:
            _write(self._files_folder / f"{file.id}{RECORD}", file)  # first: `_tidy` goes on
            part.path.rename(self.path(file))
            self._files[file.id] = file
            self._parts.pop(file.id, None)

    def forget_part(self, part: "Part") -> None:
        """Delete a part."""
        with self.lock:
            part.path.unlink(missing_ok=True)
            self.give_back(part.client, part.n_bytes)
            self._parts.pop(part.path.name.removesuffix(PART), None)

    def expire(self, keep_seconds: float) -> None:
        """Drop the files that have expired, and the batches that ended `keep_seconds` ago."""
        with self.lock:
            now = self._now()
            for file in [f for f in self._files.values() if f.expires_at <= now]:
                if self._reader(file.id) is None:
                    self._drop_file(file)
            for batch in list(self._batches.values()):
                if not batch.is_live and (batch.ended_at or batch.created_at) + keep_seconds <= now:
                    self._drop_batch(batch)

    def _tidy(self) -> None:
        """Count what is there, and delete what belongs to no record: a cut upload, say."""
        live = [batch for batch in self._batches.values() if batch.is_live]
        parts = {f"{id}{PART}" for b in live for id in (b.output_part_id, b.error_part_id)}
        for file in self._files.values():
            part = self._files_folder / f"{file.id}{PART}"
            if part.is_file() and not self.path(file).is_file():
                part.rename(self.path(file))
        for path in self._files_folder.iterdir():
            name = path.name
            if path.suffix in {RECORD, DAMAGED} or name in parts:
                continue
            if name not in self._files:
                log.warning("deleting %s, which belongs to no file", path)
                path.unlink()
        for file in list(self._files.values()):
            if not self.path(file).is_file():
                log.error("the content of %s is lost", file.id)
                self._drop_file(file)
            else:
                file.n_bytes = self.path(file).stat().st_size
                self._held[file.client] += file.n_bytes

    def _reader(self, file_id: str) -> StoredBatch | None:
        """A live batch that reads the file."""
        batches = self._batches.values()
        return next((b for b in batches if b.is_live and b.input_file_id == file_id), None)

    def _evict(self, limit: str) -> None:
        """Drop the oldest file of the client that holds most of what may be dropped."""
        in_use = {batch.input_file_id for batch in self._batches.values() if batch.is_live}
        droppable = [file for file in self._files.values() if file.id not in in_use]
        if not droppable:
            message = f"The store of files and batches is full: {limit}. Delete files, or wait."
            raise StoreFull(message)
        held = Counter[str]()
        for file in droppable:
            held[file.client] += file.n_bytes
        most = held.most_common(1)[0][0]
        own = [file for file in droppable if file.client == most]
        oldest = min(own, key=lambda file: file.order_ns)
        log.warning("dropping %s: %s is the limit", oldest.id, limit)
        self._drop_file(oldest)

    def _drop_file(self, file: StoredFile) -> None:
        (self._files_folder / f"{file.id}{RECORD}").unlink(missing_ok=True)
        self.path(file).unlink(missing_ok=True)
        if self._files.pop(file.id, None) is not None and self._held[file.client]:
            self.give_back(file.client, file.n_bytes)

    def _drop_batch(self, batch: StoredBatch) -> None:
        (self._batches_folder / f"{batch.id}{RECORD}").unlink(missing_ok=True)
        self._batches.pop(batch.id, None)
        for id in (batch.input_file_id, batch.output_file_id):
            file = self._files.get(id or "")
            if file is not None and file.purpose in {"messages", "messages_output"}:
                self._drop_file(file)


class Part:
    """A file that is being written. What is there already is kept. Used by one thread at a time."""

    def __init__(self, store: BatchStore, path: Path, owner: str, client: str) -> None:
        """Raises OSError, and ApiError (507) where what is there is too much."""
        self._store = store
        self.path = path
        self.owner = owner
        self.client = client
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        self.n_bytes = os.fstat(descriptor).st_size
        store.hold(client, self.n_bytes)

    def append(self, data: bytes) -> None:
        """Write at the end, all of it or nothing. Raises OSError, such as of a disk that is full,
        and ApiError (507).
        """
        self._store.hold(self.client, len(data))
        try:
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        except BaseException:
            self._store.give_back(self.client, len(data))
            os.ftruncate(self._file.fileno(), self.n_bytes)
            raise
        self.n_bytes += len(data)

    def truncate(self, n_bytes: int) -> None:
        """Keep the first bytes alone."""
        os.ftruncate(self._file.fileno(), n_bytes)
        self._store.give_back(self.client, self.n_bytes - n_bytes)
        self.n_bytes = n_bytes

    def sync(self) -> None:
        """Return when all of it is on the disk."""
        os.fsync(self._file.fileno())

    def finish(self, filename: str, purpose: Purpose, created_at: int, seconds: int) -> StoredFile:
        """Make a file of it, which expires after `seconds`."""
        self.sync()
        file = StoredFile(
            id=self.path.name.removesuffix(PART),
            owner=self.owner,
            client=self.client,
            filename=filename,
            purpose=purpose,
            created_at=created_at,
            expires_at=created_at + seconds,
            n_bytes=self.n_bytes,
        )
        self._store.add_file(self, file)
        self._file.close()
        return file

    def discard(self) -> None:
        """Delete it."""
        self._file.close()
        self._store.forget_part(self)


def _lock(file: BinaryIO, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(f"another daemon uses {folder} (batches)") from None


def new_file_id() -> str:
    return f"file-{uuid4().hex}"


def _write(path: Path, record: Record) -> None:
    """Replace a record, on the disk when this returns."""
    new = path.with_suffix(".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(record.model_dump_json().encode())
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _read(folder: Path, kind: type[R]) -> dict[str, R]:
    """The records of a folder, by id. A damaged one is put aside, and logged."""
    records = dict[str, R]()
    for path in [*folder.iterdir()]:
        if path.suffix == ".new":  # the process ended before it replaced the old one
            path.unlink()
        elif path.suffix == RECORD:
            try:
                record = kind.model_validate_json(path.read_bytes())
                if record.id != path.stem:
                    raise ValueError(f"it has the id {record.id}")
            except (OSError, ValueError) as error:
                problem = "invalid" if isinstance(error, ValidationError) else error
                log.error("%s is damaged (%s) and put aside", path, problem)
                path.replace(path.with_suffix(DAMAGED))
            else:
                records[record.id] = record
    return records
