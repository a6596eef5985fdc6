"""The index of records on disk: one sqlite database, one connection, one thread at a time.

    roots    id, digest             of a namespace: 32 bytes
    records  id                     grows with time, so what is written together stands together
             name, parent           32 bytes each; the parent may be a root
             root                   an id of `roots`
             segment, offset        where the payload begins
             checksum               see record.py: 16 bytes
             n_tokens, part_bytes   the sizes are signed 64-bit integers, -1 for what is not there
             last_used              Unix seconds

Nothing is looked up in it: it is read once, when it is opened, and has no index but the key. Its
log (WAL) is bounded, and folded into it when it has grown. `synchronous=NORMAL`: what is committed
outlives the process; after a power loss the last commits may be missing, and the rest is sound.

No file is mapped into memory: one that somebody cuts short would end the process with a SIGBUS.
sqlite keeps the index of its log in a mapped file, `-shm`, unless it is told that it is alone
before it has read anything.
"""

import sqlite3
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvstore.tier.disk.files import Files
from kvstore.tier.record import Record, pack_sizes, payload_bytes, unpack_sizes
from kvstore.tier.types import Fault

FILE_NAME = "index.sqlite"
MOST_LOG_BYTES = 1 << 20
ROWS_AT_ONCE = 200
"""Of one transaction that removes or touches: each may stand in a page of its own."""

SLACK_BYTES = 4 << 20
"""What the index may grow by before somebody measures it again: its log, as much again where that
is folded in, a transaction on top, and the folders and lists of blocks of the file system."""

OPENING = """
PRAGMA locking_mode=EXCLUSIVE;
PRAGMA mmap_size=0;
PRAGMA wal_autocheckpoint=0;
PRAGMA synchronous=NORMAL;
PRAGMA temp_store=MEMORY;
"""
MAKING = """
PRAGMA page_size=4096;
PRAGMA auto_vacuum=INCREMENTAL;
PRAGMA journal_mode=WAL;
BEGIN;
CREATE TABLE roots (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE);
CREATE TABLE records (
    id INTEGER PRIMARY KEY, name BLOB NOT NULL, parent BLOB NOT NULL, root INTEGER NOT NULL,
    segment INTEGER NOT NULL, offset INTEGER NOT NULL, checksum BLOB NOT NULL,
    n_tokens INTEGER NOT NULL, part_bytes BLOB NOT NULL, last_used REAL NOT NULL);
COMMIT;
"""
LOAD = """
SELECT records.id, name, parent, roots.digest, segment, offset, checksum, n_tokens, part_bytes,
    last_used FROM records JOIN roots ON roots.id = records.root ORDER BY records.id
"""
KINDS = struct.Struct("<4qd3s3s3s")
ADD = """
INSERT INTO records VALUES (?, ?, ?, (SELECT id FROM roots WHERE digest = ?), ?, ?, ?, ?, ?, ?)
"""
DISK_FAULTS = {
    sqlite3.SQLITE_BUSY: Fault.IO,
    sqlite3.SQLITE_CANTOPEN: Fault.IO,
    sqlite3.SQLITE_FULL: Fault.NO_SPACE,
    sqlite3.SQLITE_IOERR: Fault.IO,
    sqlite3.SQLITE_LOCKED: Fault.IO,
    sqlite3.SQLITE_PERM: Fault.READ_ONLY,
    sqlite3.SQLITE_PROTOCOL: Fault.IO,
    sqlite3.SQLITE_READONLY: Fault.READ_ONLY,
}
"""What sqlite may say of a file that is sound."""


def index_fault(error: sqlite3.Error) -> Fault:
    """The disk's, or INDEX: the file is damaged."""
    if isinstance(error, sqlite3.OperationalError):
        return DISK_FAULTS.get(error.sqlite_errorcode & 0xFF, Fault.INDEX)
    return Fault.INDEX


class Index:
    """Raises sqlite3.Error, with nothing changed, where the disk or the file is at fault. When
    it is opened and read, the disk's are OperationalErrors, and the file's are not. To open one
    that is there writes nothing: the disk may be full.
    """

    def __init__(self, files: Files, folder: Path) -> None:
        self._log = folder / f"{FILE_NAME}-wal"
        self._files = files
        self._db = files.connect(folder / FILE_NAME)
        self._db.text_factory = bytes  # nothing is text, and what has become it need not be any
        try:
            with _faults_told_apart():
                self._db.executescript(OPENING)
                if not self._db.execute("SELECT name FROM sqlite_master").fetchall():
                    self._db.executescript(MAKING)
                self._db.execute("DELETE FROM records WHERE 0")  # it can be written
        except BaseException:
            self._db.close()
            raise

    def load(self) -> Iterator[Record]:
        """All there is, in the order of keys. A row whose columns are of other kinds, which sqlite
        does not mind, is a DatabaseError.
        """
        sizes = lru_cache(maxsize=256)(_sizes)
        for row in self._rows(LOAD):
            key, name, parent, root, segment, offset, check, n_tokens, packed, used = row
            try:
                KINDS.pack(key, segment, offset, n_tokens, used, name, parent, check)
                part_bytes, n_bytes = sizes(packed)
            except (struct.error, TypeError) as error:
                raise sqlite3.DatabaseError(f"row {key} is damaged: {error}") from error
            yield Record(
                key, name, parent, root, segment, offset, check, n_tokens, part_bytes, n_bytes, used
            )

    def add(self, records: Sequence[Record]) -> None:
        """All of them, or none."""
        with self._transaction():
            self._db.executemany(
                "INSERT OR IGNORE INTO roots (digest) VALUES (?)", {(it.root,) for it in records}
            )
            self._db.executemany(
                ADD,
                (
                    (
                        *(it.key, it.block_hash, it.parent, it.root, it.segment, it.offset),
                        *(it.checksum, it.n_tokens, pack_sizes(it.part_bytes), it.last_used),
                    )
                    for it in records
                ),
            )

    def remove(self, keys: Sequence[int]) -> None:
        """Rows that are not there are no matter."""
        for rows in _batches([(key,) for key in keys]):
            with self._transaction():
                self._db.executemany("DELETE FROM records WHERE id = ?", rows)
        if keys:
            self._db.execute("PRAGMA incremental_vacuum").fetchall()
            self._fold()

    def touch(self, records: Sequence[Record]) -> None:
        """Write down when they were last used."""
        for rows in _batches([(it.last_used, it.key) for it in records]):
            with self._transaction():
                self._db.executemany("UPDATE records SET last_used = ? WHERE id = ?", rows)

    def close(self) -> None:
        """Folds the log into the database, and removes it."""
        self._db.close()

    def _rows(self, sql: str) -> Iterator[tuple[Any, ...]]:
        with _faults_told_apart():
            yield from self._db.execute(sql)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._fold()

    def _fold(self) -> None:
        """What is in the log is committed: where it cannot be folded in, it stays for next time."""
        with suppress(OSError, sqlite3.Error):
            if self._files.size(self._log) > MOST_LOG_BYTES:
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


@contextmanager
def _faults_told_apart() -> Iterator[None]:
    """To sqlite a damaged name of a column, or a format that it does not know, is an
    OperationalError. That is one here where the disk is at fault alone. What `connect` has opened
    for writing is read-only, without further reasons, where its own header says so.
    """
    try:
        yield
    except UnicodeDecodeError as error:  # what sqlite says has the damaged name in it
        raise sqlite3.DatabaseError(f"a name is damaged: {error}") from error
    except sqlite3.OperationalError as error:
        if (
            index_fault(error) is not Fault.INDEX
            and error.sqlite_errorcode != sqlite3.SQLITE_READONLY
        ):
            raise
        raise sqlite3.DatabaseError(str(error)) from error


def _sizes(packed: bytes) -> tuple[tuple[int | None, ...], int]:
    part_bytes = unpack_sizes(packed)
    return part_bytes, payload_bytes(part_bytes)


def _batches(rows: list[tuple[float, ...]]) -> Iterator[list[tuple[float, ...]]]:
    for start in range(0, len(rows), ROWS_AT_ONCE):
        yield rows[start : start + ROWS_AT_ONCE]
