"""Runs that begin alike, against comparing all of them."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvstore.in_flight import PrefixOrder
from kvstore.tokens import Tokens, common_tokens
from kvstore.types import Namespace

NAMESPACES = (Namespace(model="m"), Namespace(model="m", cache_salt="tenant"))


@dataclass(eq=False, frozen=True)
class Words:
    namespace: Namespace
    packed: bytes


def packed(ids: list[int]) -> bytes:
    return Tokens(ids).packed(0, len(ids))


few_tokens = st.lists(st.integers(0, 2), max_size=8).map(packed)
words = st.builds(Words, st.sampled_from(NAMESPACES), few_tokens)


@given(st.data(), st.lists(words, max_size=20))
def test_those_and_only_those_that_share_enough_are_found(
    data: st.DataObject, runs: list[Words]
) -> None:
    order = PrefixOrder[Words]()
    for run in runs:
        order.add(run)
    for run in data.draw(st.permutations(runs))[: data.draw(st.integers(0, len(runs)))]:
        order.remove(run)
        runs.remove(run)
        assert list(order.problems()) == []
    assert len(order) == len(runs)
    like, least_tokens = data.draw(words), data.draw(st.integers(1, 3))
    found = list(order.beginning_like(like.namespace, like.packed, least_tokens))
    common = {
        run: common_tokens(run.packed, like.packed)
        for run in runs
        if run.namespace == like.namespace
    }
    assert dict(found) == {run: tokens for run, tokens in common.items() if tokens >= least_tokens}
    assert len(found) == len(dict(found))
