"""Token lists, packed runs of tokens, and block hashes that are valid outside the process.

`digest(block) = BLAKE3(digest of the block before || its tokens)`, each token a little-endian
unsigned 64-bit integer; the chain starts from the digest of the namespace. Equal digests mean equal
tokens after an equal prefix, so the disk cache identifies a block by its digest alone. Matching
inside the process compares tokens, never digests.
"""

import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice
from operator import itemgetter
from typing import NewType, overload

from blake3 import blake3

from kvstore.types import Namespace

TOKEN_BYTES = array("Q").itemsize
"""Bytes of one packed token id (an unsigned 64-bit integer in machine order)."""

TEXT_BYTES = array("I").itemsize
"""Bytes of an id of the vocabulary in a text (an unsigned 32-bit integer in machine order)."""

_LOW_HALF = 0 if sys.byteorder == "little" else 1

CONTENT_ID = 1 << 62
"""The lowest id that names a part of an image. The ids of vocabularies are far below it."""


def content_ids(digest: bytes, n_ids: int) -> list[int]:
    """The ids that name the first `n_ids` parts of the content with this digest, in order.

    Each has 62 bits of the BLAKE3 stream of the digest, so equal ids mean equal parts of equal
    content: a hit may rest on one id alone.
    """
    stream = array("Q", blake3(b"rootstock.content.v1" + digest).digest(length=8 * n_ids))
    if sys.byteorder == "big":
        stream.byteswap()
    return [bits & (CONTENT_ID - 1) | CONTENT_ID for bits in stream]


class Tokens:
    """An append-only list of the ids under which KV is cached: those of a `text`, which several
    lists may share, then its own `ids`. A token has its id in the vocabulary. A token that stands
    for a part of an image has the id of that content in place of its own; see `content_ids`.

    `text` has ids of the vocabulary in TEXT_BYTES bytes each, because many prompts may wait. Each
    of `parts`, which are in order and apart, has a position in the text and the packed ids of the
    parts of images that stand from there on.

    `wholes` are the first positions and the ends of images whose tokens see each other, in order.
    Each is computed in one step, and KV is adopted up to its first token or beyond its last one.

    The sequence that owns the list appends. Its lease and the radix tree only read.
    """

    __slots__ = ("_n_text", "_own", "_parts", "text", "wholes")

    def __init__(
        self,
        ids: Iterable[int] = (),
        text: bytes = b"",
        parts: Sequence[tuple[int, bytes]] = (),
        wholes: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.text = text
        self._n_text = len(text) // TEXT_BYTES
        self._parts = parts
        self._own = array("Q", ids)
        self.wholes = wholes

    def __len__(self) -> int:
        return self._n_text + len(self._own)

    def __getitem__(self, position: int) -> int:
        """The token id at a position that is not negative."""
        own = position - self._n_text
        return self._own[own] if own >= 0 else unpacked(self.packed(position, position + 1))[0]

    def copy(self) -> "Tokens":
        """A list of the same tokens, which shares `text` and `parts`."""
        return Tokens(self._own, self.text, self._parts, self.wholes)

    def whole_until(self, n_tokens: int) -> int:
        """The most of the first `n_tokens` tokens that end within no image of `wholes`."""
        for start, stop in self.wholes:
            if start < n_tokens < stop:
                return start
        return n_tokens

    def whole_from(self, n_tokens: int) -> int:
        """The fewest tokens, from `n_tokens` on, that end within no image of `wholes`."""
        for start, stop in self.wholes:
            if start < n_tokens < stop:
                return stop
        return n_tokens

    def append(self, token_id: int) -> None:
        self._own.append(token_id)

    def extend(self, packed: bytes) -> None:
        """Append a packed run."""
        self._own.frombytes(packed)

    def ids(self, start: int, stop: int) -> list[int]:
        """The token ids at positions [start, stop)."""
        return unpacked(self.packed(start, stop))

    def packed(self, start: int, stop: int) -> bytes:
        """The token ids at positions [start, stop) as bytes, TOKEN_BYTES for each."""
        n_text = self._n_text
        first, last = max(start - n_text, 0), max(stop - n_text, 0)
        own = self._own[first:last].tobytes()
        return self._packed_text(start, min(stop, n_text)) + own if start < n_text else own

    def _packed_text(self, start: int, stop: int) -> bytes:
        """The ids at positions [start, stop) of the text, parts of images included."""
        stop = max(start, stop)
        packed = bytearray((stop - start) * TOKEN_BYTES)
        halves = memoryview(packed).cast("I")
        halves[_LOW_HALF :: TOKEN_BYTES // TEXT_BYTES] = memoryview(self.text).cast("I")[start:stop]
        if not self._parts:
            return bytes(packed)
        begin = max(bisect_right(self._parts, start, key=itemgetter(0)) - 1, 0)
        for first, ids in islice(self._parts, begin, None):
            if first >= stop:
                break
            last = min(first + len(ids) // TOKEN_BYTES, stop)
            at = max(first, start)
            if at < last:
                cut = ids[(at - first) * TOKEN_BYTES : (last - first) * TOKEN_BYTES]
                packed[(at - start) * TOKEN_BYTES : (last - start) * TOKEN_BYTES] = cut
        return bytes(packed)


def unpacked(packed: bytes) -> list[int]:
    """The token ids of a packed run."""
    return array("Q", packed).tolist()


def common_tokens(left: bytes, right: bytes) -> int:
    """Length in tokens of the longest common prefix of two packed runs, by bisection."""
    low, high = 0, min(len(left), len(right)) // TOKEN_BYTES
    if left[: high * TOKEN_BYTES] == right[: high * TOKEN_BYTES]:
        return high
    while low + 1 < high:  # left[:low] == right[:low], left[:high] != right[:high]
        middle = (low + high) // 2
        if (
            left[low * TOKEN_BYTES : middle * TOKEN_BYTES]
            == (right[low * TOKEN_BYTES : middle * TOKEN_BYTES])
        ):
            low = middle
        else:
            high = middle
    return low


Digest = NewType("Digest", bytes)
"""The hash of a block and of all tokens before it, in DIGEST_BYTES bytes."""

DIGEST_BYTES = 32


def root_digest(namespace: Namespace) -> Digest:
    """The digest from which the chains of a namespace start. Fields are length-prefixed."""
    hasher = blake3(b"rootstock.kv.v2")
    for field in (namespace.model, namespace.adapter, namespace.kv_format, namespace.cache_salt):
        encoded = field.encode()
        hasher.update(struct.pack("<Q", len(encoded)))
        hasher.update(encoded)
    return Digest(hasher.digest())


def child_digest(parent: Digest, packed: bytes) -> Digest:
    """The digest of a block, or of its first tokens, after the block with the digest `parent`."""
    if sys.byteorder == "big":
        ids = array("Q", packed)
        ids.byteswap()
        packed = ids.tobytes()
    return Digest(blake3(parent + packed).digest())


def later_digest(block_hash: Digest) -> Digest:
    """The digest under which a block is stored again, because more is saved of it by then. No block
    has it: tokens take eight bytes each.
    """
    return Digest(blake3(block_hash + b"+").digest())


def child_digests(parent: Digest, packed: bytes, block_size: int) -> list[Digest]:
    """Digests of the blocks that hold the tokens `packed`, a tail included, after `parent`."""
    digests, block_bytes = [], block_size * TOKEN_BYTES
    for start in range(0, len(packed), block_bytes):
        parent = child_digest(parent, packed[start : start + block_bytes])
        digests.append(parent)
    return digests


class PackedDigests(Sequence[Digest]):
    """A chain of digests, in the 32 bytes of each."""

    __slots__ = ("_bytes",)

    def __init__(self, digests: Iterable[Digest] = ()) -> None:
        self._bytes = b"".join(digests)

    def __len__(self) -> int:
        return len(self._bytes) // DIGEST_BYTES

    @overload
    def __getitem__(self, index: int) -> Digest: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Digest, ...]: ...

    def __getitem__(self, index: int | slice) -> Digest | tuple[Digest, ...]:
        if isinstance(index, slice):
            return tuple(map(self.__getitem__, range(*index.indices(len(self)))))
        start = range(len(self))[index] * DIGEST_BYTES
        return Digest(self._bytes[start : start + DIGEST_BYTES])


def block_digests(namespace: Namespace, packed: bytes, block_size: int) -> PackedDigests:
    """Digests of the whole blocks of a packed run of tokens. A tail has no digest here."""
    n_whole = len(packed) - len(packed) % (block_size * TOKEN_BYTES)
    return PackedDigests(child_digests(root_digest(namespace), packed[:n_whole], block_size))
