"""The grammar side of a step: requests masks from workers while the device computes, and waits for
them.

    before a step is submitted     ask()           questions leave, also along drafts
    while the step samples         masks()         what is known, after a short wait
    when a step was committed      after_commit()  pending tokens whose grammar has answered
    when no step is due            rest()          a wait for the first answer

The engine thread waits for a share of a step's time, which costs nothing while the device computes.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from engine.core.scheduler import Scheduler
from engine.core.sequence import LiveSequence, Step
from engine.core.step import (
    NO_MASKS,
    Late,
    Masks,
    Prefill,
    Resample,
    Row,
    SequenceId,
    StepMasks,
    Verify,
)
from engine.grammar.lookahead import GuidedDraft
from engine.grammar.masks import masks_of
from engine.grammar.matcher import LookAhead, Matcher

EMIT_SHARE, SAMPLE_SHARE = 1 / 16, 3 / 16
"""Shares of a step's time to wait for masks: before a token's text is delivered, and before other
rows are sampled without the late one."""

MASK_WAIT_IDLE_SECONDS = 0.05
"""Longest wait for a mask when no other row can run: a new request waits no longer than that."""


class Answers(Protocol):
    """Answers matchers: `MatcherAnswers`, or a test. Engine thread only."""

    @property
    def n_words(self) -> int:
        """The length of a mask, in words of 32 tokens."""
        ...

    def ask(self, sequence: SequenceId, client: str, matcher: Matcher) -> None:
        """Ask for the answer of the sequence's present matcher. Asking again changes nothing. The
        matcher is forgotten when it ends.
        """
        ...

    def look_ahead(self, sequence: SequenceId, client: str, question: LookAhead) -> None:
        """Ask for the masks along a draft, and for its matcher's answer. Another draft of the
        sequence is followed no more.
        """
        ...

    def wait(self, is_enough: Callable[[], bool], seconds: float) -> None:
        """Send the questions and receive answers, until there are enough or `seconds` have
        passed.
        """
        ...

    def close(self) -> None:
        """End the worker processes."""
        ...


class GrammarStage:
    """Masks for the guided sequences of one scheduler. `waited_seconds` is the time that the engine
    thread has waited for answers since the loop last reset it.
    """

    def __init__(self, scheduler: Scheduler, answers: Answers, now: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._sequences = scheduler.sequences
        self._answers = answers
        self._now = now
        self._drafted: dict[SequenceId, GuidedDraft] = {}  # drafts that the step verifies
        self.waited_seconds = 0.0

    def ask(self, step: Step | None) -> None:
        """Ask for the answers of matchers and for masks along the step's drafts."""
        self._ask_matchers()
        self._drafted.clear()
        if step is not None and step.n_drafts:
            self._look_ahead(step)
        is_known = all(draft.is_known for draft in self._drafted.values())
        if self._sequences.unanswered or not is_known:
            self._wait(lambda: True, 0.0)  # the questions leave now, while the device computes

    def masks(self, step: Step, step_seconds: float) -> StepMasks:
        """The masks of the guided rows, after their last tokens. Rows whose matchers have not been
        answered are late: their logits are saved.
        """
        began = self._now()
        self._scheduler.emit_unblocked()
        rows = [
            planned.sequence
            for planned in step.rows
            if planned.sequence.grammar is not None and planned.is_current and _samples(planned.row)
        ]
        if unanswered := [sequence for sequence in rows if sequence.unanswered is not None]:
            self._await_matchers(unanswered, len(step.rows), step_seconds)
        self._await_drafts(began + SAMPLE_SHARE * step_seconds)
        late, ids, masks = list[SequenceId](), list[SequenceId](), list[Masks]()
        for sequence in rows:
            if not sequence.is_live:
                continue
            if sequence.unanswered is not None:
                sequence.pending = Late()
                late.append(sequence.id)
                continue
            try:
                of_sequence = self._masks(sequence)
            except BaseException as error:
                self._scheduler.contain(sequence, error)
                continue
            if len(of_sequence):
                ids += [sequence.id] * len(of_sequence)
                masks.append(of_sequence)
        return StepMasks(ids, np.concatenate(masks), late) if ids else StepMasks(late=late)

    def after_commit(self, step_seconds: float) -> None:
        """Send the tokens that a step has sampled to their matchers, wait a moment, and emit the
        known ones.
        """
        self._ask_matchers()
        pending = [one for one in self._sequences.unanswered.values() if one.pending_token]
        self._wait(_all_answered(pending), EMIT_SHARE * step_seconds)
        self._scheduler.emit_unblocked()

    def rest(self) -> None:
        """No step is due. Wait for the first of the matchers that sequences still wait for."""
        if unanswered := list(self._sequences.unanswered.values()):
            self._wait(_any_answered(unanswered), MASK_WAIT_IDLE_SECONDS)
        self._scheduler.emit_unblocked()

    def close(self) -> None:
        """End the worker processes."""
        self._answers.close()

    def _ask_matchers(self) -> None:
        for sequence in self._sequences.unanswered.values():
            if (matcher := sequence.unanswered) is not None:
                self._answers.ask(sequence.id, sequence.request.client, matcher)

    def _look_ahead(self, step: Step) -> None:
        """Ask for the masks along the drafts of guided sequences."""
        for sequence, _, row in step.rows:
            if sequence.grammar is None or not isinstance(row, Verify) or not sequence.is_live:
                continue
            try:
                drafted = GuidedDraft(sequence.grammar, row.draft)
            except BaseException as error:
                self._scheduler.failures[sequence] = error
                continue
            self._drafted[sequence.id] = drafted
            if drafted.question is not None:
                self._answers.look_ahead(sequence.id, sequence.request.client, drafted.question)

    def _masks(self, sequence: LiveSequence) -> Masks:
        """The masks of a sequence's draws: of one token, or after each token of its draft as well,
        as far as the masks there are known. Empty if no draw needs one.
        """
        assert sequence.grammar is not None
        drafted = self._drafted.get(sequence.id)
        choices, n_draws = [sequence.grammar.choice], 1
        if drafted is not None:
            choices += drafted.choices()
            n_draws += drafted.n_tokens
        if len(choices) == n_draws and not any(choice is not None for choice in choices):
            return NO_MASKS
        banned = [sequence.banned_tokens(n_draft) for n_draft in range(len(choices))]
        return masks_of(choices, banned, self._answers.n_words)

    def _await_matchers(
        self, unanswered: list[LiveSequence], n_rows: int, step_seconds: float
    ) -> None:
        """Wait for late answers: a short time where other rows of the step could continue, and once
        for each answer. Some of the step's `n_rows` may prefill and sample nothing yet.
        """
        if len(unanswered) < n_rows:
            fresh = [one for one in unanswered if not isinstance(one.pending, Resample)]
            self._wait(_all_answered(fresh), SAMPLE_SHARE * step_seconds)
        else:
            self._wait(_any_answered(unanswered), MASK_WAIT_IDLE_SECONDS)
        self._scheduler.emit_unblocked()

    def _await_drafts(self, until: float) -> None:
        """Wait for the masks along drafts until that time. Draws with late masks are skipped."""
        unknown = [draft for draft in self._drafted.values() if not draft.is_known]
        if unknown:
            seconds = max(until - self._now(), 0.0)
            self._wait(lambda: all(draft.is_known for draft in unknown), seconds)
            self._scheduler.emit_unblocked()

    def _wait(self, is_enough: Callable[[], bool], seconds: float) -> None:
        began = self._now()
        self._answers.wait(is_enough, seconds)
        self.waited_seconds += self._now() - began


def _samples(row: Row) -> bool:
    return row.samples if isinstance(row, Prefill) else True


def _all_answered(rows: Sequence[LiveSequence]) -> Callable[[], bool]:
    return lambda: all(sequence.unanswered is None for sequence in rows)


def _any_answered(rows: Sequence[LiveSequence]) -> Callable[[], bool]:
    return lambda: any(sequence.unanswered is None for sequence in rows)
