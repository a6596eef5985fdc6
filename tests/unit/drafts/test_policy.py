"""Where the drafts of sequences come from, and what is forgotten."""

import pytest

from engine.drafts.policy import DraftPolicy
from engine.drafts.proposer import Proposer
from engine.values.request import Request
from engine.values.stats import DraftSource
from kvstore.pool import BlockPool
from kvstore.store import KVStore
from kvstore.tokens import Tokens
from kvstore.tree import RadixTree
from kvstore.types import Namespace

PLAIN, SALTED = Namespace(), Namespace(cache_salt="salt")
ANSWER = tuple(range(50, 90))


@pytest.fixture
def policy() -> DraftPolicy:
    pool = BlockPool(8)
    return DraftPolicy(KVStore(pool, RadixTree(pool, 4), 4))


def begin(
    policy: DraftPolicy, namespace: Namespace = PLAIN, speculate: bool = True, most: int = 40
) -> Proposer | None:
    request = Request("r", (1, 2, 3), most, speculate=speculate)
    return policy.begin(request, namespace, Tokens(request.prompt), None)


def follow(proposer: Proposer | None) -> DraftSource | None:
    """The source that continues the beginning of the answer."""
    assert proposer is not None
    for token_id in ANSWER[:4]:
        proposer.accept(token_id)
    draft = proposer.draft(4)
    assert draft is None or draft.tokens == ANSWER[4:8]
    return None if draft is None else draft.source


def test_another_answer_of_the_namespace_is_a_source(policy: DraftPolicy) -> None:
    assert follow(begin(policy)) is None
    policy.ended(PLAIN, Tokens([1, 2, *ANSWER]), 2)
    assert follow(begin(policy)) is DraftSource.ANSWERS
    assert follow(begin(policy, SALTED)) is None


@pytest.mark.parametrize("namespace", [PLAIN, None])
def test_a_clear_forgets_it(policy: DraftPolicy, namespace: Namespace | None) -> None:
    policy.ended(PLAIN, Tokens(ANSWER), 0)
    policy.clear(SALTED)
    assert follow(begin(policy)) is DraftSource.ANSWERS
    policy.clear(namespace)
    assert follow(begin(policy)) is None


def test_a_sequence_that_is_not_to_be_drafted_has_no_proposer(policy: DraftPolicy) -> None:
    assert begin(policy, speculate=False) is None
    assert begin(policy, most=1) is None, "there is nothing to draft"
