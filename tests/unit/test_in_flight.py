"""Who waits for whom, and for how long."""

from unittest.mock import Mock

import pytest

from kvstore import invariants
from kvstore.in_flight import PendingPrompt
from kvstore.lease import Lease, Refusal
from kvstore.pool import BlockPool
from kvstore.recurrent import RecurrentGroup
from kvstore.store import KVStore
from kvstore.tokens import Tokens
from kvstore.tree import PrefixIndex, RadixTree
from kvstore.types import Namespace
from tests.unit.kv_helpers import BLOCK, NS, admit, compute, extend, make_store, run_of, serve

A, B = run_of(1000, 40), run_of(2000, 40)


def expect(store: KVStore, tokens: list[int], namespace: Namespace = NS) -> PendingPrompt:
    return store.in_flight.add_pending(namespace, Tokens(tokens))


def must_wait(store: KVStore, tokens: list[int], namespace: Namespace = NS) -> bool:
    """Of a prompt that comes now."""
    pending = expect(store, tokens, namespace)
    store.in_flight.remove_pending(pending)
    return store.in_flight.must_wait(pending)


def write(store: KVStore, lease: Lease, n_tokens: int) -> None:
    """The next so many tokens are computed."""
    extend(store, lease, n_tokens)
    store.publish(lease, lease.written_tokens + n_tokens)
    invariants.check(store)


def cold(store: KVStore, tokens: list[int]) -> Lease:
    lease = store.admit_cold(NS, Tokens(tokens))
    assert not isinstance(lease, Refusal)
    return lease


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_prompt_waits_until_what_it_shares_is_published(comes_first: bool) -> None:
    store = make_store(40)
    prompt = A[:22] + B[:8]
    pending = expect(store, prompt) if comes_first else None
    leader = admit(store, A)
    pending = pending or expect(store, prompt)
    waits = []
    for _ in range(6):
        waits.append(store.in_flight.must_wait(pending))
        write(store, leader, BLOCK)
    assert waits == [True] * 5 + [False], "five whole blocks are shared"


def test_what_is_indexed_already_is_not_waited_for() -> None:
    store = make_store(40)
    serve(store, A)
    waiting = expect(store, A)
    scored = cold(store, A)
    assert scored.written_tokens == 0
    assert not store.in_flight.must_wait(waiting)
    assert not must_wait(store, A)


def test_who_is_further_behind_than_it_would_be_ahead_is_not_waited_for() -> None:
    store = make_store(60)
    serve(store, A[:24])
    scored = cold(store, A)
    assert not must_wait(store, A + B), "16 tokens to share, 24 to wait for"
    write(store, scored, 12)
    assert must_wait(store, A + B), "12 to wait for"


def test_a_last_token_is_never_waited_for() -> None:
    store = make_store(40)
    admit(store, A[:8])
    assert must_wait(store, A[:5])
    assert not must_wait(store, A[:4])


def test_another_namespace_is_not_waited_for() -> None:
    store = make_store(40)
    admit(store, A)
    assert not must_wait(store, A, Namespace(model="m", cache_salt="other"))


def test_a_wait_ends_with_who_was_waited_for() -> None:
    store = make_store(40)
    pending = expect(store, A)
    leader = admit(store, A)
    assert store.in_flight.must_wait(pending)
    store.release(leader)
    assert not store.in_flight.must_wait(pending)


def test_after_one_wait_another_begins_where_somebody_goes_on() -> None:
    store = make_store(60)
    first = admit(store, A[:20])
    pending = expect(store, A)
    compute(store, first)
    second = admit(store, A[:32])
    assert second.cached_tokens == 20
    assert store.in_flight.must_wait(pending)
    compute(store, second)
    assert not store.in_flight.must_wait(pending)


def test_a_wait_asks_the_index_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(60)
    leader, unlike = admit(store, A), admit(store, B)
    match = Mock(wraps=store.index.match)
    monkeypatch.setattr(store.index, "match", match)
    pending = expect(store, A)
    for lease in (leader, unlike):
        for _ in range(9):
            assert store.in_flight.must_wait(pending) is (lease is leader)
            extend(store, lease, BLOCK)
            store.publish(lease, lease.written_tokens + BLOCK)
    assert match.call_count == 1


@pytest.mark.parametrize("comes_first", [True, False])
def test_who_computes_saves_a_state_where_somebody_waits(comes_first: bool) -> None:
    pool = BlockPool(40)
    group = RecurrentGroup(4, 8, BLOCK, 1000)
    store = KVStore(pool, RadixTree(pool, BLOCK), BLOCK, [group])
    prompt = A[:22] + B[:8]
    pending = expect(store, prompt) if comes_first else None
    leader = admit(store, A)
    pending = pending or expect(store, prompt)
    assert store.max_step_tokens(leader, 40) == 20
    write(store, leader, 20)
    assert not store.in_flight.must_wait(pending)
    assert store.probe(NS, pending.tokens) == 20


def test_its_own_prompt_saves_no_state_on_the_way() -> None:
    """What is admitted was pending up to then."""
    pool = BlockPool(40)
    store = KVStore(pool, RadixTree(pool, BLOCK), BLOCK, [RecurrentGroup(4, 8, BLOCK, 1000)])
    tokens = Tokens(A[:38])
    store.in_flight.add_pending(NS, tokens)
    lease = store.admit(NS, tokens)
    assert isinstance(lease, Lease)
    assert store.max_step_tokens(lease, 38) == 37


def test_without_an_index_nobody_waits() -> None:
    pool = BlockPool(40)
    store = KVStore(pool, PrefixIndex(), BLOCK)
    admit(store, A)
    assert not must_wait(store, A)
