"""Applies the results of a step: KV is published, tokens are appended and emitted, and sequences
that end leave.
"""

import logging
from collections.abc import Sequence

from engine.core.admission import Admission
from engine.core.drafting import DraftPolicy
from engine.core.metrics import Metrics
from engine.core.pins import Pins
from engine.core.sequence import LiveSequence, LiveSequences, PlannedRow, Status
from engine.core.step import (
    Decode,
    Failed,
    Prefill,
    Prefilled,
    RowResult,
    Sampled,
    SampledToken,
    Verified,
    Verify,
)
from engine.grammar.state import Refused, Unanswerable
from engine.values.output import FinishReason, OutputEvent, Usage
from kvstore.lease import Lease
from kvstore.store import KVStore

logger = logging.getLogger(__name__)

PROMPT_LOGPROBS_AT_ONCE = 1024
"""Entries in one event: with twenty alternatives each, less than a megabyte of JSON."""


class Commit:
    """Applies results to the live sequences of one scheduler, and collects their `events`."""

    def __init__(
        self,
        store: KVStore,
        sequences: LiveSequences,
        admission: Admission,
        metrics: Metrics,
        drafts: DraftPolicy | None,
        pins: Pins,
    ) -> None:
        self.events: list[OutputEvent] = []
        self._store = store
        self._sequences = sequences
        self._admission = admission
        self._metrics = metrics
        self._drafts = drafts
        self._pins = pins
        self._now = 0.0  # of the metrics' clock, which is read once for all tokens of a step

    def step(self, rows: Sequence[PlannedRow], results: Sequence[RowResult]) -> None:
        """Apply each row's result to its sequence.

        Rows of sequences that have ended or been preempted since the step was planned are skipped,
        also if the sequence has been admitted again. It will draw the same tokens again.
        """
        self._now = self._metrics.now()
        for planned, result in zip(rows, results, strict=True):
            if planned.is_current:
                try:
                    self._apply(planned, result)
                except BaseException as error:
                    self.contain(planned.sequence, error)

    def _apply(self, planned: PlannedRow, result: RowResult) -> None:
        """Apply the result of one row to its sequence."""
        sequence, lease, row = planned
        if type(result) is Failed:
            self.fail(sequence, result.message)
            return
        if type(row) is Decode:
            self._store.commit(lease, 1)
        elif isinstance(row, Prefill):
            self._prefilled(sequence, lease, row, result)
        elif isinstance(row, Verify):
            self._verified(sequence, lease, row, result)
        if sequence.status is Status.ABORTING:
            self.end(sequence, FinishReason.ABORT)
        elif type(result) is Sampled:
            if self._append(sequence, result.token):
                self._retire(sequence)
        elif not sequence.request.max_tokens and lease.written_tokens == len(sequence.tokens):
            if sequence.request.pin:
                self._end_pinned(sequence)
            else:
                self.end(sequence, FinishReason.LENGTH)

    def admitted(self, sequence: LiveSequence) -> None:
        """Count and report the sequence's first admission."""
        self._metrics.admitted(sequence)
        usage = Usage(sequence.prompt_tokens, sequence.cached_tokens, 0)
        self.events.append(OutputEvent(sequence.request.id, sequence.index, admission=usage))

    def emit_unblocked(self) -> None:
        """Emit the pending tokens of sequences whose grammar has answered since."""
        self._now = self._metrics.now()
        for sequence in self._sequences.take_answered():
            try:
                if self._emit(sequence, sequence.pending_token):
                    self._retire(sequence)
            except BaseException as error:
                self.contain(sequence, error)

    def end(self, sequence: LiveSequence, reason: FinishReason) -> None:
        """End the sequence without another token. Its computed tokens go to the cache."""
        vector = sequence.vector if reason is FinishReason.LENGTH else None
        pooled = b"" if vector is None else vector.astype("<f4").tobytes()
        self._emit_end(sequence, reason, pooled=pooled)
        self._retire(sequence)

    def _end_pinned(self, sequence: LiveSequence) -> None:
        """End a sequence whose prompt is computed, and pin the prompt. Others may have been pinned
        since the request was accepted: then it ends with an error.
        """
        problem = self._pins.pin(sequence.namespace, sequence.tokens)
        if problem is None:
            self.end(sequence, FinishReason.LENGTH)
        else:
            self._emit_end(sequence, FinishReason.ERROR, problem, "pin")
            self._retire(sequence)

    def fail(self, sequence: LiveSequence, message: str) -> None:
        """End the sequence with an error. Its KV is undefined, so none of it goes to the cache."""
        self.drop(sequence, FinishReason.ERROR, message)

    def drop(
        self, sequence: LiveSequence, reason: FinishReason, message: str | None = None
    ) -> None:
        """End a sequence whose KV is undefined. None of it goes to the cache."""
        self._emit_end(sequence, reason, message)
        if (lease := self._remove(sequence)) is not None:
            self._store.release(lease)

    def contain(self, sequence: LiveSequence, error: BaseException) -> None:
        """End a sequence whose code on the host has raised `error`, with an error. No other is
        affected. The panics of libraries in Rust are no `Exception`.

        Whoever runs code of one sequence for the engine thread calls this: its detokenizer, its
        grammar's state, its drafts, and the description of its rows.
        """
        logger.error("sequence %d has failed", sequence.id, exc_info=error)
        if sequence.is_live:
            self.fail(sequence, f"the sequence failed: {type(error).__name__}: {error}")

    def _prefilled(
        self, sequence: LiveSequence, lease: Lease, row: Prefill, result: RowResult
    ) -> None:
        """Publish the KV of the row's tokens, and take its scores and its pooled vector."""
        assert not isinstance(result, Verified | Failed)
        n_tokens = len(row.tokens)
        self._store.commit(lease, n_tokens)
        n_prompt = max(min(row.start + n_tokens, sequence.prompt_tokens) - row.start, 0)
        self._metrics.computed_prompt_tokens += n_prompt
        if sequence.request.is_background:
            self._metrics.warmed_tokens += n_prompt
        if isinstance(result, Prefilled) and result.vector is not None:
            sequence.pool(result.vector)
        if sequence.status is Status.RUNNING:
            request = sequence.request
            if n_prompt and request.reports_progress:
                read_tokens = row.start + n_prompt
                self.events.append(OutputEvent(request.id, sequence.index, read_tokens=read_tokens))
            entries = sequence.take_scores(row.start, result.scores)  # for all of the request
            self.events += [
                OutputEvent(
                    sequence.request.id,
                    sequence.index,
                    prompt_logprobs=entries[at : at + PROMPT_LOGPROBS_AT_ONCE],
                )
                for at in range(0, len(entries), PROMPT_LOGPROBS_AT_ONCE)
            ]

    def _verified(
        self, sequence: LiveSequence, lease: Lease, row: Verify, result: RowResult
    ) -> None:
        """Append the accepted draft tokens and the token after them, until the sequence ends.

        As many computed positions are right as tokens are appended. If the store had to restore an
        earlier state, the tokens after it are prefilled again.
        """
        n_draft = len(row.draft)
        if not isinstance(result, Verified) or sequence.status is not Status.RUNNING:
            self._store.commit(lease, 1 + n_draft, 1)  # only its own token counts
            return
        n_accepted, n_before = len(result.tokens) - 1, sequence.accepted_drafts
        sequence.drafted_tokens += n_draft
        n_appended, has_ended = 0, False
        try:
            for token in result.tokens:
                n_appended += 1
                sequence.accepted_drafts = n_before + min(n_appended, n_accepted)
                if has_ended := self._append(sequence, token):
                    break
        except BaseException:
            sequence.accepted_drafts = n_before + n_appended - 1  # the last was not emitted
            raise
        finally:
            if sequence.draft_source is not None:
                n_counted = sequence.accepted_drafts - n_before
                self._metrics.verified(sequence.draft_source, n_draft, n_counted)
        self._store.commit(lease, 1 + n_draft, n_appended)
        if has_ended:
            self._retire(sequence)
        elif sequence.unplanned_tokens > 1:
            self._sequences.prefill_again(sequence)

    def _append(self, sequence: LiveSequence, token: SampledToken) -> bool:
        """Append a sampled token, and emit it unless its grammar has yet to answer. Return whether
        the sequence ends with it.
        """
        sequence.tokens.append(token.token_id)
        sequence.pending_token = token
        self._metrics.generated_tokens += 1
        if sequence.proposer is not None:
            sequence.proposer.accept(token.token_id)
        if sequence.grammar is not None:
            sequence.grammar.accept(token.token_id)
            if self._sequences.wait_for_grammar(sequence):
                return False
        return self._emit(sequence, token)

    def _emit(self, sequence: LiveSequence, token: SampledToken | None) -> bool:
        """Emit the sequence's last token, unless it was emitted before. Return whether the sequence
        ends: with this token, or because its grammar cannot be followed further.
        """
        if sequence.grammar is not None:
            sequence.grammar.advance()
            if (failed := sequence.failed) is not None:
                answer = failed.answer
                assert isinstance(answer, Refused | Unanswerable)
                message = f"{failed.param}: {answer.error}"
                is_at_fault = isinstance(answer, Refused)  # else no field of the request is named
                param = failed.param if is_at_fault else None
                self._emit_end(sequence, FinishReason.ERROR, message, param)
                return True
        if token is None:
            return False
        delta = sequence.emit(token)
        reason = delta.finish_reason
        self.events.append(
            OutputEvent(
                sequence.request.id,
                sequence.index,
                delta.text,
                (token.token_id,),
                () if token.logprob is None else (token.logprob,),
                finish_reason=reason,
                stopped_by=delta.stopped_by,
                usage=None if reason is None else sequence.usage,
            )
        )
        self._metrics.token(sequence, self._now)
        return reason is not None

    def _emit_end(
        self,
        sequence: LiveSequence,
        reason: FinishReason,
        error: str | None = None,
        param: str | None = None,
        pooled: bytes = b"",
    ) -> None:
        """Emit the last event of a sequence that ends without another token."""
        self.events.append(
            OutputEvent(
                sequence.request.id,
                sequence.index,
                pooled=pooled,
                finish_reason=reason,
                usage=sequence.usage,
                error=error,
                param=param,
            )
        )

    def _retire(self, sequence: LiveSequence) -> None:
        """Remove a finished sequence. Its computed tokens go to the cache."""
        lease = self._remove(sequence)
        if lease is not None:
            self._store.donate(lease)
        if self._drafts is not None and sequence.request.shared_tokens is None:
            self._drafts.ended(sequence.namespace, sequence.tokens, sequence.prompt_tokens)

    def _remove(self, sequence: LiveSequence) -> Lease | None:
        """Take the sequence out of the queue or the batch. Return its lease, if it has one."""
        if sequence.lease is None:  # aborted, or preempted before its grammar has answered
            self._admission.withdraw(sequence)
        lease = self._sequences.remove(sequence)
        self._admission.waiting.end(sequence)
        if self._drafts is not None:
            self._drafts.leave(sequence)
        self._metrics.finished(sequence)
        return lease
