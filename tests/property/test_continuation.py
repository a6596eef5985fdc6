"""Cached continuations of a run of tokens, compared with all paths of the tree."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvstore.pool import BlockPool
from kvstore.store import KVStore
from kvstore.tokens import Tokens, unpacked
from kvstore.tree import RadixTree
from kvstore.types import Namespace
from tests.unit.kv_helpers import NS, make_store, run_of, serve, tree_of, walk

A, B, C = run_of(1000, 16), run_of(2000, 16), run_of(3000, 16)
SALTED = Namespace(model="m", cache_salt="tenant")

few = st.lists(st.integers(0, 1), max_size=12)
served = st.lists(st.tuples(st.sampled_from([NS, SALTED]), few.filter(bool)), max_size=12)


def follows(
    store: KVStore, tokens: Sequence[int], most: int = 99, namespace: Namespace = NS
) -> list[int]:
    return list(store.continuation(namespace, Tokens(tokens), most))


def paths(store: KVStore, namespace: Namespace) -> list[list[int]]:
    return [unpacked(path) for name, path, _ in walk(tree_of(store)) if name == namespace]


def begins(path: list[int], tokens: list[int]) -> bool:
    return path[: len(tokens)] == tokens


@given(served, st.integers(1, 4), st.sampled_from([NS, SALTED]), few, st.integers(0, 14))
def test_it_is_a_way_down_the_tree_of_the_namespace(
    requests: list[tuple[Namespace, list[int]]],
    block_size: int,
    namespace: Namespace,
    tokens: list[int],
    most: int,
) -> None:
    store = make_store(64, block_size)
    for name, prompt in requests:
        serve(store, prompt, namespace=name)
    ways = [path for path in paths(store, namespace) if begins(path, tokens)]
    found = follows(store, tokens, most, namespace)
    assert len(found) <= most
    assert bool(found) == (most > 0 and any(len(path) > len(tokens) for path in ways))
    assert not found or any(begins(path, tokens + found) for path in ways)
    if found and len(found) < most:
        leaves = [node for node in tree_of(store).nodes() if not node.children]
        assert any(
            unpacked(path) == tokens + found
            for name, path, node in walk(tree_of(store))
            if name == namespace and node in leaves
        ), "it ends with a leaf"


def test_the_rest_of_an_edge_and_of_those_below() -> None:
    store = make_store(16)
    serve(store, A[:10])
    serve(store, A[:8] + B[:3])
    assert follows(store, A[:3], 2) == A[3:5]
    assert follows(store, A[:3]) == A[3:8] + B[:3]
    assert follows(store, A[:8] + B[:1]) == B[1:3], "a tail"
    assert follows(store, A[:9]) == A[9:10]
    assert follows(store, A[:10]) == []
    assert follows(store, A[:3] + B) == []
    assert follows(store, A[:3], namespace=SALTED) == []


def test_the_way_that_was_used_last() -> None:
    store = make_store(32)
    for prompt in (A[:8] + B[:6], A[:8] + C[:6], A[:8] + B[:6]):
        serve(store, prompt)
    assert follows(store, A[:8]) == B[:6]
    serve(store, A[:8] + C[:6])
    assert follows(store, A[:8]) == C[:6]


def test_the_way_that_was_used_last_where_tokens_part_within_a_block() -> None:
    store = make_store(32)
    for prompt in (A[:6] + B[:6], A[:6] + C[:6], A[:6] + B[:6]):
        serve(store, prompt)
    assert follows(store, A[:5]) == A[5:6] + B[:6]
    serve(store, A[:6] + C[:6])
    assert follows(store, A[:5]) == A[5:6] + C[:6]


def test_looking_refreshes_nothing() -> None:
    store = make_store(16)
    serve(store, A[:8])
    serve(store, B[:8])
    assert follows(store, A[:4]) == A[4:8]
    before = [(node.serial, node.last_used) for node in tree_of(store).nodes()]
    assert [follows(store, A[:n]) for n in range(1, 8)] == [A[n:8] for n in range(1, 8)]
    assert [(node.serial, node.last_used) for node in tree_of(store).nodes()] == before
    tree_of(store).evict()
    assert follows(store, B) == []
    assert (follows(store, A[:1]), follows(store, B[:1])) == (A[1:4], B[1:8])


def test_nothing_is_found_where_nothing_is_indexed() -> None:
    pool = BlockPool(4)
    store = KVStore(pool, None, 4)
    assert follows(store, A[:4]) == []
    assert follows(KVStore(pool, RadixTree(pool, 4), 4), A[:4]) == []
