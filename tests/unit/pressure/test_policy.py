"""How far the daemon goes, over any readings."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.values.pressure import PressureSource, Reading
from server.pressure.policy import (
    CALM_READINGS,
    MOST_PAUSE_READINGS,
    GuardState,
    Step,
    advance,
    limits_of,
)

LIMITS = limits_of(0.9)
SHORT, RELIEVED, GONE, CALM = 0.9, 0.925, 0.95, 0.85
SOURCES = sorted(PressureSource)


def reading(share: float, source: PressureSource = PressureSource.GROUP) -> Reading:
    return Reading(source, share, f"{share:.2f} of {source}")


def after(state: GuardState, *shares: float) -> GuardState:
    for share in shares:
        state = advance(state, [reading(share)], LIMITS)
    return state


readings = st.lists(
    st.builds(
        reading,
        st.one_of(st.floats(0, 1), st.sampled_from([CALM, SHORT, RELIEVED, GONE, 0.0, 0.5, 1.0])),
        st.sampled_from(SOURCES),
    ),
    max_size=4,
)


@given(st.lists(readings, max_size=60))
def test_steps_are_taken_one_by_one_and_for_a_limit_that_was_met(
    sets: Sequence[Sequence[Reading]],
) -> None:
    state = GuardState()
    for each in sets:
        before, state = state, advance(state, each, LIMITS)
        assert state.step - before.step in (-1, 0, 1)
        assert state.acts <= state.step
        assert (state.cause is None) == (state.step is Step.NONE)
        is_gone = any(one.share >= LIMITS[one.source].gone for one in each)
        is_short = any(one.share >= LIMITS[one.source].short for one in each)
        if state.step > before.step:
            assert state.acts is state.step
            assert state.cause is not None
            assert state.cause.reading in each
            assert state.cause.reading.share >= state.cause.limit
            assert is_gone or state.step <= Step.PREFIXES
        if state.acts:
            assert is_short, "memory that is not short is not given back"
        if state.acts > Step.PREFIXES:
            assert is_gone
        if state.step < before.step:
            assert not is_gone
    calm = [reading(0.0, source) for source in SOURCES]
    for _ in range(CALM_READINGS * len(Step)):
        state = advance(state, calm, LIMITS)
    assert state.step is Step.NONE


def test_memory_that_is_nearly_gone_takes_every_step_in_order() -> None:
    state, taken = GuardState(), []
    for _ in range(len(Step) - 1):
        state = after(state, 1.0)
        taken.append(state.acts)
    assert taken == [step for step in Step if step]
    ends = [(state := after(state, 1.0)).acts for _ in range(9)]
    assert [at for at, acts in enumerate(ends, 1) if acts is Step.REQUESTS] == [3, 6, 9]
    assert set(ends) == {Step.REQUESTS, Step.MODELS}


def test_memory_that_is_short_is_given_back_ever_more_rarely() -> None:
    state = after(GuardState(), SHORT)
    assert state.acts is Step.BUFFERS
    state = after(state, SHORT)
    acts = [(state := after(state, SHORT)).acts for _ in range(3 * MOST_PAUSE_READINGS)]
    assert state.step is Step.PREFIXES
    due = [at for at, acted in enumerate(acts, 1) if acted is Step.PREFIXES]
    assert due == [1, 2, 4, 8, 16, 32, 64, 128, 192]


@pytest.mark.parametrize("step", [step for step in Step if step])
def test_a_step_is_left_below_a_lower_limit_than_it_is_taken_at(step: Step) -> None:
    worst = 1.0 if step > Step.PREFIXES else SHORT
    state = after(GuardState(), *[worst] * step)
    assert state.step is step
    taken_at, left_at = (GONE, RELIEVED) if step > Step.PREFIXES else (SHORT, CALM)
    between = (taken_at + left_at) / 2
    assert after(state, *[between] * 50).step is step
    below = left_at - 0.001
    assert after(state, *[below] * (CALM_READINGS - 1)).step is step
    assert after(state, *[below] * (CALM_READINGS - 1), between, below).step is step
    assert after(state, *[below] * CALM_READINGS).step == step - 1


def test_requests_are_admitted_again_although_memory_stays_short() -> None:
    state = after(GuardState(), *[1.0] * 5)
    assert after(state, *[SHORT + 0.01] * 40).step is Step.PREFIXES


def test_without_readings_nothing_changes() -> None:
    state = after(GuardState(), 1.0, 1.0)
    unread = advance(state, [], LIMITS)
    assert (unread.step, unread.cause, unread.acts) == (state.step, state.cause, Step.NONE)


@given(st.floats(0.5, 0.999))
def test_limits_of_any_setting_are_in_order(short_share: float) -> None:
    for calm, short, gone in limits_of(short_share).values():
        assert 0 < calm < short <= gone <= 1
