"""Tokens that followed earlier occurrences of the end of a text."""

from collections.abc import Iterable, Sequence
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from engine.drafts.suffix_index import (
    EXTRA_TOKENS,
    INDEXED_AT_ONCE,
    MAX_MATCH,
    MAX_OCCURRENCES,
    MIN_MATCH,
    SortedText,
    SuffixIndex,
)
from engine.values.tokens import pack
from kvstore.tokens import Tokens
from tests.unit.kv_helpers import packed

texts = st.lists(st.integers(0, 2), max_size=60)
vocabulary = st.sampled_from([0, 1, (1 << 20) - 1])
wide_texts = st.lists(vocabulary, max_size=40)


def index_of(tokens: Iterable[int]) -> SuffixIndex:
    return SuffixIndex(SortedText(Tokens(text=pack(tokens).packed)))


def extend(index: SuffixIndex, tokens: Iterable[int]) -> None:
    index.extend(packed(tokens))


def common(text: Sequence[int], last: Sequence[int]) -> int:
    """How many tokens the two have in common at their ends, as far as is compared."""
    n_tokens = 0
    for one, other in islice(zip(reversed(text), reversed(last), strict=False), MAX_MATCH):
        if one != other:
            break
        n_tokens += 1
    return n_tokens


def place(text: Sequence[int], last: Sequence[int]) -> tuple[int, int]:
    """The end of the occurrence to be taken and its length, by looking everywhere."""
    ends = [end for end in range(len(text) - 1, 0, -1) if common(text[:end], last) >= MIN_MATCH]
    ends = ends[:MAX_OCCURRENCES]
    longest = max((common(text[:end], last) for end in ends), default=0)
    ends = [end for end in ends if common(text[:end], last) == longest]
    votes = [sum(text[end] == text[other] for other in ends) for end in ends]
    return (ends[votes.index(max(votes))], longest) if ends else (0, 0)


def proposed(text: Sequence[int], last: Sequence[int], most: int) -> tuple[tuple[int, ...], int]:
    end, matched = place(text, last)
    most = min(most, matched + EXTRA_TOKENS)
    return (tuple(text[end : end + most]), matched) if matched else ((), 0)


def continued(text: Sequence[int], most: int) -> tuple[tuple[int, ...], int]:
    end, matched = place(text, text)
    if not matched:
        return after_edit(text, most)
    most = min(most, matched + EXTRA_TOKENS)
    grown = list(text)
    for at in range(end, end + most):
        grown.append(grown[at])
    return tuple(grown[len(text) :]), matched


def after_edit(text: Sequence[int], most: int) -> tuple[tuple[int, ...], int]:
    """Where one of the last three tokens is another than in what is repeated."""
    for n_tokens in range(1, MIN_MATCH + 1):
        before = text[: max(len(text) - n_tokens, 0)]
        end, matched = place(before, before)
        is_same = text[end + 1 : end + n_tokens] == text[len(before) + 1 :]
        n_ahead = min(most, n_tokens - 1 + EXTRA_TOKENS)
        ahead = tuple(text[end + n_tokens : end + n_tokens + n_ahead])
        if matched and is_same and ahead:
            return ahead, n_tokens - 1
    return (), 0


def test_what_followed_the_longest_occurrence() -> None:
    index = index_of([9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 7, 1, 2, 3, 6])
    assert index.propose([8, 1, 2, 3], 2) == ((5, 7), 4)
    assert index.propose([9, 1, 2, 3], 99) == ((4, 8, 1, 2, 3, 5, 7, 1), 4), "four more at most"


def test_a_text_that_repeats_itself_goes_on_without_an_end() -> None:
    index = index_of([1, 2, 3, 1, 2, 3, 1, 2, 3])
    assert index.continue_itself(8) == ((1, 2, 3, 1, 2, 3, 1, 2), 6)
    assert index_of([7] * 40).continue_itself(5) == ((7, 7, 7, 7, 7), MAX_MATCH)


def test_indexes_that_go_on_from_one_text_share_it() -> None:
    text = SortedText(Tokens(text=pack([1, 2, 3, 4, 5, 1, 2]).packed))
    one, other = SuffixIndex(text), SuffixIndex(text)
    extend(one, [3])
    extend(other, [9, 4, 5, 1])
    assert one.continue_itself(2) == ((4, 5), 3)
    assert other.continue_itself(2) == ((2, 9), 3)
    assert one.continue_itself(2) == ((4, 5), 3)


def test_tokens_too_large_for_a_key_are_compared_all_the_same() -> None:
    large = (1 << 32) - 1
    index = index_of([5, 6, 7, large])
    assert index.propose([5, 6, 7], 1) == ((large,), 3)
    extend(index, [8, large, 5, 6, 7, 1])
    assert index.propose([large, 5, 6, 7], 1) == ((1,), 4)
    assert index.propose([large, 8, 9], 1) == ((), 0)
    alike = index_of([4, (1 << 20) | 6, 7, 1])
    assert alike.propose([5, 6, 7], 1) == ((), 0), "the same key, but other tokens"


@given(texts, texts, texts, st.integers(1, 8))
def test_it_finds_what_looking_everywhere_finds(
    first: list[int], more: list[int], last: list[int], most: int
) -> None:
    index = index_of(first)
    assert index.propose(last, most) == proposed(first, last, most)
    assert index.continue_itself(most) == continued(first, most)
    extend(index, more)
    text = first + more
    assert index.propose(last, most) == proposed(text, last, most)
    assert index.propose(text, most) == proposed(text, text, most)
    assert index.continue_itself(most) == continued(text, most)


@given(wide_texts, st.data())
def test_it_does_not_matter_when_it_is_asked(text: list[int], data: st.DataObject) -> None:
    asked, last = SuffixIndex(), data.draw(wide_texts)
    for token_id in text:
        extend(asked, [token_id])
        asked.continue_itself(1)
    assert asked.continue_itself(6) == index_of(text).continue_itself(6) == continued(text, 6)
    assert asked.propose(last, 6) == index_of(text).propose(last, 6) == proposed(text, last, 6)


@given(st.integers(1, 3), st.integers(0, 40), st.integers(0, 3))
def test_no_more_is_compared_than_has_to_be(period: int, more: int, gap: int) -> None:
    """Long matches, which short lists of hypothesis seldom have."""
    text = [at % period for at in range(MAX_MATCH + more)]
    text += [5] * gap + text
    assert index_of(text).continue_itself(4) == continued(text, 4)
    assert index_of(text).propose(text[:-gap], 4) == proposed(text, text[:-gap], 4)


@given(st.lists(st.integers(0, 9), max_size=700), st.integers(0, 40), texts)
def test_runs_are_found_in_texts_of_any_length(
    text: list[int], skipped: int, last: list[int]
) -> None:
    """Of a long text some keys are kept, and the others computed. Its first tokens may be left
    out.
    """
    index = SuffixIndex(SortedText(Tokens(text=pack(text).packed), skipped))
    followed, matched = index.propose(last, 3)
    runs = [text[at : at + MIN_MATCH] for at in range(skipped, len(text) - MIN_MATCH)]
    assert bool(matched) == (last[-MIN_MATCH:] in runs)
    if skipped == 0:
        assert (followed, matched) == proposed(text, last, 3)


def test_a_query_indexes_a_bounded_number_of_tokens() -> None:
    """However many were appended. Later queries find the tokens after these."""
    text = list(range(3 * INDEXED_AT_ONCE))
    index = SuffixIndex()
    extend(index, text)
    late = text[-4:-1]
    assert [index.propose(late, 1) for _ in range(3)] == [((), 0), ((), 0), ((text[-1],), 3)]
    extend(index, text)
    assert [index.catch_up() for _ in range(4)] == [False, False, True, True]
