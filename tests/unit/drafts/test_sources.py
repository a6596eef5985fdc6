"""Where drafts come from: predictions, the prefix cache, a sequence's own text, other answers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.drafts.sources import (
    LOOKUP_TOKENS,
    MAX_SKIPPED_TOKENS,
    Draft,
    Drafter,
    LatestAnswers,
    ModelText,
    Prediction,
)
from engine.drafts.suffix_index import (
    EXTRA_TOKENS,
    MIN_MATCH,
    NO_MATCH,
    Match,
    RequestTexts,
    SortedText,
    SuffixIndex,
    TokenIds,
)
from engine.values.stats import DraftSource
from engine.values.tokens import pack
from kvstore.tokens import Tokens
from kvstore.types import Namespace
from tests.unit.kv_helpers import packed

PREDICTED = tuple(range(1, 40))


def sorted_text(tokens: Iterable[int]) -> SortedText:
    return SortedText(Tokens(text=pack(tokens).packed))


def after(predicted: Iterable[int], output: Sequence[int], most: int = 3) -> TokenIds:
    """Return what is proposed after an output that the prediction has not seen any of."""
    prediction = Prediction(sorted_text(predicted))
    proposed = prediction.propose(output, most)
    assert prediction.propose(output, most) == proposed, "a proposal changes nothing"
    return proposed[0]


def test_it_is_followed_from_its_start() -> None:
    assert after(PREDICTED, []) == (1, 2, 3)
    assert after(PREDICTED, [1, 2]) == (3, 4, 5)
    assert after(PREDICTED, range(1, 39)) == (39,)


def test_it_goes_on_where_three_tokens_are_the_same_again() -> None:
    assert after(PREDICTED, [1, 99, 3, 4]) == ()
    assert after(PREDICTED, [1, 99, 3, 4, 5]) == (6, 7, 8), "another token in place of one"
    assert after(PREDICTED, [1, 99, 2, 3, 4]) == (5, 6, 7), "one more"
    assert after(PREDICTED, [1, 20, 21, 22]) == (23, 24, 25), "many left out"


def test_what_lies_elsewhere_is_found_by_the_longest_match() -> None:
    moved = [*range(20, 40), *range(1, 20)]
    assert after(moved, [1, 2, 3, 4]) == (5, 6, 7)
    assert after(moved, [*range(1, 20), 20, 21, 22]) == (23, 24, 25), "before the place it is at"
    far = [*range(1, 10), *[0] * MAX_SKIPPED_TOKENS, 5, 6, 7, 8]
    assert after(far, [1, 2, 99, 5, 6, 7]) == (8, 9, 0)


class Slow:
    """A suffix index that searches every position, for comparison."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.at, self.is_followed = list(tokens), 0, True

    def accept(self, output: Sequence[int]) -> None:
        if self.is_followed and self.tokens[self.at : self.at + 1] == [output[-1]]:
            self.at += 1
            return
        last = list(output[-MIN_MATCH:])
        stop = min(len(self.tokens), self.at + MAX_SKIPPED_TOKENS)
        ends = range(self.at + MIN_MATCH, stop + 1)
        places = [end for end in ends if self.tokens[end - MIN_MATCH : end] == last]
        self.is_followed = bool(places)
        self.at = places[0] if places else self.at

    def propose(self, output: Sequence[int], most: int) -> tuple[int, ...]:
        if self.is_followed:
            return tuple(self.tokens[self.at : self.at + most])
        return SuffixIndex(sorted_text(self.tokens)).propose(output, most)[0]


ids = st.sampled_from([0, 1, 256, 65536])
"""Some of whose bytes look like other tokens, where they are not read from a token's first."""


@given(st.lists(ids, max_size=40), st.lists(ids, max_size=30), st.integers(1, 5), st.integers(1, 4))
def test_it_is_where_looking_everywhere_says(
    predicted: list[int], output: list[int], most: int, every: int
) -> None:
    """However many tokens come between two proposals."""
    prediction, slow = Prediction(sorted_text(predicted)), Slow(predicted)
    for n_tokens in range(1, len(output) + 1):
        slow.accept(output[:n_tokens])
        if n_tokens % every == 0:
            proposed, _ = prediction.propose(output[:n_tokens], most)
            assert proposed == slow.propose(output[:n_tokens], most)


HERE, THERE = Namespace("m"), Namespace("m", cache_salt="tenant")


def answer_of(start: int, n_tokens: int) -> list[int]:
    return list(range(start, start + n_tokens))


def test_the_oldest_go_first() -> None:
    answers = LatestAnswers(max_tokens=44)
    for start in (100, 200, 300, 400):
        answers.add(HERE, packed(answer_of(start, 10)))
    assert len(answers) == 44
    answers.add(HERE, packed(answer_of(500, 10)))
    found = [answers.propose(HERE, answer_of(start, 3), 1)[1] for start in range(100, 600, 100)]
    assert found == [0, 0, 3, 3, 3]


def test_the_longer_occurrence_counts_then_the_newer() -> None:
    answers = LatestAnswers(max_tokens=20)
    answers.add(HERE, packed([7, 1, 2, 3, 4, 6, 6, 6]))
    answers.add(HERE, packed([8, 1, 2, 3, 5, 6, 6, 6]))
    assert answers.propose(HERE, [7, 1, 2, 3], 1) == ((4,), 4)
    assert answers.propose(HERE, [1, 2, 3], 1) == ((5,), 3)


def test_of_an_answer_that_is_too_long_the_end_is_kept() -> None:
    answers = LatestAnswers(max_tokens=20)
    answers.add(HERE, packed(answer_of(0, 100)))
    assert len(answers) == 10
    assert answers.propose(HERE, [91, 92, 93], 9) == ((94, 95, 96, 97, 98, 99), 3)
    assert answers.propose(HERE, [90, 91, 92], 9) == ((), 0)


def test_nothing_is_kept_where_there_is_no_room() -> None:
    answers = LatestAnswers(max_tokens=0)
    answers.add(HERE, packed(answer_of(0, 100)))
    assert len(answers) == 0


tokens = st.lists(st.integers(0, 3), max_size=12)


@given(st.lists(tokens), st.lists(tokens), st.data())
def test_nothing_crosses_a_namespace(
    ours: list[list[int]], theirs: list[list[int]], data: st.DataObject
) -> None:
    """What others have added changes nothing, except that it makes older answers go."""
    alone, shared = LatestAnswers(), LatestAnswers()
    added = [(HERE, one) for one in ours] + [(THERE, one) for one in theirs]
    for namespace, one in data.draw(st.permutations(added)):
        shared.add(namespace, packed(one))
        if namespace == HERE:
            alone.add(namespace, packed(one))
    last = data.draw(tokens)
    assert shared.propose(HERE, last, 9) == alone.propose(HERE, last, 9)
    assert shared.propose(Namespace("other"), last, 9) == ((), 0)
    shared.clear(THERE)
    assert len(shared) == len(alone)
    assert shared.propose(THERE, last, 9) == ((), 0)
    assert shared.propose(HERE, last, 9) == alone.propose(HERE, last, 9)
    shared.clear()
    assert (len(shared), shared.propose(HERE, last, 9)) == (0, ((), 0))


@given(st.integers(0, 40), st.lists(st.tuples(st.sampled_from([HERE, THERE]), tokens)), tokens)
def test_what_is_proposed_stands_in_one_of_the_latest_answers_of_the_namespace(
    most_tokens: int, added: list[tuple[Namespace, list[int]]], last: list[int]
) -> None:
    answers = LatestAnswers(most_tokens)
    for namespace, one in added:
        answers.add(namespace, packed(one))
        assert len(answers) <= most_tokens
    proposed, matched = answers.propose(HERE, last, 9)
    if matched:
        run = [*last[-matched:], *proposed]
        own = [one for namespace, one in added if namespace == HERE]
        assert any(
            one[at : at + len(run)] == run for one in own for at in range(len(one) - len(run) + 1)
        )


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
    remembered = Remembered(SuffixIndex(sorted_text(answers)))
    choice = None if forced is None else lambda tokens=forced: tokens
    return Generating(
        Drafter(
            RequestTexts(sorted_text(prompt), sorted_text(prediction) if prediction else None),
            known or Cached(),
            remembered,
            choice,
        )
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


def test_a_draft_models_tokens_come_last_and_as_long_as_the_output_leads_to_them() -> None:
    text = ModelText()
    texts = RequestTexts(sorted_text(PROMPT), None)
    subject = Drafter(texts, Cached(), Remembered(), model=text)
    assert subject.draft([40], 4) is None
    text.take((61, 62, 63), start=2)  # after the token that is being sampled
    assert subject.draft([40], 4) is None
    assert subject.draft([40, 41], 4) == Draft((61, 62, 63), 0, DraftSource.MODEL)
    assert subject.draft([40, 41, 61], 1) == Draft((62,), 1, DraftSource.MODEL)
    assert subject.draft([40, 41, 61, 99], 4) is None
    assert subject.draft([40, 41, 61, 62, 63], 4) is None


class SlicedOutput(list[int]):
    """An output that keeps the length of its longest slice."""

    longest = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(key, slice):
            self.longest = max(self.longest, len(found))
        return found


def test_a_draft_model_that_has_drafted_long_ago_or_never_costs_nothing() -> None:
    """An attempt at each token would else copy all of a long output."""
    output, text = SlicedOutput(range(1000)), ModelText()
    assert text.propose(output, 4) == NO_MATCH
    text.take((1, 2, 3), start=1)
    assert text.propose(output, 4) == NO_MATCH
    assert output.longest <= 3
    assert text.propose(SlicedOutput([0, 1]), 4) == ((2, 3), 1)


def test_other_sources_come_before_a_draft_model() -> None:
    text = ModelText()
    texts = RequestTexts(sorted_text(PROMPT), sorted_text((40, 41, 42)))
    subject = Drafter(texts, Cached(), Remembered(), model=text)
    text.take((61, 62, 63), start=1)
    assert subject.draft([40], 4) == Draft((41, 42), 1, DraftSource.PREDICTION)
