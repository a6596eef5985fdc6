"""Steps on their way: one is computed while the next is planned, submitted and delivered."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from engine.constraints.masks import MaskFiller
from engine.runner import ModelRunner, RunnerLost
from engine.scheduler import Scheduler
from engine.step import StepMasks, StepPlan, StepResult
from engine.timing import Timing
from engine.types import OutputEvent

logger = logging.getLogger(__name__)

T = TypeVar("T")

NO_STEP = StepPlan()
NO_RESULT = StepResult({}, {})


@dataclass(frozen=True, slots=True)
class Failure:
    """What the runner has raised."""

    message: str


class Pipeline:
    """At most one step is in flight between two calls of `advance`.

    What a step samples depends on tokens of the one before: masks, penalties, ends. So it is
    submitted before that is collected, and samples after. Each `advance` is followed by `sample`;
    in between is the time to deliver what `advance` has returned.
    """

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, masks: MaskFiller, timing: Timing
    ) -> None:
        self._scheduler = scheduler
        self._timing = timing
        self._began = 0.0  # of the clock: when the device was free for the step in flight
        self._runner = runner
        self._masks = masks
        self._in_flight = NO_STEP

    @property
    def is_empty(self) -> bool:
        return not self._in_flight.is_due

    def advance(self, plan: StepPlan) -> list[OutputEvent]:
        """Submit a step and collect the one before, whose news this returns.

        A step that fails ends its own sequences; when it does so at its collection, also those of
        the one that rests on it. Raises RunnerLost.
        """
        before, self._in_flight = self._in_flight, NO_STEP
        began, self._began = self._began, self._timing.now()
        news = []
        if (failure := self._submit(plan)) is not None:
            # Now, for a sequence that ends with the step before must not count on this one.
            news, plan = self._fail(plan, failure), NO_STEP
        result = self._collect(before)
        if isinstance(result, Failure):
            return news + self._fail(before, result) + self._fail(plan, result)
        self._in_flight = plan
        return news + (self._commit(before, result, began) if before.is_due else [])

    def sample(self) -> list[OutputEvent] | None:
        """Have the rest of the step in flight computed, and its tokens.

        None if it is; else it has failed, and this is the news.
        """
        plan = self._in_flight
        if (failure := self._sample(plan)) is None:
            return None
        self._in_flight = NO_STEP
        return self._fail(plan, failure)

    def _commit(self, plan: StepPlan, result: StepResult, began: float) -> list[OutputEvent]:
        """The step behind it has the device from now on."""
        self._began = self._timing.now()
        self._timing.stepped(self._began - began)
        self._scheduler.took(plan, self._began - began)
        return self._scheduler.commit(plan, result)

    def _submit(self, plan: StepPlan) -> Failure | None:
        return _attempt(lambda: self._runner.submit(plan)) if plan.is_due else None

    def _collect(self, plan: StepPlan) -> StepResult | Failure:
        return _attempt(self._runner.collect) if plan.is_due else NO_RESULT

    def _sample(self, plan: StepPlan) -> Failure | None:
        masks = partial(self._mask, plan)
        return _attempt(lambda: self._runner.sample(masks)) if plan.is_due else None

    def _mask(self, plan: StepPlan) -> StepMasks:
        """The masks of those that a guide leads, as of their last tokens."""
        sampling = map(self._scheduler.sequence, plan.sampling())
        guided = [s for s in sampling if s is not None and s.guide.choice is not None]
        if not guided:
            return StepMasks()
        choices = [sequence.guide.choice for sequence in guided]
        masks = self._masks.fill(choices, [sequence.banned_tokens for sequence in guided])
        return StepMasks([sequence.id for sequence in guided], masks)

    def _fail(self, plan: StepPlan, failure: Failure) -> list[OutputEvent]:
        return self._scheduler.fail(plan, failure.message)


def _attempt(act: Callable[[], T]) -> T | Failure:
    try:
        return act()
    except RunnerLost:
        raise
    except Exception as error:
        logger.exception("a step failed")
        return Failure(f"the step failed: {type(error).__name__}: {error}")
