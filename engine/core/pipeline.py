"""Overlaps steps: one is computed while the next is planned and the last one's events delivered."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from engine.constraints.drafted import GuidedDraft
from engine.constraints.guide import Choice
from engine.constraints.masks import masks_of
from engine.constraints.remote.answers import Answers
from engine.core.metrics import LatencyTracker
from engine.core.scheduler import Scheduler
from engine.core.sequence import LiveSequence
from engine.core.step import ModelRunner, RunnerLost, SequenceId, StepMasks, StepPlan, StepResult
from engine.values.output import OutputEvent

logger = logging.getLogger(__name__)

T = TypeVar("T")

NO_STEP = StepPlan()
NO_RESULT = StepResult({}, {})

EARLY_SHARE, LATE_SHARE = 1 / 16, 3 / 16
"""Shares of a step's time to wait for masks: before a token's text is delivered, and before other
rows are sampled without the late one. This costs nothing while the device computes."""

ALONE_SECONDS = 0.05
"""The same where nothing else is computed: a new request waits no longer than that."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What the runner has raised."""

    message: str


@dataclass(frozen=True, slots=True)
class _Draw:
    """One token that a guided sequence draws in a step."""

    sequence_id: SequenceId
    choice: Choice
    banned: tuple[int, ...]


class Pipeline:
    """At most one step is in flight between two calls of `advance`.

    What a step samples depends on the tokens of the one before: masks, penalties, ends. So a step
    is submitted before that one is collected, and samples after. Each `advance` is followed by
    `sample`; in between the caller delivers the events that `advance` has returned.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        answers: Answers,
        latency: LatencyTracker,
    ) -> None:
        self._scheduler = scheduler
        self._latency = latency
        self._began = 0.0  # of the clock: when the device was free for the step in flight
        self._follows = False  # the next step follows one that has just been collected
        self._filled: list[int] = []  # the numbers of the steps that have been filled in since then
        self._step_seconds = 0.0  # of the last step, without what it waited
        self._waited_seconds = 0.0  # in the step in flight
        self._runner = runner
        self._answers = answers
        self._settled: list[OutputEvent] = []  # while the step in flight was about to sample
        self._in_flight = NO_STEP
        self._drafted: dict[SequenceId, GuidedDraft] = {}  # in the step in flight

    @property
    def is_empty(self) -> bool:
        return not self._in_flight.is_due

    def collect_early(self) -> list[OutputEvent]:
        """Before a step is planned: collect the one in flight, if it has drafts or the next one is
        to have some. Returns its events. Raises RunnerLost.
        """
        plan = self._in_flight
        if not plan.is_due or not (plan.is_drafted or self._scheduler.awaits_tokens):
            return []
        began, self._in_flight = self._began, NO_STEP
        result = self._collect(plan)
        if isinstance(result, Failure):
            return self._fail(plan, result)
        self._follows = True  # so what the device waits for a plan is part of its time
        return self._commit(plan, result, began)

    def advance(self, plan: StepPlan) -> list[OutputEvent]:
        """Submit a step and collect the one before. Returns the events of the latter.

        A step that fails ends its own sequences; if it fails when it is collected, also those of
        the step submitted after it. Raises RunnerLost.
        """
        self._answers.retain(lambda sequence_id: self._scheduler.sequence(sequence_id) is not None)
        self._ask()
        self._look_ahead(plan)
        if self._scheduler.unanswered or not all(one.is_known for one in self._drafted.values()):
            self._wait(lambda: True, 0.0)  # the questions leave now, while the device computes
        before, self._in_flight = self._in_flight, NO_STEP
        began, follows, self._follows = self._began, self._follows, False
        if not follows:
            self._began = self._latency.now()
        if not before.is_due:
            self._filled = []
        if plan.is_filling:  # at its submission, while the step before has the device
            self._filled.append(plan.number)
        news = []
        if (failure := self._submit(plan)) is not None:
            # Now, for a sequence that ends with the step before must not count on this one.
            news, plan = self._fail(plan, failure), NO_STEP
        result = self._collect(before)
        if isinstance(result, Failure):
            return news + self._fail(before, result) + self._fail(plan, result)
        self._in_flight = plan
        if before.is_due:
            return news + self._commit(before, result, began)
        return news if plan.is_due else news + self._rest()

    def sample(self) -> list[OutputEvent] | None:
        """Have the rest of the step in flight computed, and its tokens sampled.

        Returns the events of sequences whose matchers have been answered meanwhile, and of all if
        the step has failed; None where there are none.
        """
        plan = self._in_flight
        failure = self._sample(plan)
        news, self._settled = self._settled, []
        if failure is not None:
            self._in_flight = NO_STEP
            return news + self._fail(plan, failure)
        return news or None

    def _commit(self, plan: StepPlan, result: StepResult, began: float) -> list[OutputEvent]:
        """Commit a collected step. The next one has the device from now on."""
        self._began = self._latency.now()
        seconds = self._began - began
        self._latency.stepped(seconds)
        filled, self._filled = self._filled, []
        waited_seconds, self._waited_seconds = self._waited_seconds, 0.0
        self._step_seconds = max(seconds - waited_seconds, 0.0)
        if self._step_seconds > waited_seconds:  # else it says nothing of the model
            self._scheduler.took(plan, filled, seconds)
        news = self._scheduler.commit(plan, result)
        self._ask()
        return news + self._settle([s for s in self._scheduler.unanswered if s.unread], EARLY_SHARE)

    def _ask(self) -> None:
        """Ask for the answers of matchers, while the device computes."""
        for sequence in self._scheduler.unanswered:
            if (matcher := sequence.unanswered) is not None:
                self._answers.ask(sequence.id, sequence.request.client, matcher)

    def _look_ahead(self, plan: StepPlan) -> None:
        """Ask what may follow along the drafts of guided sequences, while the device computes."""
        self._drafted.clear()
        for chunk in plan.chunks:
            sequence = self._scheduler.sequence(chunk.sequence_id)
            if chunk.n_drafts and sequence is not None:
                drafted = GuidedDraft(sequence.guide, chunk.tokens[-chunk.n_drafts :])
                self._drafted[sequence.id] = drafted
                if drafted.question is not None:
                    self._answers.look_ahead(sequence.id, sequence.request.client, drafted.question)

    def _rest(self) -> list[OutputEvent]:
        """No step is due. Sequences that are complete wait for their last tokens to be read."""
        if unanswered := self._scheduler.unanswered:
            self._wait(_any_answered(unanswered), ALONE_SECONDS)
        return self._scheduler.settle()

    def _settle(self, rows: list[LiveSequence], share: float) -> list[OutputEvent]:
        """Wait for the rows' matchers, for such a share of a step's time."""
        self._wait(_all_answered(rows), share * self._step_seconds)
        return self._scheduler.settle()

    def _wait(self, is_enough: Callable[[], bool], seconds: float) -> None:
        began = self._latency.now()
        self._answers.wait(is_enough, seconds)
        self._waited_seconds += self._latency.now() - began

    def _submit(self, plan: StepPlan) -> Failure | None:
        return _attempt(lambda: self._runner.submit(plan)) if plan.is_due else None

    def _collect(self, plan: StepPlan) -> StepResult | Failure:
        return _attempt(self._runner.collect) if plan.is_due else NO_RESULT

    def _sample(self, plan: StepPlan) -> Failure | None:
        masks = partial(self._mask, plan)
        return _attempt(lambda: self._runner.sample(masks)) if plan.is_due else None

    def _mask(self, plan: StepPlan) -> StepMasks:
        """The masks of the guided rows, after their last tokens. Rows whose matchers have not been
        answered are late: they sit the step out.
        """
        rows = [s for s in map(self._scheduler.sequence, plan.sampling()) if s is not None]
        self._settled = self._scheduler.settle()  # what is known already
        began = self._latency.now()
        if any(sequence.unanswered for sequence in rows):
            self._await_answers(rows, len(list(plan.rows())))
        self._await_drafts(began + LATE_SHARE * self._step_seconds)
        late, draws = list[SequenceId](), list[_Draw]()
        for sequence in rows:
            sequence.keeps_logits = False
            if sequence.unanswered is not None:
                sequence.sit_out()
                late.append(sequence.id)
            elif sequence.is_live:
                draws += self._draws(sequence)
        if not draws:
            return StepMasks(late=late)
        choices = [draw.choice for draw in draws]
        banned = [draw.banned for draw in draws]
        masks = masks_of(choices, banned, self._answers.n_words)
        return StepMasks([draw.sequence_id for draw in draws], masks, late)

    def _draws(self, sequence: LiveSequence) -> list[_Draw]:
        """What a sequence draws with masks: one token, or one behind each of its drafts as well, as
        far as is known what may follow these. None where it may draw all there are without.
        """
        drafted = self._drafted.get(sequence.id)
        choices, n_draws = [sequence.guide.choice], 1
        if drafted is not None:
            choices += drafted.choices()
            n_draws += drafted.n_tokens
        if len(choices) == n_draws and not any(choice is not None for choice in choices):
            return []
        return [
            _Draw(sequence.id, choice, sequence.banned_tokens(behind=behind))
            for behind, choice in enumerate(choices)
        ]

    def _await_drafts(self, until: float) -> None:
        """Wait for what may follow drafts, until then. What is late is not drawn."""
        drafted = [draft for draft in self._drafted.values() if not draft.is_known]
        if drafted:
            seconds = max(until - self._latency.now(), 0.0)
            self._wait(lambda: all(draft.is_known for draft in drafted), seconds)
            self._settled += self._scheduler.settle()

    def _await_answers(self, rows: list[LiveSequence], n_rows: int) -> None:
        """Wait for late answers: not long where other rows could go on, and once for each answer.
        Of the step's `n_rows`, some may compute a prompt and sample nothing yet.
        """
        unanswered = [sequence for sequence in rows if sequence.unanswered is not None]
        if len(unanswered) < n_rows:
            fresh = [sequence for sequence in unanswered if not sequence.keeps_logits]
            self._settled += self._settle(fresh, LATE_SHARE)
        else:
            self._wait(_any_answered(unanswered), ALONE_SECONDS)
            self._settled += self._scheduler.settle()

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


def _all_answered(rows: Sequence[LiveSequence]) -> Callable[[], bool]:
    return lambda: all(sequence.unanswered is None for sequence in rows)


def _any_answered(rows: Sequence[LiveSequence]) -> Callable[[], bool]:
    return lambda: any(sequence.unanswered is None for sequence in rows)
