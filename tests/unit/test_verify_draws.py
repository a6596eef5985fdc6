"""Which draws of a row are accepted, and where the row continues."""

import pytest

from engine.core.step import SampledToken, Sampling, SequenceId
from engine.mlx_backend.batch import BatchRow
from engine.mlx_backend.model.sequences import SequenceTables
from engine.mlx_backend.sampling.edits import SamplingRow
from engine.mlx_backend.submitted_step import RowDraws, StepDraws
from engine.values.request import SamplingParams

AFTER_DRAFTS = 20


def draws_of(*drafts: int) -> RowDraws:
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    sampling = SamplingRow(Sampling(params, seed=0))
    row = BatchRow(SequenceId(1), 0, SequenceTables(0), sampling, AFTER_DRAFTS)
    return RowDraws(row, drafts)


@pytest.mark.parametrize(
    ("drafts", "drawn", "accepted"),
    [
        ((), [5], [5]),
        ((5, 6), [5, 6, 7], [5, 6, 7]),
        ((5, 6), [5, 8, 9], [5, 8]),
        ((5, 6), [4, 6, 7], [4]),
        ((5, 6), [4, None, None], [4]),
        ((5, 6), [5, 8, None], [5, 8]),
        ((5, 6), [5, 6, None], None),
        ((5, 6), [5, None, 7], None),
        ((5, 6), [None, 6, 7], None),
        ((), [None], None),
    ],
)
def test_the_drafts_that_are_drawn_are_accepted_and_the_next_token(
    drafts: tuple[int, ...], drawn: list[int | None], accepted: list[int] | None
) -> None:
    tokens = [None if token is None else SampledToken(token) for token in drawn]
    found = draws_of(*drafts).accepted_tokens(tokens)
    assert (found and [token.token_id for token in found]) == accepted


def test_a_row_continues_after_the_accepted_tokens() -> None:
    draws = draws_of(5, 6, 7)
    draws.accept((SampledToken(5), SampledToken(9)))
    assert draws.row.position == AFTER_DRAFTS - 2
    tokens, values = draws.row.sampling.edits()
    assert dict(zip(tokens.tolist(), values[2].tolist(), strict=True)) == {5: 1.0, 9: 1.0}


def test_a_row_continues_before_the_drafts_after_which_nothing_is_drawn() -> None:
    draws = draws_of(5, 6, 7).truncate(2)
    assert draws.drafts == (5,)
    assert draws.row.position == AFTER_DRAFTS - 2
    draws.accept((SampledToken(5), SampledToken(9)))
    assert draws.row.position == AFTER_DRAFTS - 2


def test_each_draw_counts_the_drafts_before_it() -> None:
    states = list(draws_of(5, 5).states())
    penalties = [state.edits().values[2].tolist() for state in states]
    assert penalties == [[], [1.0], [2.0]]
    assert [state.output_index for state in states] == [0, 1, 2]


def test_draws_are_in_the_order_of_the_rows() -> None:
    assert StepDraws([draws_of(1, 2), draws_of(), draws_of(3)]).ranges() == [
        range(0, 3),
        range(3, 4),
        range(4, 6),
    ]
