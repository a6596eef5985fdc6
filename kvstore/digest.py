"""Names of blocks that hold outside the process: a BLAKE3 chain over whole blocks.

`digest(block) = BLAKE3(digest of the block before || its tokens)`, each token a little-endian
unsigned 32-bit integer; the chain starts from the digest of the namespace. Equal digests mean equal
tokens in an equal context, so a disk tier or a cache event can name a block by its digest alone.
Matching inside the process is by tokens and never by digest.
"""

import struct
from collections.abc import Sequence
from typing import NewType

from blake3 import blake3

from kvstore.types import Namespace

Digest = NewType("Digest", bytes)
"""32 bytes."""


def root_digest(namespace: Namespace) -> Digest:
    """The digest that every chain of a namespace starts from. Fields are length-prefixed."""
    hasher = blake3(b"rootstock.kv.v1")
    for field in (namespace.model, namespace.adapter, namespace.kv_format, namespace.cache_salt):
        encoded = field.encode()
        hasher.update(struct.pack("<Q", len(encoded)))
        hasher.update(encoded)
    return Digest(hasher.digest())


def block_digests(
    namespace: Namespace, token_ids: Sequence[int], block_size: int
) -> tuple[Digest, ...]:
    """Digests of the whole blocks of a token sequence; a tail has none."""
    digests = []
    parent = root_digest(namespace)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = token_ids[start : start + block_size]
        parent = Digest(blake3(parent + struct.pack(f"<{block_size}I", *block)).digest())
        digests.append(parent)
    return tuple(digests)
