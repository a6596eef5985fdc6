"""What the kvstore tests have in common: a store, and a request served through it."""

from array import array
from collections.abc import Iterable, Iterator, Sequence

from kvstore import invariants
from kvstore.in_flight import QueuedPrompt
from kvstore.lease import Lease
from kvstore.node import Node
from kvstore.ops import CopyBlock
from kvstore.pool import BlockPool
from kvstore.store import KVStore
from kvstore.tokens import Tokens
from kvstore.tree import RadixTree
from kvstore.types import BlockId, Namespace

NS = Namespace(model="m")
BLOCK = 4
"""Tokens in a block, unless a test says otherwise."""


def make_store(n_blocks: int, block_size: int = BLOCK) -> KVStore:
    pool = BlockPool(n_blocks)
    return KVStore(pool, RadixTree(pool, block_size, hashes_blocks=True), block_size)


def admit(
    store: KVStore,
    prompt: Iterable[int],
    namespace: Namespace = NS,
    reserve_tokens: int = 0,
    spare_blocks: int = 0,
) -> Lease:
    lease = store.admit(namespace, Tokens(prompt), reserve_tokens, spare_blocks)
    assert isinstance(lease, Lease), lease
    return lease


def fork(store: KVStore, lease: Lease, tokens: Iterable[int], n_tokens: int) -> Lease:
    other = store.fork(lease, Tokens(tokens), n_tokens)
    assert isinstance(other, Lease), other
    return other


def plan(store: KVStore, lease: Lease, n_tokens: int) -> tuple[CopyBlock, ...]:
    """Plan the lease's next tokens. Returns the copies that were queued."""
    refusal = store.plan(lease, n_tokens)
    assert refusal is None, refusal
    return tuple(op for _, op in store.take_ops() if isinstance(op, CopyBlock))


def compute(store: KVStore, lease: Lease) -> tuple[CopyBlock, ...]:
    """One step over all tokens of the lease that have no KV yet."""
    n_tokens = len(lease.tokens) - lease.written_tokens
    copies = plan(store, lease, n_tokens)
    store.commit(lease, n_tokens)
    invariants.check(store)
    return copies


def generate(store: KVStore, lease: Lease, answer: Iterable[int]) -> None:
    """Compute the prompt and then token by token the answer, but for its last token."""
    for token_id in answer:
        compute(store, lease)
        lease.tokens.append(token_id)


def serve(
    store: KVStore, prompt: Sequence[int], answer: Sequence[int] = (), namespace: Namespace = NS
) -> int:
    """A whole request, donated at its end. Without an answer the prompt is computed all the same.

    Returns how many tokens of the prompt were cached.
    """
    lease = admit(store, prompt, namespace)
    if answer:
        generate(store, lease, answer)
    else:
        compute(store, lease)
    store.donate(lease)
    invariants.check(store)
    return lease.cached_tokens


def drain(store: KVStore) -> list[BlockId]:
    """Evict all that can be evicted. Returns the blocks in the order in which they went."""
    order = []
    while (block := tree_of(store).evict()) is not None:
        invariants.check(store)
        order.append(block)
    return order


def packed(ids: Iterable[int]) -> bytes:
    """The packed run of these token ids."""
    return array("Q", ids).tobytes()


def run_of(start: int, n_tokens: int) -> list[int]:
    """`n_tokens` token ids from `start` on: runs with different starts share no first token."""
    return list(range(start, start + n_tokens))


def tree_of(store: KVStore) -> RadixTree:
    assert store.tree is not None
    return store.tree


def walk(tree: RadixTree) -> Iterator[tuple[Namespace, bytes, Node]]:
    """Each node with its namespace and the packed tokens from the root to its end."""
    for node in tree.nodes():
        path = reversed(tuple(node.path()))
        yield node.namespace, b"".join(bytes(each.packed) for each in path), node


def waits(store: KVStore, prompt: QueuedPrompt) -> bool:
    """Whether a queued prompt must wait for a running request now."""
    assert store.in_flight is not None
    return store.in_flight.must_wait(prompt)
