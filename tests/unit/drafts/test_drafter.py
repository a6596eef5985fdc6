"""Which source makes a draft, and how each source follows the generated tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from engine.drafts.sources import LOOKUP_TOKENS, Draft, Drafter
from engine.drafts.suffix_index import EXTRA_TOKENS, Match, SortedText, SuffixIndex
from engine.values.stats import DraftSource

PROMPT = tuple(range(100, 140))


@dataclass
class Cached:
    """A prefix cache with runs of tokens for its look-ups. It counts the look-ups."""

    runs: list[tuple[int, ...]] = field(default_factory=list)
    n_lookups: int = 0

    def __call__(self, most: int) -> tuple[int, ...]:
        self.n_lookups += 1
        return self.runs.pop(0)[:most] if self.runs else ()


@dataclass
class Remembered:
    """Other answers, as one text."""

    text: SuffixIndex = field(default_factory=SuffixIndex)

    def __call__(self, last: Sequence[int], most: int) -> Match:
        return self.text.propose(last, most)


def drafter(
    prompt: Sequence[int] = PROMPT,
    prediction: tuple[int, ...] = (),
    known: Cached | None = None,
    answers: Iterable[int] = (),
    forced: tuple[int, ...] | None = None,
) -> "Generating":
    remembered = Remembered(SuffixIndex(answers))
    choice = None if forced is None else lambda tokens=forced: tokens
    return Generating(
        Drafter(SortedText(prompt), prediction, known or Cached(), remembered, choice)
    )


class Generating:
    """A drafter and the output that its sequence has generated so far."""

    def __init__(self, subject: Drafter) -> None:
        self._subject = subject
        self._output = list[int]()

    def accept(self, token_id: int) -> None:
        self._output.append(token_id)

    def draft(self, most: int) -> Draft | None:
        return self._subject.draft(self._output, most)


def accept(subject: Generating, tokens: Iterable[int]) -> None:
    for token_id in tokens:
        subject.accept(token_id)


def test_nothing_is_known() -> None:
    subject = drafter()
    assert subject.draft(4) is None
    accept(subject, (1, 2, 3))
    assert subject.draft(4) is None


def test_a_draft_of_no_tokens_is_none() -> None:
    assert drafter(prediction=(1, 2, 3)).draft(0) is None


class TestPrediction:
    def test_it_is_followed_from_its_start(self) -> None:
        subject = drafter(prediction=(1, 2, 3, 4, 5))
        assert subject.draft(2) == Draft((1, 2), 0, DraftSource.PREDICTION)
        accept(subject, (1, 2))
        assert subject.draft(9) == Draft((3, 4, 5), 2, DraftSource.PREDICTION)

    def test_it_comes_before_what_is_cached(self) -> None:
        subject = drafter(prediction=(1, 2), known=Cached([(3, 4)]))
        assert subject.draft(9) == Draft((1, 2), 0, DraftSource.PREDICTION)

    def test_after_a_divergence_other_sources_draft_until_it_continues(self) -> None:
        subject = drafter(prediction=(1, 2, 3, 4, 5), known=Cached([(7, 8, 9)]))
        subject.accept(6)
        assert subject.draft(9) == Draft((7, 8, 9), 0, DraftSource.TREE)
        accept(subject, (7, 2, 3, 4))
        assert subject.draft(9) == Draft((5,), 3, DraftSource.PREDICTION)


class TestTree:
    def test_what_is_cached_is_followed(self) -> None:
        known = Cached([(1, 2, 3, 4)])
        subject = drafter(known=known)
        assert subject.draft(2) == Draft((1, 2), 0, DraftSource.TREE)
        accept(subject, (1, 2))
        assert subject.draft(9) == Draft((3, 4), 2, DraftSource.TREE)
        assert known.n_lookups == 1

    def test_it_is_looked_up_again_after_some_tokens(self) -> None:
        known = Cached([(), (1, 2, 3)])
        subject = drafter(known=known)
        for token_id in range(50, 50 + LOOKUP_TOKENS):
            assert subject.draft(1) is None
            subject.accept(token_id)
        assert known.n_lookups == 1
        assert subject.draft(2) == Draft((1, 2), 0, DraftSource.TREE)

    def test_after_a_divergence_too(self) -> None:
        known = Cached([(1, 2, 3), (4,)])
        subject = drafter(known=known)
        assert subject.draft(1) is not None
        accept(subject, range(50, 50 + LOOKUP_TOKENS - 1))
        assert subject.draft(1) is None
        subject.accept(70)
        assert subject.draft(1) == Draft((4,), 0, DraftSource.TREE)

    def test_it_is_not_looked_up_before_the_first_draft(self) -> None:
        known = Cached([(1,)])
        accept(drafter(known=known), range(50))
        assert known.n_lookups == 0

    def test_it_comes_before_the_sequence_s_own_text(self) -> None:
        subject = drafter(prompt=(1, 2, 3, 4, 1, 2, 3), known=Cached([(8, 9)]))
        assert subject.draft(2) == Draft((8, 9), 0, DraftSource.TREE)


class TestOwnText:
    def test_the_prompt_is_repeated(self) -> None:
        subject = drafter()
        accept(subject, PROMPT[10:13])
        draft = Draft(PROMPT[13 : 13 + 3 + EXTRA_TOKENS], 3, DraftSource.OWN)
        assert subject.draft(20) == draft, "little longer than what matched"

    def test_the_output_repeats_itself(self) -> None:
        subject = drafter()
        accept(subject, (1, 2, 3, 4, 1, 2, 3))
        assert subject.draft(3) == Draft((4, 1, 2), 3, DraftSource.OWN)

    def test_across_the_end_of_the_prompt(self) -> None:
        subject = drafter(prompt=(1, 2, 3, 4, 5, 2))
        assert subject.draft(3) is None
        accept(subject, (3, 4))
        assert subject.draft(3) == Draft((5, 2, 3), 3, DraftSource.OWN)

    def test_it_comes_before_other_answers(self) -> None:
        subject = drafter(answers=(100, 101, 102, 7))
        accept(subject, PROMPT[:3])
        assert subject.draft(1) == Draft(PROMPT[3:4], 3, DraftSource.OWN)


def test_another_answer_is_repeated() -> None:
    subject = drafter(answers=range(1, 30))
    accept(subject, (4, 5, 6))
    assert subject.draft(20) == Draft(tuple(range(7, 7 + 3 + EXTRA_TOKENS)), 3, DraftSource.ANSWERS)


few = st.lists(st.integers(0, 2), max_size=30)


@given(few, few, few, few, st.lists(few, max_size=3), st.integers(0, 6), st.integers(1, 4))
def test_drafting_changes_nothing(
    prompt: list[int],
    output: list[int],
    prediction: list[int],
    others: list[int],
    runs: list[list[int]],
    most: int,
    every: int,
) -> None:
    """The same output gives the same draft, which is no longer than requested. Except for when the
    prefix cache is looked up, no draft depends on earlier ones.
    """

    def new(*found: list[int]) -> Generating:
        return drafter(prompt, tuple(prediction), Cached([tuple(run) for run in found]), others)

    subject, often, seldom, never = new(*runs), new(), new(), new()
    for at, token_id in enumerate(output):
        draft = subject.draft(most)
        assert subject.draft(most) == draft
        assert draft is None or 1 <= len(draft.tokens) <= most
        often.draft(most)
        if at % every == 0:
            assert seldom.draft(most) == often.draft(most)
        for each in (subject, often, seldom, never):
            each.accept(token_id)
    assert often.draft(most) == seldom.draft(most) == never.draft(most)


def test_what_a_guide_forces_is_drafted_where_no_other_source_goes_on_from_there() -> None:
    assert drafter(forced=(1, 2, 3)).draft(2) == Draft((1, 2), 0, DraftSource.GRAMMAR)
    for prediction in ((1, 2), (1, 5, 3, 4)):
        subject = drafter(prediction=prediction, forced=(1, 2))
        assert subject.draft(9) == Draft((1, 2), 0, DraftSource.GRAMMAR)
    subject = drafter(prediction=(1, 2, 3), forced=(1, 2))
    assert subject.draft(9) == Draft((1, 2, 3), 0, DraftSource.PREDICTION)
