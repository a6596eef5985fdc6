"""The tree notifies its observer of changes, and tells which nodes it will evict next."""

from kvstore.store import KVStore
from kvstore.tree import Node
from kvstore.types import Namespace
from tests.unit.kv_helpers import BLOCK, NS, admit, make_store, run_of, serve, tree_of

A, B = run_of(1000, 16), run_of(2000, 16)


class Notes:
    """Records all notifications."""

    def __init__(self, store: KVStore) -> None:
        self.said: list[tuple[object, ...]] = []
        tree_of(store).observer = self

    def stored(self, node: Node, first: int) -> None:
        above = node.parent.serial if node.parent is not None and node.parent.blocks else None
        tokens = node.token_ids(1000)[first * BLOCK :]
        self.said.append(("stored", node.serial, above, node.namespace, tokens))

    def split(self, node: Node, lower: Node) -> None:
        self.said.append(("split", node.serial, lower.serial, len(node.blocks)))

    def used(self, node: Node) -> None:
        self.said.append(("used", node.serial))

    def removed(self, node: Node) -> None:
        assert not node.blocks
        self.said.append(("removed", node.serial))

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
        ("used", 1),
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


def test_a_node_is_removed_with_its_last_block() -> None:
    store = make_store(16)
    serve(store, A[:10])
    notes = Notes(store)
    for _ in range(2):
        tree_of(store).evict()
    assert notes.take() == []
    tree_of(store).evict()
    assert notes.take() == [("removed", 1)]


def test_a_tail_that_is_covered_goes_before_what_covers_it() -> None:
    store = make_store(16)
    serve(store, A[:6])
    serve(store, [*A[:4], *B[:4]])  # so that the tail is a leaf of its own
    notes = Notes(store)
    serve(store, A[:8])
    said = [(word, *rest) for word, *rest in notes.take() if word in {"removed", "stored"}]
    assert [word for word, *_ in said] == ["removed", "stored"]


class TestNextEvicted:
    def test_it_is_the_order_in_which_they_go(self) -> None:
        store = make_store(16)
        for prompt in (A[:4], B[:4], run_of(3000, 4), B[:4]):
            serve(store, prompt)
        expected = [node.serial for node in tree_of(store).next_evicted(3)]
        assert expected == [node.serial for node in tree_of(store).next_evicted(9)]
        notes = Notes(store)
        while tree_of(store).evict() is not None:
            pass
        assert [serial for _, serial, *_ in notes.take()] == expected

    def test_what_is_held_does_not_go(self) -> None:
        store = make_store(16)
        for prompt in (A[:8], B[:8]):
            serve(store, prompt)
        lease = admit(store, [*A[:8], 1])
        (node,) = tree_of(store).next_evicted(3)
        assert node.token_ids(8) == tuple(B[:8])
        store.release(lease)
        assert len(tree_of(store).next_evicted(3)) == 2

    def test_looking_ahead_repairs_a_few_entries_at_most(self) -> None:
        """And goes on where it has ended when it is asked again."""
        store = make_store(400)
        prompts = [run_of(1000 * i, 4) for i in range(300)]
        for prompt in prompts * 2:  # the second round makes all entries out of date
            serve(store, prompt)
        assert len(tree_of(store).next_evicted(8)) < 8
        for _ in range(10):
            found = tree_of(store).next_evicted(8)
        assert [node.token_ids(1) for node in found] == [(p[0],) for p in prompts[:8]]
