"""What is expected of a sequence is compared with what comes: so it is known how likely it is."""

import pytest

from engine.drafts.proposer import NO_SPECULATION, AcceptanceRates, LiveSpeculation, SequenceRates
from engine.values.stats import DraftSource
from tests.unit.scripted_drafter import ScriptedDrafter

TRUTH = list(range(100, 200))


def speculation(script: list[int], common: AcceptanceRates | None = None) -> LiveSpeculation:
    return LiveSpeculation(ScriptedDrafter(script), SequenceRates(common or AcceptanceRates()))


def follow(subject: LiveSpeculation, n_tokens: int) -> None:
    """Nothing is verified: it is only asked what it expects."""
    for token_id in TRUTH[:n_tokens]:
        subject.chances(0, 8)
        subject.accept(token_id)


def test_chances_fall_along_a_draft_and_none_is_above_one() -> None:
    chances = list(speculation(TRUTH).chances(0, 8))
    assert len(chances) == 8
    assert chances == sorted(chances, reverse=True)
    assert 0 < chances[-1] < chances[0] <= 1


def test_who_is_right_is_trusted() -> None:
    subject = speculation(TRUTH)
    before = subject.chances(0, 8)[-1]
    follow(subject, 40)
    assert subject.chances(0, 8)[-1] > max(before, 0.8)


def test_who_is_wrong_is_not_although_nothing_was_verified() -> None:
    subject = speculation([0] * 100)
    follow(subject, 40)
    assert subject.chances(0, 8)[0] < 0.1


def test_another_sequence_learns_of_it() -> None:
    common = AcceptanceRates()
    follow(speculation([0] * 100, common), 40)
    [unknown] = speculation(TRUTH).chances(0, 1)
    assert speculation(TRUTH, common).chances(0, 1)[0] < unknown
    tree, prediction = (common.shares(each) for each in (DraftSource.TREE, DraftSource.PREDICTION))
    assert max(tree[3:5]) < 0.5 < min(prediction)


def test_its_own_tokens_count_for_more() -> None:
    common = AcceptanceRates()
    follow(speculation([0] * 100, common), 40)
    subject = speculation(TRUTH, common)
    follow(subject, 16)
    assert subject.chances(0, 1)[0] > 0.7


def test_tokens_that_are_not_known_yet_come_first() -> None:
    subject = speculation(TRUTH)
    known = subject.chances(0, 8)
    assert subject.chances(2, 6) == known[2:]
    assert subject.draft(3) == ScriptedDrafter(TRUTH).draft(3)


def test_a_draft_is_made_from_what_is_known() -> None:
    subject = speculation(TRUTH)
    follow(subject, 5)
    draft = subject.draft(3)
    assert draft is not None
    assert (draft.tokens, draft.matched) == (tuple(TRUTH[5:8]), 5)


@pytest.mark.parametrize("n_tokens", [0, 3])
def test_nothing_is_expected_behind_the_end(n_tokens: int) -> None:
    subject = speculation(TRUTH[:3])
    follow(subject, n_tokens)
    assert len(subject.chances(0, 8)) == 3 - n_tokens


class Silent:
    """Never has a draft, and counts how often it is asked."""

    n_asked = 0

    def accept(self, token_id: int) -> None: ...

    def draft(self, most: int) -> None:
        self.n_asked += 1


@pytest.mark.parametrize(("patience", "asked"), [(0, 40), (4, 12)])
def test_where_nothing_is_found_it_is_looked_for_less_often(patience: int, asked: int) -> None:
    silent = Silent()
    subject = LiveSpeculation(silent, SequenceRates(AcceptanceRates()), patience)
    for _ in range(40):
        assert not subject.chances(0, 8)
        subject.accept(7)
    assert silent.n_asked == asked


def test_without_speculation_nothing_is_expected() -> None:
    NO_SPECULATION.accept(1)
    assert not NO_SPECULATION.chances(0, 8)
    assert NO_SPECULATION.draft(8) is None
