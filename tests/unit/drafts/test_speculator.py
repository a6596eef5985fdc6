"""Where the drafts of real sequences come from, and what is forgotten."""

import pytest

from engine.drafts.proposer import (
    NO_SPECULATION,
    NO_SPECULATOR,
    LiveSpeculator,
    Speculation,
    Speculator,
)
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
def speculator() -> LiveSpeculator:
    pool = BlockPool(8)
    return LiveSpeculator(KVStore(pool, RadixTree(pool, 4), 4))


def begin(
    speculator: Speculator, namespace: Namespace = PLAIN, speculate: bool = True, most: int = 40
) -> Speculation:
    request = Request("r", (1, 2, 3), most, speculate=speculate)
    return speculator.begin(request, namespace, Tokens(request.prompt), tuple)


def follow(speculation: Speculation) -> DraftSource | None:
    """What drafts behind the beginning of the answer."""
    for token_id in ANSWER[:4]:
        speculation.accept(token_id)
    draft = speculation.draft(4)
    assert draft is None or draft.tokens == ANSWER[4:8]
    return None if draft is None else draft.source


def test_another_answer_of_the_namespace_is_a_source(speculator: LiveSpeculator) -> None:
    assert follow(begin(speculator)) is None
    speculator.ended(PLAIN, Tokens([1, 2, *ANSWER]), 2)
    assert follow(begin(speculator)) is DraftSource.ANSWERS
    assert follow(begin(speculator, SALTED)) is None


@pytest.mark.parametrize("namespace", [PLAIN, None])
def test_a_clear_forgets_it(speculator: LiveSpeculator, namespace: Namespace | None) -> None:
    speculator.ended(PLAIN, Tokens(ANSWER), 0)
    speculator.clear(SALTED)
    assert follow(begin(speculator)) is DraftSource.ANSWERS
    speculator.clear(namespace)
    assert follow(begin(speculator)) is None


def test_who_wants_none_gets_none(speculator: LiveSpeculator) -> None:
    assert begin(speculator, speculate=False) is NO_SPECULATION
    assert begin(speculator, most=1) is NO_SPECULATION, "there is nothing to draft"
    assert begin(NO_SPECULATOR) is NO_SPECULATION
