"""What the tree says of its changes to those who listen, and to nobody else."""

from kvstore.pool import BlockPool
from kvstore.store import KVStore
from kvstore.tree import Node, PrefixIndex
from kvstore.types import Namespace
from tests.unit.kv_helpers import BLOCK, NS, admit, make_store, run_of, serve

A, B = run_of(1000, 16), run_of(2000, 16)


class Notes:
    """Writes down what it is told, as a tier needs it: whole chains of blocks by their node."""

    def __init__(self, store: KVStore) -> None:
        self.said: list[tuple[object, ...]] = []
        store.index.observers.add(self)

    def stored(self, node: Node, first: int) -> None:
        above = node.parent.serial if node.parent is not None and node.parent.blocks else None
        tokens = node.token_ids(1000)[first * BLOCK :]
        self.said.append(("stored", node.serial, above, node.namespace, tokens))

    def split(self, node: Node, lower: Node) -> None:
        self.said.append(("split", node.serial, lower.serial, len(node.blocks)))

    def used(self, node: Node, n_tokens: int) -> None:
        self.said.append(("used", node.serial, n_tokens))

    def removed(self, node: Node, n_blocks: int) -> None:
        self.said.append(("removed", node.serial, n_blocks, len(node.blocks)))

    def cleared(self, namespace: Namespace) -> None:
        self.said.append(("cleared", namespace))

    def take(self) -> list[tuple[object, ...]]:
        said, self.said = self.said, []
        return said


def test_a_run_is_stored_behind_what_it_follows() -> None:
    store = make_store(16)
    notes = Notes(store)
    serve(store, A[:10])
    assert notes.take() == [
        ("stored", 1, None, NS, tuple(A[:8])),
        ("stored", 1, None, NS, tuple(A[8:10])),
    ]
    serve(store, [*A[:4], *B[:4]])
    assert notes.take() == [
        ("split", 1, 2, 1),
        ("used", 1, 4),
        ("stored", 3, 1, NS, tuple(B[:4])),
    ]


def test_another_namespace_begins_anew() -> None:
    store = make_store(16)
    notes = Notes(store)
    salted = Namespace("m", cache_salt="s")
    serve(store, A[:4], namespace=salted)
    assert notes.take() == [("stored", 1, None, salted, tuple(A[:4]))]
    store.clear(NS)
    assert notes.take() == []
    store.clear()
    assert notes.take() == [("cleared", salted)]


def test_eviction_takes_blocks_from_the_end() -> None:
    store = make_store(16)
    serve(store, A[:10])
    notes = Notes(store)
    for _ in range(3):
        store.index.evict()
    assert notes.take() == [("removed", 1, 1, 2), ("removed", 1, 1, 1), ("removed", 1, 1, 0)]


def test_a_tail_that_is_covered_goes_before_what_covers_it() -> None:
    store = make_store(16)
    serve(store, A[:6])
    serve(store, [*A[:4], *B[:4]])  # so that the tail is a leaf of its own
    notes = Notes(store)
    serve(store, A[:8])
    said = [(word, *rest) for word, *rest in notes.take() if word in {"removed", "stored"}]
    assert [word for word, *_ in said] == ["removed", "stored"]


def test_nobody_is_told_who_has_left() -> None:
    store = make_store(16)
    notes, other = Notes(store), Notes(store)
    store.index.observers.remove(notes)
    serve(store, A[:4])
    assert notes.take() == []
    assert len(other.take()) == 1


def test_without_an_index_nothing_is_told() -> None:
    store = KVStore(BlockPool(8), PrefixIndex(), BLOCK)
    notes = Notes(store)
    store.donate(admit(store, A[:8]))
    store.clear()
    assert notes.take() == []
    assert list(store.index.nodes()) == []
    assert store.index.next_evicted(3) == ()


class TestNextEvicted:
    def test_it_is_the_order_in_which_they_go(self) -> None:
        store = make_store(16)
        for prompt in (A[:4], B[:4], run_of(3000, 4), B[:4]):
            serve(store, prompt)
        expected = [node.serial for node in store.index.next_evicted(3)]
        assert expected == [node.serial for node in store.index.next_evicted(9)]
        notes = Notes(store)
        while store.index.evict() is not None:
            pass
        assert [serial for _, serial, *_ in notes.take()] == expected

    def test_what_is_held_does_not_go(self) -> None:
        store = make_store(16)
        for prompt in (A[:8], B[:8]):
            serve(store, prompt)
        lease = admit(store, [*A[:8], 1])
        (node,) = store.index.next_evicted(3)
        assert node.token_ids(8) == tuple(B[:8])
        store.release(lease)
        assert len(store.index.next_evicted(3)) == 2

    def test_looking_ahead_repairs_a_few_entries_at_most(self) -> None:
        """And goes on where it has ended when it is asked again."""
        store = make_store(400)
        prompts = [run_of(1000 * i, 4) for i in range(300)]
        for prompt in prompts * 2:  # the second round makes all entries out of date
            serve(store, prompt)
        assert len(store.index.next_evicted(8)) < 8
        for _ in range(10):
            found = store.index.next_evicted(8)
        assert [node.token_ids(1) for node in found] == [(p[0],) for p in prompts[:8]]
