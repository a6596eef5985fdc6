"""Which queued prompts wait for which leases, and for how long."""

from unittest.mock import Mock

import pytest

from kvstore import invariants
from kvstore.in_flight import QueuedPrompt
from kvstore.lease import Lease
from kvstore.pool import BlockPool
from kvstore.recurrent import RecurrentGroup, RoundedGroup
from kvstore.store import KVStore
from kvstore.tokens import Tokens
from kvstore.tree import RadixTree
from kvstore.types import Namespace
from tests.unit.kv_helpers import (
    BLOCK,
    NS,
    admit,
    compute,
    make_store,
    plan,
    run_of,
    serve,
    tree_of,
    waits,
)

A, B = run_of(1000, 40), run_of(2000, 40)


def expect(tokens: list[int], namespace: Namespace = NS) -> QueuedPrompt:
    return QueuedPrompt(namespace, Tokens(tokens))


def must_wait(store: KVStore, tokens: list[int], namespace: Namespace = NS) -> bool:
    """Whether a prompt that arrives now must wait."""
    return waits(store, expect(tokens, namespace))


def write(store: KVStore, lease: Lease, n_tokens: int) -> None:
    """Compute the next `n_tokens` tokens."""
    plan(store, lease, n_tokens)
    store.commit(lease, n_tokens)
    invariants.check(store)


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_prompt_waits_until_what_it_shares_is_published(comes_first: bool) -> None:
    store = make_store(40)
    prompt = A[:22] + B[:8]
    pending = expect(prompt) if comes_first else None
    leader = admit(store, A)
    pending = pending or expect(prompt)
    waited = []
    for _ in range(6):
        waited.append(waits(store, pending))
        write(store, leader, BLOCK)
    assert waited == [True] * 5 + [False], "five whole blocks are shared"


def test_a_wait_asks_the_index_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(60)
    leader, unlike = admit(store, A), admit(store, B)
    match = Mock(wraps=tree_of(store).match)
    monkeypatch.setattr(tree_of(store), "match", match)
    pending = expect(A)
    for lease in (leader, unlike):
        for _ in range(9):
            assert waits(store, pending) is (lease is leader)
            plan(store, lease, BLOCK)
            store.commit(lease, BLOCK)
    assert match.call_count == 1


def test_who_computes_saves_a_state_where_somebody_waits() -> None:
    pool = BlockPool(40)
    group = RecurrentGroup(4, 8, BLOCK, 1000)
    store = KVStore(pool, RadixTree(pool, BLOCK), BLOCK, [group])
    leader, pending = admit(store, A), expect(A[:22] + B[:8])
    assert waits(store, pending)
    assert leader.max_step_tokens(40) == 20
    write(store, leader, 20)
    assert not waits(store, pending)
    assert store.probe(NS, pending.tokens) == 20


def test_a_prompt_waits_only_for_where_a_rounded_state_is_saved() -> None:
    pool = BlockPool(40)
    group = RoundedGroup(4, 8, BLOCK, interval_tokens=16)
    store = KVStore(pool, RadixTree(pool, BLOCK), BLOCK, [group])
    leader = admit(store, A)
    assert not must_wait(store, A[:12] + B[:8]), "it could not resume there"
    pending = expect(A[:22] + B[:8])
    assert waits(store, pending)
    write(store, leader, 16)
    assert not waits(store, pending)
    assert not must_wait(store, A[:22] + B[:8])
    assert store.probe(NS, pending.tokens) == 16


def test_asking_why_it_waits_changes_nothing() -> None:
    store = make_store(40)
    assert store.in_flight is not None
    pending, leader = expect(A), admit(store, A)
    assert store.in_flight.awaited(pending) is None  # it has not been compared yet
    assert waits(store, pending)
    for _ in range(2):
        assert store.in_flight.awaited(pending) is leader
    compute(store, leader)
    assert store.in_flight.awaited(pending) is None
    assert pending.awaited is leader


def test_a_prompt_that_differs_in_the_next_block_is_not_matched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts with one system prompt compare a block with each other once it is cached."""
    store = make_store(60)
    serve(store, A[:16])
    admit(store, A[:16] + B)
    match = Mock(wraps=tree_of(store).match)
    monkeypatch.setattr(tree_of(store), "match", match)
    assert not must_wait(store, A[:30])
    assert match.call_count == 0


def test_without_an_index_nobody_waits() -> None:
    pool = BlockPool(40)
    store = KVStore(pool, None, BLOCK)
    admit(store, A)
    assert store.in_flight is None


def test_a_prompt_does_not_wait_for_blocks_that_are_published_already() -> None:
    store = make_store(40)
    serve(store, A)
    waiting = expect(A)
    again = store.admit(NS, Tokens(A), adopts=False)
    assert isinstance(again, Lease)
    assert again.written_tokens == 0
    assert not waits(store, waiting)
    assert not must_wait(store, A)
