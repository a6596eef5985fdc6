"""The grammar side of a step: requests masks from workers while the device computes, and waits for
them.

    before a step is submitted     ask()           questions leave, also along drafts
    while the step samples         masks()         what is known, after a short wait
    when a step was committed      after_commit()  pending tokens whose grammar has answered
    when no step is due            rest()          a wait for the first answer

The engine thread waits for a share of a step's time, which costs nothing while the device computes.
"""

from collections.abc import Callable, Sequence

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
from engine.grammar.answers import MatcherAnswers
from engine.grammar.state import (
    AllBut,
    Allowed,
    Choice,
    GrammarChoice,
    GrammarState,
    LookAhead,
    Matcher,
    TokenIds,
)

WORD_TOKENS = 32


def mask_words(vocab_size: int) -> int:
    """The length of a mask, in words of 32 tokens."""
    return -(-vocab_size // WORD_TOKENS)


EMIT_SHARE, SAMPLE_SHARE = 1 / 16, 3 / 16
"""Shares of a step's time to wait for masks: before a token's text is delivered, and before other
rows are sampled without the late one."""

MASK_WAIT_IDLE_SECONDS = 0.05
"""Longest wait for a mask when no other row can run: a new request waits no longer than that."""


class GuidedDraft:
    """The draft of a guided sequence, whose state has accepted none of its tokens.

        drafted = GuidedDraft(sequence.grammar, draft)    when the step is planned
        answers.look_ahead(..., drafted.question)         while the device computes
        [sequence.grammar.choice, *drafted.choices()]     when the step samples

    The masks of one matcher can be requested along a draft; where another has to be answered, they
    end. Answers to accepted draft tokens are kept by the matcher, and are not requested again.
    """

    def __init__(self, state: GrammarState, draft: TokenIds) -> None:
        self._state = state
        self._draft = draft
        self.question = self._first_question()
        if self.question is not None:
            self.question.matcher.ahead = self.question

    @property
    def n_tokens(self) -> int:
        """The length of the draft."""
        return len(self._draft)

    @property
    def is_known(self) -> bool:
        """Whether every answer that was requested has come."""
        question = self.question
        if question is None:
            return True
        return question.matcher.answer is not None and question.answers is not None

    def choices(self) -> list[Choice]:
        """The choices after each token of the draft, as far as they are known: fewer than tokens if
        answers are missing, or if the sequence ends with one of the tokens. The state has its
        answer and has advanced.
        """
        known, ahead = list[Choice](), self._state.copy()
        for token_id in self._draft:
            ahead.accept(token_id)
            if (matcher := ahead.matcher) is not None and not self._answer(matcher):
                break
            ahead.advance()
            if ahead.is_complete:
                break
            known.append(ahead.choice)
        return known

    def _answer(self, matcher: Matcher) -> bool:
        """Set the answer of a forked matcher from the question's. False if it is not known, or if
        the grammar ends before the fork's tokens.
        """
        question, n_tokens = self.question, len(matcher.tokens)
        if question is None or matcher.parent is not question.matcher:
            return False
        first = question.matcher.answer
        if not isinstance(first, Allowed) or n_tokens > len(question.answers or ()):
            return False
        matcher.answer = (first, *(question.answers or ()))[n_tokens]
        return True

    def _first_question(self) -> LookAhead | None:
        """The question to the first matcher along the draft; None if there is none."""
        origin: Matcher | None = None
        tokens: TokenIds = ()
        ahead = self._state.copy()
        for token_id in self._draft:
            ahead.accept(token_id)
            if (matcher := ahead.matcher) is not None:
                origin = origin or matcher.parent
                if matcher.parent is origin:
                    tokens = tuple(matcher.tokens)
        return None if origin is None else LookAhead(origin, tokens)


class GrammarStage:
    """Masks for the guided sequences of one scheduler. `waited_seconds` is the time that the engine
    thread has waited for answers since the loop last reset it.
    """

    def __init__(
        self, scheduler: Scheduler, answers: MatcherAnswers, now: Callable[[], float]
    ) -> None:
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


def masks_of(choices: Sequence[Choice], banned: Sequence[Sequence[int]], n_words: int) -> Masks:
    """One mask for each choice, `[choices, n_words]`. The choices' matchers have been answered.

    Tokens that are `banned` in a row are masked unless no other is left: the grammar wins over
    `min_tokens`. A row is empty if its grammar is complete or has failed.
    """
    masks = np.zeros((len(choices), n_words), dtype=np.int32)
    for words, choice, tokens in zip(masks, choices, banned, strict=True):
        match choice:
            case GrammarChoice(answer, others):
                assert answer is not None, "the matcher has not been answered"
                if isinstance(answer, Allowed):
                    words[:] = answer.mask
                for token_id in others:
                    _allow(words, token_id)
            case AllBut(token_ids):
                words[:] = -1
                _ban(words, token_ids)
            case int():
                _allow(words, choice)
            case None:
                words[:] = -1
        _ban(words, tokens)
    return masks


def _allow(words: Masks, token_id: int) -> None:
    """Set the token's bit. Ignores a token that the model does not have: a row without any other
    then fails alone.
    """
    if token_id < WORD_TOKENS * len(words):
        words.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


def _ban(words: Masks, tokens: Sequence[int]) -> None:
    """Clear the tokens' bits, unless no bit would be left. Ignores tokens that the model does not
    have: a checkpoint may name such an end token.
    """
    left = words.view(np.uint32).copy()
    for token_id in tokens:
        if 0 <= token_id < WORD_TOKENS * len(words):
            left[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
    if left.any():
        words[:] = left.view(np.int32)
