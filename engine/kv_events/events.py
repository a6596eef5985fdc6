"""KV events in vLLM's format: the tree's facts as msgpack maps, and a mirror of what is published.

A batch is `[seconds, [event, ...], 0]`. Each event is a map with its `type` first. A block is named
by 63 bits of its digest, so it has the same name in all daemons that serve the same model.
"""

import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvstore.node import BlockEvent, BlocksStored, NamespaceCleared
from kvstore.tokens import TOKEN_BYTES, Digest
from kvstore.types import Namespace

EVENT_TOKENS = 2048
"""The most tokens in one event, unless a block has more."""

EVENT_REMOVALS = 2048
"""The most blocks in one event that says that they were removed."""

BATCH_BYTES = 32 * 1024
"""The size from which a batch takes no further event."""

NIL = b"\xc0"


def block_hash(digest: Digest) -> int:
    """63 bits of a block's digest: signed and unsigned readers see the same number."""
    return int.from_bytes(digest[:8], "big") >> 1


class PublishedBlock(NamedTuple):
    """A block that subscribers have been told of."""

    parent: int | None  # None: the block is the first of its prompt
    packed: bytes  # its token ids
    lora_name: str | None


class PublishedBlocks:
    """The blocks that subscribers have been told of, parents first, by their hashes.

    Prompts with a `cache_salt` are never among them: routers do not compare salts.
    """

    def __init__(self, block_size: int, adapters: Mapping[str, str]) -> None:
        """`adapters`: the names by which requests call adapters, by the adapter of a namespace."""
        self._block_size = block_size
        self._adapters = adapters
        self._by_hash = dict[int, PublishedBlock]()

    def __len__(self) -> int:
        return len(self._by_hash)

    def hashes(self) -> list[int]:
        """All blocks, parents first."""
        return list(self._by_hash)

    def forget(self) -> None:
        """Start anew, as if nothing had been published."""
        self._by_hash.clear()

    def events(self, facts: Iterable[BlockEvent], stored: list[int]) -> Iterator[bytes]:
        """Note facts, and make the events that say so. Stored blocks are appended to `stored`."""
        for fact in facts:
            if fact.namespace.cache_salt:
                continue
            match fact:
                case BlocksStored():
                    hashes = self._store(fact)
                    stored += hashes
                    yield from self.stored_events(hashes)
                case NamespaceCleared(namespace):
                    yield from self._clear(namespace)
                case removed:
                    hashes = [*map(block_hash, removed.hashes)]
                    for each in hashes:
                        self._by_hash.pop(each, None)
                    yield from _removed_events(hashes)

    def stored_events(self, hashes: Iterable[int]) -> Iterator[bytes]:
        """The events that state these blocks, without those that have been removed meanwhile. Each
        event has a contiguous part of one chain.
        """
        run, blocks = list[int](), list[PublishedBlock]()
        for each in hashes:
            block = self._by_hash.get(each)
            if block is None:
                continue
            if run and (block.parent != run[-1] or len(run) * self._block_size >= EVENT_TOKENS):
                yield self._stored_event(run, blocks)
                run, blocks = [], []
            run.append(each)
            blocks.append(block)
        if run:
            yield self._stored_event(run, blocks)

    def _store(self, fact: BlocksStored) -> list[int]:
        adapter, size = fact.namespace.adapter, self._block_size * TOKEN_BYTES
        lora_name = self._adapters[adapter] if adapter else None
        parent = None if fact.parent is None else block_hash(fact.parent)
        hashes = [*map(block_hash, fact.hashes)]
        for index, each in enumerate(hashes):
            packed = fact.packed[index * size : (index + 1) * size]
            self._by_hash.pop(each, None)  # to its place after its parent
            self._by_hash[each] = PublishedBlock(parent, packed, lora_name)
            parent = each
        return hashes

    def _clear(self, namespace: Namespace) -> Iterator[bytes]:
        lora_name = self._adapters[namespace.adapter] if namespace.adapter else None
        cleared = [each for each, of in self._by_hash.items() if of.lora_name == lora_name]
        if len(cleared) == len(self._by_hash):
            self._by_hash.clear()
            yield CLEARED
            return
        for each in cleared:
            del self._by_hash[each]
        yield from _removed_events(cleared)

    def _stored_event(self, hashes: Sequence[int], blocks: Sequence[PublishedBlock]) -> bytes:
        parent, _, lora_name = blocks[0]
        return _map(
            ("type", _text("BlockStored")),
            ("block_hashes", _hashes(hashes)),
            ("parent_block_hash", NIL if parent is None else _hash(parent)),
            ("token_ids", _token_ids(b"".join(block.packed for block in blocks))),
            ("block_size", _unsigned(self._block_size)),
            ("lora_id", NIL),
            ("medium", _text("GPU")),
            ("lora_name", NIL if lora_name is None else _text(lora_name)),
            ("extra_keys", _length(len(hashes)) + NIL * len(hashes)),
            ("group_idx", _unsigned(0)),
            ("kv_cache_spec_kind", _text("full_attention")),
        )


def batches(events: Iterable[bytes], seconds: float) -> Iterator[bytes]:
    """The payloads of the messages that carry these events."""
    parts, n_bytes = list[bytes](), 0
    for event in events:
        parts.append(event)
        n_bytes += len(event)
        if n_bytes >= BATCH_BYTES:
            yield _batch(parts, seconds)
            parts, n_bytes = [], 0
    if parts:
        yield _batch(parts, seconds)


def _batch(events: Sequence[bytes], seconds: float) -> bytes:
    rank = _unsigned(0)
    return b"".join((b"\x93\xcb", struct.pack(">d", seconds), _length(len(events)), *events, rank))


def _removed_events(hashes: Sequence[int]) -> Iterator[bytes]:
    for start in range(0, len(hashes), EVENT_REMOVALS):
        yield _map(
            ("type", _text("BlockRemoved")),
            ("block_hashes", _hashes(hashes[start : start + EVENT_REMOVALS])),
            ("medium", _text("GPU")),
            ("group_idx", _unsigned(0)),
        )


# msgpack (https://github.com/msgpack/msgpack/blob/master/spec.md), as far as the events need it.
# Token ids and hashes have one width, so that a million of them are written without a loop.


def _map(*entries: tuple[str, bytes]) -> bytes:
    """A map of at most 15 names."""
    pairs = b"".join(_text(name) + value for name, value in entries)
    return bytes((0x80 | len(entries),)) + pairs


def _text(text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) < 32:
        return bytes((0xA0 | len(encoded),)) + encoded
    return struct.pack(">BH", 0xDA, len(encoded)) + encoded


def _unsigned(number: int) -> bytes:
    return bytes((number,)) if number < 128 else struct.pack(">BI", 0xCE, number)


def _length(n_items: int) -> bytes:
    """The head of a list."""
    return bytes((0x90 | n_items,)) if n_items < 16 else struct.pack(">BI", 0xDD, n_items)


def _hash(number: int) -> bytes:
    return struct.pack(">BQ", 0xCF, number)


def _hashes(numbers: Sequence[int]) -> bytes:
    return _length(len(numbers)) + b"".join(map(_hash, numbers))


def _token_ids(packed: bytes) -> bytes:
    n_tokens = len(packed) // TOKEN_BYTES
    if sys.byteorder == "little":
        ids = array("I", packed)
        ids.byteswap()
        packed = ids.tobytes()
    written = bytearray(b"\xce" * (5 * n_tokens))
    for byte in range(4):
        written[byte + 1 :: 5] = packed[byte::4]
    return _length(n_tokens) + written


CLEARED = _map(("type", _text("AllBlocksCleared")))
"""The event that says that nothing is cached."""
