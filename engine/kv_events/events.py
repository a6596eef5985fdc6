"""KV events in vLLM's format: the tree's facts as msgpack maps, and a mirror of what is published.

A batch is `[seconds, [event, ...], 0]`. Each event is a map with its `type` first. A block is named
by 63 bits of its digest, so it has the same name in all daemons that serve the same model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Raw, Struct, msgpack

from kvstore.node import BlockEvent, BlocksStored, NamespaceCleared
from kvstore.tokens import CONTENT_ID, TOKEN_BYTES, Digest, unpacked
from kvstore.types import Namespace

EVENT_TOKENS = 2048
"""The most tokens in one event, unless a block has more."""

EVENT_REMOVALS = 2048
"""The most blocks in one event that says that they were removed."""

BATCH_BYTES = 32 * 1024
"""The size from which a batch takes no further event."""


class BlockStored(Struct, tag=True, frozen=True):
    """Blocks of one chain are cached. The fields are vLLM's."""

    block_hashes: Sequence[int]
    parent_block_hash: int | None  # None: the first block is the first of its prompt
    token_ids: Sequence[int]
    block_size: int
    lora_name: str | None
    extra_keys: Sequence[Sequence[str] | None]  # one for each block
    lora_id: None = None
    medium: str = "GPU"
    group_idx: int = 0
    kv_cache_spec_kind: str = "full_attention"


class BlockRemoved(Struct, tag=True, frozen=True):
    """Blocks are no longer cached. The fields are vLLM's."""

    block_hashes: Sequence[int]
    medium: str = "GPU"
    group_idx: int = 0


class AllBlocksCleared(Struct, tag=True, frozen=True):
    """Nothing is cached any more."""


CLEARED = msgpack.encode(AllBlocksCleared())


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

    Prompts with a `cache_salt` are never among them: routers do not compare salts. Parts of images
    are published as the token that stands for them in prompts. A block of these has an extra key,
    which says what the images are; all other blocks have none.
    """

    def __init__(
        self, block_size: int, adapters: Mapping[str, str], image_part: int | None = None
    ) -> None:
        """`adapters`: the names by which requests call adapters, by the adapter of a namespace.
        `image_part`: the token that stands for a part of an image; None if there are no images.
        """
        self._image_part = image_part
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
        ids, size = unpacked(b"".join(block.packed for block in blocks)), self._block_size
        keys: list[Sequence[str] | None] = [None] * len(hashes)
        if self._image_part is not None and max(ids) >= CONTENT_ID:
            for index in range(len(keys)):
                own = slice(index * size, (index + 1) * size)
                if names := [each for each in ids[own] if each >= CONTENT_ID]:
                    keys[index] = (f"{names[0]:016x}",)  # no other content has this id
            ids = [each if each < CONTENT_ID else self._image_part for each in ids]
        return msgpack.encode(BlockStored(hashes, parent, ids, size, lora_name, keys))


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
    return msgpack.encode((seconds, [*map(Raw, events)], 0))


def _removed_events(hashes: Sequence[int]) -> Iterator[bytes]:
    for start in range(0, len(hashes), EVENT_REMOVALS):
        yield msgpack.encode(BlockRemoved(hashes[start : start + EVENT_REMOVALS]))
