"""Decides how far the daemon goes to give memory back: a pure function of readings.

    NONE -> BUFFERS -> PREFIXES -> ADMISSION -> MODELS -> REQUESTS

Each set of readings raises the step by one at most. The first steps cost little and are taken where
memory is short; the others only where it is nearly gone. A step is left, for the one before, after
several readings in a row that are below a lower limit than the one at which it is taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

from engine.values.pressure import PressureSource, Reading

CALM_READINGS = 3
"""Readings in a row below a step's lower limit after which it is left."""


class Step(IntEnum):
    """How far the daemon goes. Each step includes those before it."""

    NONE = 0
    BUFFERS = 1  # MLX's free buffers, and the memory of free blocks, are given back
    PREFIXES = 2  # cached prefixes are evicted, a part with each reading, and their memory is
    ADMISSION = 3  # requests are refused
    MODELS = 4  # models that no request uses are unloaded, one with each reading
    REQUESTS = 5  # the longest request is ended, one with every third reading

    @property
    def words(self) -> str:
        """What is done in this step, as a clause."""
        return _WORDS[self]


_WORDS = {
    Step.NONE: "nothing is given back",
    Step.BUFFERS: "free buffers and free blocks are given back",
    Step.PREFIXES: "cached prefixes are evicted",
    Step.ADMISSION: "requests are refused",
    Step.MODELS: "idle models are unloaded",
    Step.REQUESTS: "the longest requests are ended",
}


class Limits(NamedTuple):
    """Shares of one source: below `calm` memory is enough, from `short` on it is short, and from
    `gone` on it is nearly gone.
    """

    calm: float
    short: float
    gone: float


class Shortage(IntEnum):
    """What readings say together: what the worst of them says."""

    CALM = 0
    BETWEEN = 1  # calm or short, as it was before
    SHORT = 2
    GONE = 3


def limits_of(short_share: float) -> Mapping[PressureSource, Limits]:
    """The limits of all sources, where memory is short once `short_share` of it is in use. It is
    nearly gone when half of the rest is in use as well, and enough when the rest is half as much
    again.
    """
    rest = 1 - short_share
    use = Limits(1 - 1.5 * rest, short_share, 1 - 0.5 * rest)
    stalls = Limits(0.02, 0.1, 0.4)
    happened = Limits(0.5, 1.0, 1.0)
    return {
        PressureSource.SYSTEM: Limits(0.25, 0.5, 1.0),
        PressureSource.MACHINE: use,
        PressureSource.GROUP: use,
        PressureSource.FOOTPRINT: use,
        PressureSource.STALLS: stalls,
        PressureSource.GROUP_STALLS: stalls,
        PressureSource.KILLS: happened,
        PressureSource.BUFFERS: Limits(0.7, 0.8, 0.9),
    }


def shortage_of(reading: Reading, limits: Mapping[PressureSource, Limits]) -> Shortage:
    """What one reading says."""
    calm, short, gone = limits[reading.source]
    if reading.share >= gone:
        return Shortage.GONE
    if reading.share >= short:
        return Shortage.SHORT
    return Shortage.BETWEEN if reading.share >= calm else Shortage.CALM


@dataclass(frozen=True, slots=True)
class GuardState:
    """The step, the reading because of which it was last taken, and how many readings in a row
    would leave it. `acts` is the last step whose work is to be done once more, if any, and `held`
    counts the readings in a row for which the step was at its highest.
    """

    step: Step = Step.NONE
    cause: Reading | None = None  # None with Step.NONE
    calm_readings: int = 0
    acts: Step = Step.NONE
    held: int = 0


def advance(
    state: GuardState, readings: Sequence[Reading], limits: Mapping[PressureSource, Limits]
) -> GuardState:
    """The state after these readings, taken at one moment. Without any it does not change."""
    if not readings:
        return replace(state, acts=Step.NONE)
    worst = max(readings, key=lambda each: (shortage_of(each, limits), each.share))
    shortage = shortage_of(worst, limits)
    wanted = {Shortage.SHORT: Step.PREFIXES, Shortage.GONE: Step.REQUESTS}.get(shortage, Step.NONE)
    if wanted > state.step:
        step = Step(state.step + 1)
        return GuardState(step, worst, acts=step)
    if wanted and wanted == state.step:
        held = state.held + 1
        # What a request has held is given back with the readings after its end.
        is_due = state.step is not Step.REQUESTS or held % CALM_READINGS == 0
        return GuardState(wanted, worst, 0, wanted if is_due else Step(wanted - 1), held)
    # Steps for memory that is nearly gone are left once it is only short: not to refuse for good.
    enough = Shortage.BETWEEN if state.step > Step.PREFIXES else Shortage.CALM
    if state.step is Step.NONE or shortage > enough:
        return GuardState(state.step, state.cause, acts=wanted)
    if state.calm_readings + 1 < CALM_READINGS:
        return GuardState(state.step, state.cause, state.calm_readings + 1)
    lower = Step(state.step - 1)
    return GuardState(lower, state.cause if lower else None)
