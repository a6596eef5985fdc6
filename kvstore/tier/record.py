"""The index's record of one entry, and the checksum over it and the entry's bytes."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from blake3 import blake3

from kvstore.tier.types import Buffer, Entry, EntryInfo
from kvstore.tokens import Digest

CHECKSUM_BYTES = 16
NOTHING = -1
"""The size of a part that is not there; one of no bytes is 0."""


@dataclass(eq=False, slots=True)
class Record:
    """Where an entry's bytes stand: its parts one after the other, raw, in one segment.

    `key` is its row's, and grows with time. `last_used` is never before that of a descendant.
    `path_bytes` is the size of all entries on the path from the root to this one.
    """

    key: int
    block_hash: Digest
    parent: Digest
    root: Digest
    segment: int
    offset: int
    checksum: bytes
    n_tokens: int
    part_bytes: tuple[int | None, ...]
    n_bytes: int
    last_used: float
    path_bytes: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.n_bytes

    @property
    def is_sane(self) -> bool:
        """Whether its numbers can be read with at all."""
        return self.offset >= 0 and self.n_bytes >= 0

    @property
    def info(self) -> EntryInfo:
        return EntryInfo(self.n_tokens, self.part_bytes, self.n_bytes, self.last_used)

    @property
    def has(self) -> tuple[bool, ...]:
        """Which parts are there."""
        return tuple(size is not None for size in self.part_bytes)

    def lacks(self, has: Sequence[bool]) -> bool:
        """Whether one of these parts is not there. A damaged row may know of fewer, or of more."""
        pairs = zip_longest(self.part_bytes, has)
        return any(size is None and here for size, here in pairs)

    def cut(self, payload: memoryview) -> Entry | None:
        """The entry, its parts copied out, if these are its bytes."""
        if checksum(self.block_hash, self.parent, self.n_tokens, self.part_bytes, (payload,)) != (
            self.checksum
        ):
            return None
        parts, start = list[Buffer | None](), 0
        for size in self.part_bytes:
            parts.append(None if size is None else bytes(payload[start : start + size]))
            start += size or 0
        return Entry(self.block_hash, self.n_tokens, tuple(parts))


def checksum(
    block_hash: Digest,
    parent: Digest,
    n_tokens: int,
    part_bytes: Sequence[int | None],
    payload: Sequence[Buffer],
) -> bytes:
    """BLAKE3 over what the row says and the payload, cut to 16 bytes. A damaged row shows, too."""
    hasher = blake3(block_hash + parent + struct.pack("<q", n_tokens) + pack_sizes(part_bytes))
    for buffer in payload:
        hasher.update(buffer)
    return hasher.digest(length=CHECKSUM_BYTES)


def payload_bytes(part_bytes: Sequence[int | None]) -> int:
    """Of all parts together; -1 where one has a size that no part has."""
    sizes = [size for size in part_bytes if size is not None]
    return sum(sizes) if min(sizes, default=0) >= 0 else -1


def pack_sizes(part_bytes: Sequence[int | None]) -> bytes:
    """Little-endian signed 64-bit integers."""
    sizes = (NOTHING if size is None else size for size in part_bytes)
    return struct.pack(f"<{len(part_bytes)}q", *sizes)


def unpack_sizes(packed: bytes) -> tuple[int | None, ...]:
    sizes = struct.unpack(f"<{len(packed) // 8}q", packed)
    return tuple(None if size == NOTHING else size for size in sizes)
