"""Token lists, packed runs of tokens, and block hashes that are valid outside the process.

`digest(block) = BLAKE3(digest of the block before || its tokens)`, each token a little-endian
unsigned 32-bit integer; the chain starts from the digest of the namespace. Equal digests mean equal
tokens after an equal prefix, so the disk cache identifies a block by its digest alone. Matching
inside the process compares tokens, never digests.
"""

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NewType

from blake3 import blake3

from kvstore.types import Namespace

TOKEN_BYTES = array("I").itemsize
"""Bytes of one packed token id (an unsigned 32-bit integer in machine order)."""


class Tokens:
    """An append-only list of token ids.

    The sequence that owns it appends. Its lease and the radix tree only read.
    """

    __slots__ = ("_ids",)

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids = array("I", ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, position: int) -> int:
        return self._ids[position]

    def append(self, token_id: int) -> None:
        self._ids.append(token_id)

    def ids(self, start: int, stop: int) -> list[int]:
        """The token ids at positions [start, stop)."""
        return self._ids[start:stop].tolist()

    def packed(self, start: int, stop: int) -> bytes:
        """The token ids at positions [start, stop) as bytes, TOKEN_BYTES for each."""
        return self._ids[start:stop].tobytes()

    def copy(self) -> "Tokens":
        return Tokens(self._ids)


def unpacked(packed: bytes) -> list[int]:
    """The token ids of a packed run."""
    return array("I", packed).tolist()


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
"""The 32-byte hash of a block and of all tokens before it."""


def root_digest(namespace: Namespace) -> Digest:
    """The digest from which the chains of a namespace start. Fields are length-prefixed."""
    hasher = blake3(b"rootstock.kv.v1")
    for field in (namespace.model, namespace.adapter, namespace.kv_format, namespace.cache_salt):
        encoded = field.encode()
        hasher.update(struct.pack("<Q", len(encoded)))
        hasher.update(encoded)
    return Digest(hasher.digest())


def child_digest(parent: Digest, packed: bytes) -> Digest:
    """The digest of a block, or of its first tokens, after the block with the digest `parent`."""
    if sys.byteorder == "big":
        ids = array("I", packed)
        ids.byteswap()
        packed = ids.tobytes()
    return Digest(blake3(parent + packed).digest())


def child_digests(parent: Digest, packed: bytes, block_size: int) -> list[Digest]:
    """Digests of the blocks that hold the tokens `packed`, a tail included, after `parent`."""
    digests, block_bytes = [], block_size * TOKEN_BYTES
    for start in range(0, len(packed), block_bytes):
        parent = child_digest(parent, packed[start : start + block_bytes])
        digests.append(parent)
    return digests


def block_digests(
    namespace: Namespace, token_ids: Sequence[int], block_size: int
) -> tuple[Digest, ...]:
    """Digests of the whole blocks of a token sequence. A tail has no digest here."""
    n_whole = len(token_ids) - len(token_ids) % block_size
    packed = Tokens(token_ids).packed(0, n_whole)
    return tuple(child_digests(root_digest(namespace), packed, block_size))
