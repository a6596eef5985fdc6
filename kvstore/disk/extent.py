"""The format of an extent, one immutable file for a run of entries, and the calls to the disk.

    magic                16 bytes
    length of the body   uint32
    checksum of the body 16 bytes
    body: root, parent   32 bytes each
          entries, parts uint32 each; then for each entry
              hash       32 bytes
              n_tokens   uint32
              checksum   16 bytes
              sizes      int64 for each part, -1 for an absent one
    payload: the parts of all entries, one after the other

Integers are little-endian. Checksums are BLAKE3, cut to 16 bytes. That of an entry covers its hash,
its length, its sizes and its parts. Nothing is synced: a file gets its name when it is complete, so
it outlives the process; after a power loss, checksums find what is missing.
"""

import errno
import os
import shutil
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from kvstore.disk.types import Buffer, Entry, EntryHead
from kvstore.tokens import Digest

SUFFIX, UNFINISHED = ".kv", ".tmp"
MAGIC = b"rootstock kv v3\n"
CHECKSUM_BYTES = 16
PREFIX = struct.Struct(f"<16sI{CHECKSUM_BYTES}s")
HEAD = struct.Struct("<32s32sII")
RECORD = struct.Struct(f"<32sI{CHECKSUM_BYTES}s")
FIRST_READ = 4096
"""Holds the header of an extent of some fifty entries."""

MOST_HEADER_BYTES = 8 << 20
"""Of a file with more, nothing is read. Entries take some 80 bytes of a header."""

FOLDER_MODE, FILE_MODE = 0o700, 0o600
MOST_BUFFERS = 1024  # IOV_MAX of Linux and macOS
STAT_BLOCK = 512  # the unit of st_blocks on every file system
OPENING = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
"""Opening a pipe or a link that was put in a file's place fails at once: it neither hangs nor opens
what is elsewhere."""


class DamagedHeader(Exception):
    """The file is no extent, or its header has been changed."""


class ExtentHeader(NamedTuple):
    """`end`: the size of the whole file in bytes."""

    root: Digest
    parent: Digest
    entries: tuple[EntryHead, ...]
    end: int


class FileUse(NamedTuple):
    """A file of a folder. `n_bytes`: of disk, as `du` counts; `used_ns`: its mtime."""

    name: str
    size: int
    n_bytes: int
    used_ns: int


def encode(root: Digest, parent: Digest, entries: Sequence[Entry]) -> tuple[ExtentHeader, bytes]:
    """The header, and its bytes, which the parts of all entries follow."""
    n_parts = len(entries[0].parts)
    record = _record(n_parts)
    header_bytes = PREFIX.size + HEAD.size + len(entries) * record.size
    *offsets, end = accumulate((entry.n_bytes for entry in entries), initial=header_bytes)
    headers = tuple(
        EntryHead(it.block_hash, it.n_tokens, it.sizes, _checksum(it), offset)
        for it, offset in zip(entries, offsets, strict=True)
    )
    body = HEAD.pack(root, parent, len(entries), n_parts) + b"".join(
        record.pack(it.block_hash, it.n_tokens, it.checksum, *_packable(it.sizes)) for it in headers
    )
    prefix = PREFIX.pack(MAGIC, len(body), blake3(body).digest(length=CHECKSUM_BYTES))
    return ExtentHeader(root, parent, headers, end), prefix + body


def read_header(files: "OsFiles", path: Path) -> ExtentHeader:
    """Raises DamagedHeader, and OSError where the disk is at fault."""
    found = files.read(path, 0, FIRST_READ)
    if len(found) < PREFIX.size:
        raise DamagedHeader(path)
    magic, n_bytes, checksum = PREFIX.unpack_from(found)
    if magic != MAGIC or not HEAD.size <= n_bytes <= MOST_HEADER_BYTES:
        raise DamagedHeader(path)
    end = PREFIX.size + n_bytes
    if end > len(found):
        found = files.read(path, 0, end)
    body = found[PREFIX.size : end]
    if blake3(body).digest(length=CHECKSUM_BYTES) != checksum:
        raise DamagedHeader(path)
    root, parent, n_entries, n_parts = HEAD.unpack_from(body)
    if not n_entries or not n_parts or n_entries * _record_bytes(n_parts) != len(body) - HEAD.size:
        raise DamagedHeader(path)
    record = _record(n_parts)
    entries, offset = list[EntryHead](), end
    for block_hash, n_tokens, its_checksum, *packed in record.iter_unpack(body[HEAD.size :]):
        sizes = tuple(None if size < 0 else size for size in packed)
        entries.append(EntryHead(Digest(block_hash), n_tokens, sizes, its_checksum, offset))
        offset = entries[-1].end
    hashes = {root, parent, *(entry.block_hash for entry in entries)}
    n_above = 1 if root == parent else 2
    if len(hashes) != n_above + n_entries or not all(entry.n_tokens for entry in entries):
        raise DamagedHeader(path)  # a path never returns to where it was
    return ExtentHeader(Digest(root), Digest(parent), tuple(entries), offset)


def parse(head: EntryHead, payload: memoryview) -> Entry | None:
    """An entry, its parts slices of `payload`; None where the checksum does not match."""
    if len(payload) != head.n_bytes:
        return None
    parts, start = list[Buffer | None](), 0
    for size in head.sizes:
        parts.append(None if size is None else payload[start : start + size])
        start += size or 0
    entry = Entry(head.block_hash, head.n_tokens, tuple(parts))
    return entry if _checksum(entry) == head.checksum else None


def _record_bytes(n_parts: int) -> int:
    """The bytes of an entry in a header, for any number that a damaged header may have."""
    return RECORD.size + 8 * n_parts


def _record(n_parts: int) -> struct.Struct:
    return struct.Struct(f"{RECORD.format}{n_parts}q")


def _checksum(entry: Entry) -> bytes:
    sizes = entry.sizes
    layout = f"<32sI{len(sizes)}q"
    hasher = blake3(struct.pack(layout, entry.block_hash, entry.n_tokens, *_packable(sizes)))
    for part in entry.parts:
        if part is not None:
            hasher.update(part)
    return hasher.digest(length=CHECKSUM_BYTES)


def _packable(sizes: Sequence[int | None]) -> Iterator[int]:
    return (-1 if size is None else size for size in sizes)


def open_own(path: Path, mode: int) -> int:
    """A descriptor of a file of this cache, which is made where it is missing. What else has its
    place is removed, but for a folder with something in it. Raises OSError.
    """
    while True:
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(kind := path.lstat().st_mode):
                if stat.S_ISDIR(kind):
                    path.rmdir()
                else:
                    path.unlink()
        try:
            return os.open(path, mode | os.O_CREAT | OPENING, FILE_MODE)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # put there meanwhile
                raise


class OsFiles:
    """The operating system's files. Tests inject faults by overriding methods, which raise OSError.

    A file is opened for one call and closed again: 10 us next to megabytes, and no descriptor that
    could be lost.
    """

    def create(self, path: Path, buffers: Sequence[Buffer]) -> int:
        """Write a file in full, then give it its name. Returns its bytes as `du` counts them."""
        unfinished = path.with_suffix(UNFINISHED)
        try:
            self.write(unfinished, buffers)
            unfinished.rename(path)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise
        return path.stat().st_blocks * STAT_BLOCK

    def write(self, path: Path, buffers: Sequence[Buffer]) -> None:
        """Make or overwrite a file, and only then cut off what follows: the disk may be full."""
        descriptor = open_own(path, os.O_WRONLY)
        try:
            views = [memoryview(buffer).cast("B") for buffer in buffers]
            n_bytes = sum(map(len, views))
            while views:
                n_written = os.writev(descriptor, views[:MOST_BUFFERS])
                while views and n_written >= len(views[0]):
                    n_written -= len(views.pop(0))
                if views:
                    views[0] = views[0][n_written:]
            os.ftruncate(descriptor, n_bytes)
        finally:
            os.close(descriptor)

    def read(self, path: Path, offset: int, n_bytes: int) -> memoryview:
        """Fewer bytes than asked for where the file ends before that."""
        descriptor = os.open(path, os.O_RDONLY | OPENING)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a file", str(path))
            n_bytes = max(min(n_bytes, status.st_size - offset), 0)
            found = os.pread(descriptor, n_bytes, offset)
            while len(found) < n_bytes:  # interrupted, or cut short while we read
                more = os.pread(descriptor, n_bytes - len(found), offset + len(found))
                if not more:
                    break
                found += more
            return memoryview(found)
        finally:
            os.close(descriptor)

    def stamp(self, path: Path, used_ns: int) -> None:
        """Set a file's mtime, in nanoseconds of Unix time."""
        os.utime(path, ns=(used_ns, used_ns))

    def status(self, path: Path) -> FileUse:
        """What a file takes, and its mtime. A folder's is when a file in it was last made or
        removed.
        """
        found = path.lstat()
        return FileUse(path.name, found.st_size, found.st_blocks * STAT_BLOCK, found.st_mtime_ns)

    def names(self, folder: Path) -> set[str]:
        """The names in a folder."""
        return set(os.listdir(folder))

    def scan(self, folder: Path) -> list[FileUse]:
        """The folder itself, as `.`, and what is in it, without what goes away meanwhile."""
        found = [self.status(folder)._replace(name=".")]
        with os.scandir(folder) as items:
            for item in items:
                with suppress(FileNotFoundError, PermissionError):
                    status = item.stat(follow_symlinks=False)
                    n_bytes, used_ns = status.st_blocks * STAT_BLOCK, status.st_mtime_ns
                    found.append(FileUse(item.name, status.st_size, n_bytes, used_ns))
        return found

    def remove(self, path: Path) -> None:
        """A file, or a folder with all that is in it. It need not exist. Of a link nothing but
        itself.
        """
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def disk(self, folder: Path) -> tuple[int, int]:
        """The file system's free bytes and all its bytes."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
