"""Drafts are verified as far as they pay, by what a step gives without them."""

import pytest

from engine.drafts.policy import DraftableRow, StepPrice, allot


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
