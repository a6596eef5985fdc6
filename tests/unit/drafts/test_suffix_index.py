"""Tokens that followed earlier occurrences of the end of a text."""

from collections.abc import Sequence
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from engine.drafts.suffix_index import (
    EXTRA_TOKENS,
    MAX_MATCH,
    MAX_OCCURRENCES,
    MIN_MATCH,
    SortedText,
    SuffixIndex,
)

texts = st.lists(st.integers(0, 2), max_size=60)
vocabulary = st.sampled_from([0, 1, (1 << 20) - 1])
wide_texts = st.lists(vocabulary, max_size=40)


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
    index = SuffixIndex([9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 7, 1, 2, 3, 6])
    assert index.propose([8, 1, 2, 3], 2) == ((5, 7), 4)
    assert index.propose([9, 1, 2, 3], 99) == ((4, 8, 1, 2, 3, 5, 7, 1), 4), "four more at most"


def test_a_text_that_repeats_itself_goes_on_without_an_end() -> None:
    index = SuffixIndex([1, 2, 3, 1, 2, 3, 1, 2, 3])
    assert index.continue_itself(8) == ((1, 2, 3, 1, 2, 3, 1, 2), 6)
    assert SuffixIndex([7] * 40).continue_itself(5) == ((7, 7, 7, 7, 7), MAX_MATCH)


def test_indexes_that_go_on_from_one_text_sort_it_once() -> None:
    text = SortedText([1, 2, 3, 4, 5, 1, 2])
    one, other = SuffixIndex(text), SuffixIndex(text)
    one.extend([3])
    other.extend([9, 4, 5, 1])
    assert one.continue_itself(2) == ((4, 5), 3)
    assert other.continue_itself(2) == ((2, 9), 3)
    assert one.continue_itself(2) == ((4, 5), 3)
    assert text.keys_and_ends is text.keys_and_ends


def test_tokens_too_large_for_a_key_are_compared_all_the_same() -> None:
    large = (1 << 32) - 1
    index = SuffixIndex([5, 6, 7, large])
    assert index.propose([5, 6, 7], 1) == ((large,), 3)
    index.extend([8, large, 5, 6, 7, 1])
    assert index.propose([large, 5, 6, 7], 1) == ((1,), 4)
    assert index.propose([large, 8, 9], 1) == ((), 0)
    alike = SuffixIndex([4, (1 << 20) | 6, 7, 1])
    assert alike.propose([5, 6, 7], 1) == ((), 0), "the same key, but other tokens"


@given(texts, texts, texts, st.integers(1, 8))
def test_it_finds_what_looking_everywhere_finds(
    first: list[int], more: list[int], last: list[int], most: int
) -> None:
    index = SuffixIndex(first)
    assert index.propose(last, most) == proposed(first, last, most)
    assert index.continue_itself(most) == continued(first, most)
    index.extend(more)
    text = first + more
    assert index.propose(last, most) == proposed(text, last, most)
    assert index.propose(text, most) == proposed(text, text, most)
    assert index.continue_itself(most) == continued(text, most)


@given(wide_texts, st.data())
def test_it_does_not_matter_when_it_is_asked(text: list[int], data: st.DataObject) -> None:
    asked, last = SuffixIndex(), data.draw(wide_texts)
    for token_id in text:
        asked.extend([token_id])
        asked.continue_itself(1)
    assert asked.continue_itself(6) == SuffixIndex(text).continue_itself(6) == continued(text, 6)
    assert asked.propose(last, 6) == SuffixIndex(text).propose(last, 6) == proposed(text, last, 6)


@given(st.integers(1, 3), st.integers(0, 40), st.integers(0, 3))
def test_no_more_is_compared_than_has_to_be(period: int, more: int, gap: int) -> None:
    """Long matches, which short lists of hypothesis seldom have."""
    text = [at % period for at in range(MAX_MATCH + more)]
    text += [5] * gap + text
    assert SuffixIndex(text).continue_itself(4) == continued(text, 4)
    assert SuffixIndex(text).propose(text[:-gap], 4) == proposed(text, text[:-gap], 4)
