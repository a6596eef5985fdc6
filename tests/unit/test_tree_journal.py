"""The tree notes changes for the disk cache, and tells which nodes it will evict next."""

from kvstore.node import Change, TreeChange
from kvstore.store import KVStore
from tests.unit.kv_helpers import admit, make_store, run_of, serve, tree_of

A, B = run_of(1000, 16), run_of(2000, 16)


def journal_of(store: KVStore) -> list[TreeChange]:
    """The changes from now on."""
    tree = tree_of(store)
    tree.journal = []
    return tree.journal


def test_what_grows_is_noted() -> None:
    store = make_store(16)
    journal = journal_of(store)
    serve(store, A[:10])
    assert [(change, node.token_ids(1000)) for change, node, _ in journal] == [
        (Change.GROWN, tuple(A[:10])),
        (Change.GROWN, tuple(A[:10])),
    ]


def test_a_split_is_noted_before_what_was_split_for() -> None:
    store = make_store(16)
    serve(store, A[:8])
    journal = journal_of(store)
    serve(store, [*A[:4], *B[:4]])
    changes = [change for change, _, _ in journal]
    assert changes == [Change.SPLIT, Change.ADOPTED, Change.GROWN]
    (_, upper, lower), (_, adopted, _), (_, grown, _) = journal
    assert lower is not None
    assert adopted is upper
    assert [node.token_ids(8) for node in (upper, lower, grown)] == [
        tuple(A[:4]),
        tuple(A[4:8]),
        tuple(B[:4]),
    ]


def test_without_a_disk_cache_nothing_is_noted() -> None:
    store = make_store(16)
    serve(store, A[:10])
    assert tree_of(store).journal is None


def test_how_much_is_saved_is_divided_with_the_node() -> None:
    store = make_store(16)
    serve(store, A)
    (node,) = tree_of(store).nodes()
    node.n_saved = 3
    serve(store, [*A[:4], *B[:4]])
    (lower,) = (each for each in tree_of(store).nodes() if each.token_ids(1) == (A[4],))
    assert (node.n_saved, lower.n_saved) == (1, 2)


def test_what_is_evicted_is_not_saved_any_more() -> None:
    store = make_store(16)
    serve(store, A)
    (node,) = tree_of(store).nodes()
    node.n_saved = 4
    tree_of(store).evict()
    assert node.n_saved == len(node.blocks) == 3


def test_a_slot_that_is_attached_to_a_block_makes_it_new_again() -> None:
    store = make_store(16)
    serve(store, A)
    journal = journal_of(store)
    (node,) = tree_of(store).nodes()
    node.n_saved = 4
    tree_of(store).attached(node.blocks[2])
    assert node.n_saved == 2
    assert journal == [(Change.GROWN, node, None)]


class TestNextEvicted:
    def test_it_is_the_order_in_which_they_go(self) -> None:
        store = make_store(16)
        for prompt in (A[:4], B[:4], run_of(3000, 4), B[:4]):
            serve(store, prompt)
        expected = [node.serial for node in tree_of(store).next_evicted(3)]
        assert expected == [node.serial for node in tree_of(store).next_evicted(9)]
        gone = []
        nodes = list(tree_of(store).nodes())
        while tree_of(store).evict() is not None:
            gone += [node.serial for node in nodes if not node.blocks and node.serial not in gone]
        assert gone == expected

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
