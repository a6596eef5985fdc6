"""Which of a row's draws count, and where the row goes on."""

import pytest

from engine.core.step import SampledToken, Sampling, SequenceId
from engine.mlx_backend.batch import BatchRow, SequenceTables
from engine.mlx_backend.sampling.edits import SamplingRow
from engine.mlx_backend.sampling.verify import RowDraws, ranges
from engine.values.request import SamplingParams

BEHIND_DRAFTS = 20


def draws_of(*drafts: int) -> RowDraws:
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    sampling = SamplingRow(Sampling(params, seed=0))
    row = BatchRow(SequenceId(1), 0, SequenceTables(0), sampling, BEHIND_DRAFTS)
    return RowDraws(row, drafts)


@pytest.mark.parametrize(
    ("drafts", "drawn", "counted"),
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
def test_what_counts(
    drafts: tuple[int, ...], drawn: list[int | None], counted: list[int] | None
) -> None:
    tokens = [None if token is None else SampledToken(token) for token in drawn]
    found = draws_of(*drafts).counted(tokens)
    assert (found and [token.token_id for token in found]) == counted


def test_a_row_goes_on_behind_what_counts() -> None:
    draws = draws_of(5, 6, 7)
    draws.accept((SampledToken(5), SampledToken(9)))
    assert draws.row.position == BEHIND_DRAFTS - 2
    tokens, values = draws.row.sampling.edits()
    assert dict(zip(tokens.tolist(), values[2].tolist(), strict=True)) == {5: 1.0, 9: 1.0}


def test_draws_that_do_not_take_place_are_taken_back() -> None:
    draws = draws_of(5, 6, 7).first(2)
    assert draws.drafts == (5,)
    assert draws.row.position == BEHIND_DRAFTS - 2
    draws.accept((SampledToken(5), SampledToken(9)))
    assert draws.row.position == BEHIND_DRAFTS - 2


def test_each_draw_counts_the_drafts_before_it() -> None:
    states = list(draws_of(5, 5).states())
    penalties = [state.edits().values[2].tolist() for state in states]
    assert penalties == [[], [1.0], [2.0]]
    first, second, third = (state.uniforms(1).tolist() for state in states)
    assert first != second != third


def test_draws_lie_one_rows_behind_anothers() -> None:
    assert ranges([draws_of(1, 2), draws_of(), draws_of(3)]) == [
        range(0, 3),
        range(3, 4),
        range(4, 6),
    ]
