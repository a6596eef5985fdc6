"""One step of the engine over mlx-lm's bare forward, on the same weights.

So many rows decode at once after unique prompts of so many tokens: nothing is shared. The engine is
the daemon's own but for its thread, and is turned by hand; the bare model decodes as many rows over
mlx-lm's own KV caches, argmax and evaluation included. Both take turns of some steps each, and
their contexts grow alike.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.measuring.messages import MeasureConfig
from engine.measuring.rounds import Figures, rounds
from engine.measuring.turned_engine import EngineBeside, open_engine

STEPS = 8
"""Of either side in one round."""
WARM_UP_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Medians over the rounds: milliseconds a step, and the engine's over the bare model's."""

    rows: int
    context_tokens: int
    engine_milliseconds: float
    bare_milliseconds: float
    ratio: float
    least_ratio: float
    greatest_ratio: float


class StepMeasurement:
    """Each number of rows behind each context that the model has."""

    def __init__(self, config: MeasureConfig) -> None:
        """Raises ModelError."""
        sizes = config.sizes
        self._sizes = sizes
        self._said_tokens = STEPS * (WARM_UP_ROUNDS + sizes.rounds + 2)
        row_tokens = max(sizes.step_contexts) + self._said_tokens
        self._pair = open_engine(config.engine, max(sizes.rows), row_tokens)
        self._cases = {
            f"{rows} x {context:,}": (rows, context)
            for context, rows in itertools.product(sizes.step_contexts, sizes.rows)
            if context + self._said_tokens <= self._pair.engine.longest
        }

    def cases(self) -> Sequence[str]:
        return list(self._cases)

    def measure(self, case: str) -> Figures:
        """Raises RuntimeError where a step fails."""
        times = step_times(
            self._pair,
            *self._cases[case],
            self._sizes.rounds,
            self._said_tokens,
            self._sizes.case_seconds,
        )
        return {
            "engine_ms": times.engine_milliseconds,
            "bare_ms": times.bare_milliseconds,
            "engine_times": times.ratio,
            "least_times": times.least_ratio,
            "greatest_times": times.greatest_ratio,
        }


def step_times(
    pair: EngineBeside,
    rows: int,
    context_tokens: int,
    most_rounds: int,
    max_tokens: int,
    seconds: float = math.inf,
) -> StepTimes:
    """Let the two take turns, the first rounds uncounted. No row says more than `max_tokens`.

    Fewer rounds where they take longer than `seconds`.
    """
    pair.engine.begin(rows, context_tokens, max_tokens)
    pair.bare.begin(rows, context_tokens)
    counted = rounds(WARM_UP_ROUNDS + most_rounds, seconds)
    taken = [times for _, times in zip(counted, _rounds(pair), strict=False)]
    return times_of(rows, context_tokens, taken[WARM_UP_ROUNDS:])


def times_of(rows: int, context_tokens: int, taken: Sequence[tuple[float, float]]) -> StepTimes:
    """Of rounds, in seconds of the engine's and of the bare model's."""
    ratios = [ours / theirs for ours, theirs in taken]
    return StepTimes(
        rows=rows,
        context_tokens=context_tokens,
        engine_milliseconds=1e3 * statistics.median(ours for ours, _ in taken) / STEPS,
        bare_milliseconds=1e3 * statistics.median(theirs for _, theirs in taken) / STEPS,
        ratio=statistics.median(ratios),
        least_ratio=min(ratios),
        greatest_ratio=max(ratios),
    )


def _rounds(pair: EngineBeside) -> Iterator[tuple[float, float]]:
    """Seconds of either side, who take turns at going first."""
    engine, bare = pair.engine, pair.bare
    while True:
        ours = engine.seconds(STEPS)
        yield ours, sum(bare.step_seconds() for _ in range(STEPS))
        theirs = sum(bare.step_seconds() for _ in range(STEPS))
        yield engine.seconds(STEPS), theirs
