"""Decides how far the daemon goes to give memory back: a pure function of readings.

    NONE -> BUFFERS -> PREFIXES -> ADMISSION -> MODELS -> REQUESTS

Each set of readings raises the step by one at most. The first two steps cost little and are taken
where memory is short; the others only where it is nearly gone. A step is left, for the one before,
after several readings in a row that are below a lower limit than the one at which it is taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

from engine.values.pressure import PressureSource, Reading
from server.admin_schema import GuardStep

CALM_READINGS = 3
"""Readings in a row below a step's lower limit after which it is left; and readings between the
ends of two requests, since what a request has held is given back a while after its end."""

MOST_PAUSE_READINGS = 64
"""While memory stays short, its steps are repeated after 1, 2, 4 ... and at most so many readings:
the prefix cache is of use to those who go on."""


class Step(IntEnum):
    """How far the daemon goes. Each step includes those before it."""

    NONE = 0
    BUFFERS = 1  # MLX's free buffers, and the memory of free blocks, are given back
    PREFIXES = 2  # a part of the cached prefixes is evicted, and its memory given back
    ADMISSION = 3  # requests are refused
    MODELS = 4  # models that no request uses are unloaded, one with each reading
    REQUESTS = 5  # the longest request is ended, one with every third reading

    @property
    def words(self) -> str:
        """What is done in this step, as a clause."""
        return _WORDS[self]


NAMES: Mapping[Step, GuardStep] = {
    Step.NONE: "none",
    Step.BUFFERS: "buffers",
    Step.PREFIXES: "prefixes",
    Step.ADMISSION: "admission",
    Step.MODELS: "models",
    Step.REQUESTS: "requests",
}
"""The steps as the API and metrics name them."""

_WORDS = {
    Step.NONE: "no memory is given back",
    Step.BUFFERS: "free buffers and free blocks are given back",
    Step.PREFIXES: "cached prefixes are evicted",
    Step.ADMISSION: "requests are refused",
    Step.MODELS: "idle models are unloaded",
    Step.REQUESTS: "the longest requests are ended",
}


class Limits(NamedTuple):
    """Shares of one source: from `short` on memory is short, and from `gone` on it is nearly gone.
    Below `calm` it is not short any more.
    """

    calm: float
    short: float
    gone: float

    @property
    def relieved(self) -> float:
        """The share below which memory is not nearly gone any more."""
        return (self.short + self.gone) / 2


AllLimits = Mapping[PressureSource, Limits]


def limits_of(short_share: float) -> AllLimits:
    """The limits of all sources, where memory is short once `short_share` of it is in use. It is
    nearly gone when half of the rest is in use as well, and not short any more when the rest is
    half as much again.
    """
    rest = 1 - short_share
    use = Limits(1 - 1.5 * rest, short_share, 1 - 0.5 * rest)
    stalls = Limits(0.02, 0.1, 0.4)
    return {
        PressureSource.SYSTEM: Limits(0.25, 0.5, 1.0),
        PressureSource.MACHINE: use,
        PressureSource.GROUP: use,
        PressureSource.FOOTPRINT: use,
        PressureSource.STALLS: stalls,
        PressureSource.GROUP_STALLS: stalls,
        PressureSource.KILLS: Limits(0.5, 1.0, 1.0),
        PressureSource.BUFFERS: Limits(0.7, 0.8, 0.9),
    }


class Cause(NamedTuple):
    """The reading because of which a step was taken, and the limit that it has met."""

    reading: Reading
    limit: float

    @property
    def words(self) -> str:
        """`97% of ... are in use (limit 95%)`."""
        return f"{self.reading.words} (limit {self.limit:.1%})"


@dataclass(frozen=True, slots=True)
class GuardState:
    """The step, and why it was last taken. `acts` is the last step whose work is to be done now;
    NONE: nothing is. `held` counts the readings in a row that wanted what is done already, and
    `calm_readings` those that would leave the step.
    """

    step: Step = Step.NONE
    cause: Cause | None = None  # None with Step.NONE
    acts: Step = Step.NONE
    held: int = 0
    calm_readings: int = 0


def advance(state: GuardState, readings: Sequence[Reading], limits: AllLimits) -> GuardState:
    """The state after these readings, taken at one moment. Without any it does not change."""
    if not readings:
        return replace(state, acts=Step.NONE)
    highest, cause = _highest(readings, limits)
    if highest > state.step:
        step = Step(state.step + 1)
        return GuardState(step, cause, acts=step)
    is_relieved = all(each.share < _leaves_at(state.step, limits[each.source]) for each in readings)
    if highest is Step.NONE or is_relieved:
        return _calmer(state) if is_relieved and state.step else GuardState(state.step, state.cause)
    held = state.held + 1
    if highest is Step.REQUESTS:
        is_due = held % CALM_READINGS == 0
        acts = Step.REQUESTS if is_due else Step.MODELS
    else:
        is_due = held.bit_count() == 1 or held % MOST_PAUSE_READINGS == 0
        acts = highest if is_due else Step.NONE
    return GuardState(state.step, state.cause, acts, held)


def _calmer(state: GuardState) -> GuardState:
    """The state after one more set of readings that would leave the step."""
    calm_readings = state.calm_readings + 1
    if calm_readings < CALM_READINGS:
        return GuardState(state.step, state.cause, calm_readings=calm_readings)
    lower = Step(state.step - 1)
    return GuardState(lower, state.cause if lower else None)


def _highest(readings: Sequence[Reading], limits: AllLimits) -> tuple[Step, Cause | None]:
    """The highest step that the readings allow, and the reading that is most above its limit."""
    for step, name in ((Step.REQUESTS, "gone"), (Step.PREFIXES, "short")):
        met = [
            Cause(each, limit)
            for each in readings
            if each.share >= (limit := getattr(limits[each.source], name))
        ]
        if met:
            return step, max(met, key=lambda cause: cause.reading.share / cause.limit)
    return Step.NONE, None


def _leaves_at(step: Step, limits: Limits) -> float:
    """The share of one source below which a step is left."""
    return limits.relieved if step > Step.PREFIXES else limits.calm
