"""A tree that is told in pieces while it changes, and what may wait to be taken."""

from kvstore.replica import MOST_ADOPTIONS, Afresh, Stored, TreeJournal, TreeReplica
from kvstore.store import KVStore
from kvstore.types import Namespace
from tests.unit.kv_helpers import NS, make_store, run_of, serve

A = run_of(1000, 400)


def grown(store: KVStore, n_branches: int) -> KVStore:
    """A path with a branch at each block."""
    for i in range(1, n_branches + 1):
        serve(store, [*A[: 4 * i], *run_of(5000 + 10 * i, 4)])
    return store


def follow(journal: TreeJournal, replica: TreeReplica) -> int:
    """Until the replica has all. Returns how often it took something."""
    for times in range(1, 1000):
        changes, is_whole = journal.take()
        replica.apply(changes)
        if is_whole:
            return times
    raise AssertionError("the tree is never told")


def rows(replica: TreeReplica) -> list[tuple[int, int, int]]:
    return sorted((node.serial, node.start, node.tokens) for node in replica.nodes.values())


def test_a_tree_is_told_bit_by_bit() -> None:
    """The engine's thread never copies more than a few nodes at a time."""
    store = grown(make_store(200), 20)
    journal, replica = TreeJournal(store.index, copied_nodes=3), TreeReplica()
    taken, _ = journal.take()
    assert [type(change) for change in taken] == [Afresh, Stored, Stored, Stored]
    replica.apply(taken)
    times = follow(journal, replica)
    assert times == store.index.n_nodes // 3
    assert len(replica.nodes) == store.index.n_nodes


def test_it_may_change_while_it_is_told() -> None:
    store = grown(make_store(300), 20)
    journal, replica = TreeJournal(store.index, copied_nodes=1), TreeReplica()
    replica.apply(journal.take()[0])
    serve(store, [*A[:8], *run_of(9000, 8)])
    store.index.evict()
    serve(store, A[:60], namespace=Namespace("m", cache_salt="other"))
    for _ in range(3):
        replica.apply(journal.take()[0])
        serve(store, [*A[:12], *run_of(9500, 12)])
        store.index.evict()
    follow(journal, replica)
    whole = TreeReplica()
    follow(TreeJournal(store.index), whole)
    assert rows(replica) == rows(whole)


def test_what_is_not_taken_is_bounded_and_told_again() -> None:
    store = make_store(300)
    journal, replica = TreeJournal(store.index, most_changes=10), TreeReplica()
    follow(journal, replica)
    grown(store, 20)
    changes, is_whole = journal.take()
    assert is_whole
    assert isinstance(changes[0], Afresh)
    replica.apply(changes)
    assert len(replica.nodes) == store.index.n_nodes


def test_a_closed_journal_notes_nothing() -> None:
    store = make_store(100)
    journal, replica = TreeJournal(store.index), TreeReplica()
    follow(journal, replica)
    journal.close()
    grown(store, 3)
    changes, _ = journal.take()  # who takes again is told all, and nothing twice
    assert len(changes) == 1 + store.index.n_nodes
    replica.apply(changes)
    assert len(replica.nodes) == store.index.n_nodes


def test_a_subtree_weighs_what_is_in_it() -> None:
    store = grown(make_store(200), 5)
    replica = TreeReplica()
    follow(TreeJournal(store.index), replica)
    (top,) = replica.roots[NS].children.values()
    assert top.weight.nodes == store.index.n_nodes
    assert top.weight.blocks == store.pool.n_evictable
    assert top.weight.tokens == 4 * store.pool.n_evictable
    store.clear()


def test_what_is_below_keeps_what_is_above_young() -> None:
    store = grown(make_store(200), 3)
    journal, replica = TreeJournal(store.index), TreeReplica()
    follow(journal, replica)
    leaf = next(node for node in replica.nodes.values() if not node.children)
    replica.use(leaf.serial, 1e6)
    assert {node.last_used for node in leaf.path()} == {1e6}
    others = set(replica.nodes.values()) - set(leaf.path())
    assert all(node.last_used < 1e6 for node in others)


def test_an_adoption_goes_with_the_tokens_that_were_found() -> None:
    store = make_store(200)
    serve(store, A[:40])
    journal, replica = TreeJournal(store.index), TreeReplica()
    follow(journal, replica)
    serve(store, [*A[:22], *run_of(5000, 18)])  # ends in a block, which stands behind the split
    follow(journal, replica)
    (adoption,) = replica.adoptions
    found = replica.nodes[adoption.node]
    assert adoption.n_tokens == 22
    assert (found.start, found.tokens) == (20, 4)
    assert found.parent is not None
    assert found.parent.tokens == 20


def test_the_last_adoptions_are_kept() -> None:
    store = make_store(200)
    serve(store, A[:40])
    journal, replica = TreeJournal(store.index), TreeReplica()
    follow(journal, replica)
    for n_tokens in range(2, 40):
        serve(store, A[: n_tokens + 1])
    follow(journal, replica)
    assert len(replica.adoptions) == MOST_ADOPTIONS
    assert replica.adoptions[-1].n_tokens == 39
