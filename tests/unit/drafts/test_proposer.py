"""Expected drafts are compared with generated tokens, so their chances are known."""

from collections.abc import Sequence

import pytest

from engine.drafts.proposer import AcceptanceRates, Proposer, first_rates
from engine.values.stats import DraftSource
from tests.unit.scripted_drafter import ScriptedDrafter

TRUTH = list(range(100, 200))


def proposer(script: list[int], common: AcceptanceRates | None = None) -> Proposer:
    return Proposer(ScriptedDrafter(script), common or first_rates())


def chances(subject: Proposer, n_unknown: int, most: int) -> Sequence[float]:
    """The chances of its draft, which is made if an attempt is due."""
    if subject.is_due:
        subject.attempt()
    return subject.chances(n_unknown, most)


def follow(subject: Proposer, n_tokens: int) -> None:
    """Generate tokens and ask for chances. Nothing is verified."""
    for token_id in TRUTH[:n_tokens]:
        chances(subject, 0, 8)
        subject.accept(token_id)


def test_chances_fall_along_a_draft_and_none_is_above_one() -> None:
    falling = list(chances(proposer(TRUTH), 0, 8))
    assert len(falling) == 8
    assert falling == sorted(falling, reverse=True)
    assert 0 < falling[-1] < falling[0] <= 1


def test_who_is_right_is_trusted() -> None:
    subject = proposer(TRUTH)
    before = chances(subject, 0, 8)[-1]
    follow(subject, 40)
    assert chances(subject, 0, 8)[-1] > max(before, 0.8)


def test_who_is_wrong_is_not_although_nothing_was_verified() -> None:
    subject = proposer([0] * 100)
    follow(subject, 40)
    assert chances(subject, 0, 8)[0] < 0.1


def test_another_sequence_learns_of_it() -> None:
    common = first_rates()
    follow(proposer([0] * 100, common), 40)
    [unknown] = chances(proposer(TRUTH), 0, 1)
    assert chances(proposer(TRUTH, common), 0, 1)[0] < unknown
    tree, prediction = common[DraftSource.TREE], common[DraftSource.PREDICTION]
    assert max(rate.share for rate in tree[3:5]) < 0.5 < min(rate.share for rate in prediction)


def test_its_own_tokens_count_for_more() -> None:
    common = first_rates()
    follow(proposer([0] * 100, common), 40)
    subject = proposer(TRUTH, common)
    follow(subject, 16)
    assert chances(subject, 0, 1)[0] > 0.7


def test_tokens_that_are_not_known_yet_come_first() -> None:
    subject = proposer(TRUTH)
    known = chances(subject, 0, 8)
    assert chances(subject, 2, 6) == known[2:]
    assert subject.draft(3) == ScriptedDrafter(TRUTH)([], 3)


def test_a_draft_is_made_from_what_is_known() -> None:
    subject = proposer(TRUTH)
    follow(subject, 5)
    assert subject.is_outdated
    subject.attempt()
    draft = subject.draft(3)
    assert draft is not None
    assert (draft.tokens, draft.matched) == (tuple(TRUTH[5:8]), 5)


@pytest.mark.parametrize("n_tokens", [0, 3])
def test_nothing_is_expected_after_the_end(n_tokens: int) -> None:
    subject = proposer(TRUTH[:3])
    follow(subject, n_tokens)
    assert len(chances(subject, 0, 8)) == 3 - n_tokens


class Silent:
    """Never has a draft. It counts the attempts."""

    n_attempts = 0

    def __call__(self, output: Sequence[int], most: int) -> None:
        self.n_attempts += 1


@pytest.mark.parametrize(("max_backoff", "n_attempts"), [(0, 40), (4, 12)])
def test_attempts_in_vain_back_off(max_backoff: int, n_attempts: int) -> None:
    silent = Silent()
    subject = Proposer(silent, first_rates(), max_backoff)
    n_due = 0
    for _ in range(40):
        n_due += not subject.backoff_tokens
        assert not chances(subject, 0, 8)
        subject.accept(7)
    assert silent.n_attempts == n_due == n_attempts


def test_a_draft_is_expected_until_its_end_and_then_an_attempt_is_due() -> None:
    subject = proposer(TRUTH[:5])
    for token_id in TRUTH[:5]:
        assert not subject.backoff_tokens
        assert chances(subject, 0, 8)
        subject.accept(token_id)
    assert not subject.backoff_tokens
    assert not chances(subject, 0, 8)
    assert subject.backoff_tokens


def test_chances_are_those_of_what_is_known_now() -> None:
    """Earlier requests for chances change nothing."""
    often, once = proposer(TRUTH), proposer(TRUTH)
    chances(once, 0, 8)
    for token_id in TRUTH[:6]:
        assert chances(often, 0, 8) == chances(often, 0, 8)
        chances(often, 2, 4)
        for each in (often, once):
            each.accept(token_id)
    assert chances(often, 0, 8) == chances(once, 0, 8)
