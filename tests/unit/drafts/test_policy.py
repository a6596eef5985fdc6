"""Which drafts are verified: what they give in a step, and probes of those that would not pay."""

import pytest

from engine.core.drafting import DraftPolicy
from engine.drafts.allotment import DraftableRow, Probes, StepPrice, allot
from engine.drafts.proposer import Proposer
from engine.drafts.suffix_index import index_texts
from engine.values.request import Request
from engine.values.stats import DraftSource
from engine.values.tokens import pack
from kvstore.pool import BlockPool
from kvstore.store import KVStore
from kvstore.tokens import Tokens
from kvstore.tree import RadixTree
from kvstore.types import Namespace


def row(chances: list[float], seconds: float = 0.0, token_seconds: float = 0.1) -> DraftableRow:
    return DraftableRow(chances, seconds, token_seconds)


def price(**changes: float) -> StepPrice:
    """One row, a second a step."""
    usual = {"n_tokens": 1, "seconds": 1.0, "verify_seconds": 0.0, "most_seconds": 10.0}
    return StepPrice(**{**usual, "most_tokens": 100, **changes})  # type: ignore[arg-type]


def test_what_is_likely_and_cheap_is_verified() -> None:
    assert allot([row([0.9, 0.8, 0.7])], price()) == [3]


def test_what_gives_less_a_second_than_the_step_is_not() -> None:
    assert allot([row([0.9, 0.5, 0.05, 0.01])], price()) == [2]


def test_a_better_step_requires_more_of_each_token() -> None:
    """With the first two the step gives 2.4 tokens a second, and the third 2 for what it takes."""
    assert allot([row([1.0, 0.9, 0.2])], price()) == [2]


def test_nothing_is_verified_where_it_pays_too_little() -> None:
    assert allot([row([0.5])], price(verify_seconds=0.5)) == [0]
    assert allot([row([0.12])], price()) == [0], "less than three hundredths more"


def test_what_a_row_takes_once_is_weighed() -> None:
    assert allot([row([0.9], seconds=0.9), row([0.9])], price(n_tokens=2)) == [0, 1]


def test_more_rows_ask_more_of_each_token() -> None:
    assert allot([row([0.5])], price()) == [1]
    assert allot([row([0.5])] + [row([])] * 7, price(n_tokens=8)) == [0] * 8


def test_they_take_what_is_left_the_likeliest_first() -> None:
    rows = [row([0.9, 0.6]), row([0.8, 0.7])]
    assert allot(rows, price(n_tokens=2, most_tokens=3)) == [1, 2]
    assert allot(rows, price(n_tokens=2, most_seconds=0.25)) == [1, 1]
    assert allot(rows, price(n_tokens=2, most_tokens=0)) == [0, 0]


@pytest.mark.parametrize("rows", [[], [row([])]])
def test_without_drafts_there_is_nothing_to_verify(rows: list[DraftableRow]) -> None:
    assert allot(rows, price()) == [0] * len(rows)


def taken(probes: Probes, rows: list[DraftableRow], most_tokens: int = 100) -> list[int]:
    """What is verified of the next step."""
    probes.count_step()
    return probes.take(rows, most_tokens)


def probed_at(probes: Probes, n_steps: int, rows: list[DraftableRow]) -> list[int]:
    return [step for step in range(1, n_steps + 1) if any(taken(probes, rows))]


def test_probes_grow_rarer() -> None:
    steps = probed_at(Probes(), 3000, [row([0.9, 0.8])])
    gaps = [after - before for before, after in zip([0, *steps], steps, strict=False)]
    assert gaps == [4, 8, 16, 32, 64, 128, 256, 512, 512, 512, 512]


def test_they_are_as_frequent_as_before_when_drafts_have_paid() -> None:
    probes = Probes()
    probed_at(probes, 100, [row([1.0])])
    probes.paid()
    assert probed_at(probes, 5, [row([1.0])]) == [4]


def test_the_likeliest_draft_is_tried_and_no_more_than_fits() -> None:
    rows = [row([0.9, 0.2]), row([0.9] * 32), row([0.9, 0.8])]
    probes = Probes()
    tried = [counts for _ in range(12) if any(counts := taken(probes, rows))]
    assert tried == [[0, 8, 0], [0, 8, 0]]
    probes.paid()
    assert [taken(probes, rows, most_tokens=3) for _ in range(4)][-1] == [0, 3, 0]


def test_what_would_hardly_give_a_token_is_not_tried() -> None:
    probes = Probes()
    assert probed_at(probes, 1000, [row([0.6, 0.3]), row([])]) == []
    assert probed_at(probes, 1, [row([0.9, 0.8])]) == [1], "it waits for one that would"


def test_who_waits_for_a_probe_gets_it() -> None:
    """A step is collected early for it, before its rows are known."""
    probes, rows = Probes(), [row([0.9, 0.8])]
    for _ in range(4):
        assert not probes.is_due(rows)
        probes.count_step()
    assert probes.is_due(rows)
    assert probes.is_due(rows), "to ask changes nothing"
    assert probes.take(rows, 100) == [2]
    assert not probes.is_due(rows)


PLAIN, SALTED = Namespace(), Namespace(cache_salt="salt")
ANSWER = tuple(range(50, 90))


@pytest.fixture
def policy() -> DraftPolicy:
    pool = BlockPool(8)
    return DraftPolicy(KVStore(pool, RadixTree(pool, 4), 4))


def begin(
    policy: DraftPolicy, namespace: Namespace = PLAIN, speculate: bool = True, most: int = 40
) -> Proposer | None:
    request = Request("r", pack((1, 2, 3)), most, speculate=speculate)
    texts = index_texts(request, Tokens(text=request.prompt.packed))
    return None if texts is None else policy.begin(texts, namespace, Tokens(request.prompt), None)


def follow(proposer: Proposer | None) -> DraftSource | None:
    """The source that continues the beginning of the answer."""
    assert proposer is not None
    for token_id in ANSWER[:4]:
        proposer.accept(token_id)
    proposer.attempt()
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
