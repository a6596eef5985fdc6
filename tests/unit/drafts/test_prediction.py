"""Where an output continues in its prediction."""

from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from engine.drafts.sources import MAX_SKIPPED_TOKENS, Prediction
from engine.drafts.suffix_index import MIN_MATCH, SuffixIndex, TokenIds

PREDICTED = tuple(range(1, 40))


def after(predicted: Iterable[int], output: Sequence[int], most: int = 3) -> TokenIds:
    """Return what is proposed after an output that the prediction has not seen any of."""
    prediction = Prediction(tuple(predicted))
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
    """The same place, by looking at each in turn."""

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
        return SuffixIndex(self.tokens).propose(output, most)[0]


ids = st.sampled_from([0, 1, 256, 65536])
"""Some of whose bytes look like other tokens, where they are not read from a token's first."""


@given(st.lists(ids, max_size=40), st.lists(ids, max_size=30), st.integers(1, 5), st.integers(1, 4))
def test_it_is_where_looking_everywhere_says(
    predicted: list[int], output: list[int], most: int, every: int
) -> None:
    """However many tokens come between two proposals."""
    prediction, slow = Prediction(tuple(predicted)), Slow(predicted)
    for n_tokens in range(1, len(output) + 1):
        slow.accept(output[:n_tokens])
        if n_tokens % every == 0:
            proposed, _ = prediction.propose(output[:n_tokens], most)
            assert proposed == slow.propose(output[:n_tokens], most)
