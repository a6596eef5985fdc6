"""Applies the results of a step: KV is published, tokens are appended and emitted, and sequences
that end leave.
"""

from collections.abc import Iterable

from engine.constraints.matcher import Matcher, Refused, Unanswerable
from engine.core.metrics import Metrics
from engine.core.queue import Admission
from engine.core.sequence import LiveSequence, LiveSequences, Status
from engine.core.step import (
    Decode,
    Failed,
    Prefill,
    Prefilled,
    Resample,
    Row,
    RowResult,
    Sampled,
    SampledToken,
    Verified,
    Verify,
)
from engine.drafts.policy import DraftPolicy
from engine.values.output import FinishReason, OutputEvent, TokenLogprob, Usage
from kvstore.lease import Lease
from kvstore.store import KVStore

PROMPT_LOGPROBS_AT_ONCE = 1024
"""Entries in one event: with twenty alternatives each, less than a megabyte of JSON."""


class Commit:
    """Applies results to the live sequences of one scheduler."""

    def __init__(
        self,
        store: KVStore,
        sequences: LiveSequences,
        admission: Admission,
        metrics: Metrics,
        drafts: DraftPolicy | None,
    ) -> None:
        self._store = store
        self._sequences = sequences
        self._admission = admission
        self._metrics = metrics
        self._drafts = drafts

    def step(
        self,
        sequences: Iterable[LiveSequence],
        rows: Iterable[Row],
        results: Iterable[RowResult],
    ) -> list[OutputEvent]:
        """Apply each row's result to its sequence. Returns the events, in the rows' order.

        Sequences that have ended or been preempted since the step was planned are skipped: one that
        was preempted samples again what it has sampled here.
        """
        events = list[OutputEvent]()
        now = self._metrics.now()
        for sequence, row, result in zip(sequences, rows, results, strict=True):
            lease = sequence.lease
            if lease is None:
                continue
            if type(result) is Sampled and sequence.status is Status.RUNNING:
                self._sampled(sequence, lease, row, result, events, now)
            else:
                self._other(sequence, lease, row, result, events, now)
        return events

    def emit_unblocked(self) -> list[OutputEvent]:
        """Emit the pending tokens of the sequences whose grammars have been answered meanwhile."""
        events, now = list[OutputEvent](), self._metrics.now()
        for sequence in self._sequences.take_answered():
            if self._emit(sequence, sequence.pending_token, events, now):
                self._retire(sequence)
        return events

    def end(self, sequence: LiveSequence, reason: FinishReason) -> OutputEvent:
        """The sequence ends without another token. It keeps what it has computed in the cache."""
        self._retire(sequence)
        vector = sequence.vector if reason is FinishReason.LENGTH else None
        return OutputEvent(
            request_id=sequence.request.id,
            index=sequence.index,
            pooled=b"" if vector is None else vector.astype("<f4").tobytes(),
            finish_reason=reason,
            usage=sequence.usage,
        )

    def fail(self, sequence: LiveSequence, message: str) -> OutputEvent:
        """The KV of the sequence is undefined: none of it goes to the cache."""
        if (lease := self._remove(sequence)) is not None:
            self._store.release(lease)
        return OutputEvent(
            request_id=sequence.request.id,
            index=sequence.index,
            finish_reason=FinishReason.ERROR,
            usage=sequence.usage,
            error=message,
        )

    def _sampled(
        self,
        sequence: LiveSequence,
        lease: Lease,
        row: Row,
        result: Sampled,
        events: list[OutputEvent],
        now: float,
    ) -> None:
        """A row was computed, if it was to be, and has sampled one token."""
        if type(row) is Decode:
            self._store.commit(lease, 1)
        elif type(row) is Prefill:
            self._prefilled(sequence, lease, row, result.scores, events)
        if self._append(sequence, result.token, events, now):
            self._retire(sequence)

    def _other(
        self,
        sequence: LiveSequence,
        lease: Lease,
        row: Row,
        result: RowResult,
        events: list[OutputEvent],
        now: float,
    ) -> None:
        if isinstance(result, Failed):
            events.append(self.fail(sequence, result.message))
            return
        is_running = sequence.status is Status.RUNNING
        if is_running and isinstance(result, Verified) and isinstance(row, Verify):
            self._verified(sequence, lease, row, result, events, now)
            return
        scores = () if isinstance(result, Verified) else result.scores
        match row:
            case Prefill():
                self._prefilled(sequence, lease, row, scores, events)
            case Verify(draft=draft):  # aborted, or its mask was late: only its own token counts
                self._store.commit(lease, 1 + len(draft), 1)
            case Decode():
                self._store.commit(lease, 1)
            case Resample():
                pass
        if isinstance(result, Prefilled) and result.vector is not None:
            sequence.pool(result.vector)
        if sequence.status is Status.ABORTING:
            events.append(self.end(sequence, FinishReason.ABORT))
        elif not sequence.request.max_tokens and lease.written_tokens == len(sequence.tokens):
            events.append(self.end(sequence, FinishReason.LENGTH))

    def _prefilled(
        self,
        sequence: LiveSequence,
        lease: Lease,
        row: Prefill,
        scores: tuple[TokenLogprob, ...],
        events: list[OutputEvent],
    ) -> None:
        """Known tokens of the sequence have KV now."""
        n_tokens = len(row.tokens)
        self._store.commit(lease, n_tokens)
        n_prompt = min(row.start + n_tokens, sequence.prompt_tokens) - row.start
        self._metrics.computed_prompt_tokens += max(n_prompt, 0)
        if sequence.lacks_scores and sequence.status is Status.RUNNING:
            entries = sequence.take_scores(row.start, scores)
            events += [
                OutputEvent(
                    request_id=sequence.request.id,
                    index=sequence.index,
                    prompt_logprobs=entries[at : at + PROMPT_LOGPROBS_AT_ONCE],
                )
                for at in range(0, len(entries), PROMPT_LOGPROBS_AT_ONCE)
            ]

    def _verified(
        self,
        sequence: LiveSequence,
        lease: Lease,
        row: Verify,
        result: Verified,
        events: list[OutputEvent],
        now: float,
    ) -> None:
        """Append the accepted draft tokens and the one after them, until the sequence ends.

        Each token that is appended has the one before it computed: as many positions are right. If
        the store had to restore an earlier state, all tokens after it are prefilled again.
        """
        n_draft, n_accepted = len(row.draft), len(result.tokens) - 1
        sequence.drafted_tokens += n_draft
        n_appended, has_ended = 0, False
        for token in result.tokens:
            sequence.accepted_drafts += n_appended < n_accepted
            n_appended += 1
            if has_ended := self._append(sequence, token, events, now):
                break
        if sequence.draft_source is not None:
            n_counted = min(n_appended, n_accepted)
            self._metrics.verified(sequence.draft_source, n_draft, n_counted)
        self._store.commit(lease, 1 + n_draft, n_appended)
        if has_ended:
            self._retire(sequence)
        elif sequence.unplanned_tokens > 1:
            self._sequences.prefill_again(sequence)

    def _append(
        self,
        sequence: LiveSequence,
        token: SampledToken,
        events: list[OutputEvent],
        now: float,
    ) -> bool:
        """Append a sampled token, and emit it unless its grammar has yet to answer. Returns whether
        the sequence ends with it.
        """
        sequence.tokens.append(token.token_id)
        self._metrics.generated_tokens += 1
        if sequence.proposer is not None:
            sequence.proposer.accept(token.token_id)
        if sequence.guide is not None:
            sequence.guide.accept(token.token_id)
            sequence.pending_token = token
            if self._sequences.wait_for_grammar(sequence):
                return False
        return self._emit(sequence, token, events, now)

    def _emit(
        self,
        sequence: LiveSequence,
        token: SampledToken | None,
        events: list[OutputEvent],
        now: float,
    ) -> bool:
        """Emit the sequence's last token, if there is one that was not emitted yet. Returns whether
        the sequence ends: with this token, or because its grammar cannot be followed further.
        """
        if sequence.guide is not None and (failed := sequence.failed) is not None:
            events.append(_refusal_event(sequence, failed))
            return True
        if token is None:
            return False
        delta = sequence.emit(token)
        reason = delta.finish_reason
        events.append(
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
        self._metrics.token(sequence, now)
        return reason is not None

    def _retire(self, sequence: LiveSequence) -> None:
        """The sequence has ended. What it has computed goes to the cache."""
        lease = self._remove(sequence)
        if self._drafts is not None:
            self._drafts.ended(sequence.namespace, sequence.tokens, sequence.prompt_tokens)
        if lease is not None:
            self._store.donate(lease)

    def _remove(self, sequence: LiveSequence) -> Lease | None:
        if sequence.lease is None:  # aborted, or preempted before its grammar has answered
            self._admission.withdraw(sequence)
        lease = self._sequences.remove(sequence)
        self._admission.waiting.end(sequence)
        self._metrics.finished(sequence)
        return lease


def admission_event(sequence: LiveSequence) -> OutputEvent:
    """The sequence has been admitted for the first time."""
    return OutputEvent(
        request_id=sequence.request.id,
        index=sequence.index,
        admission=Usage(sequence.prompt_tokens, sequence.cached_tokens, 0),
    )


def _refusal_event(sequence: LiveSequence, matcher: Matcher) -> OutputEvent:
    """The sequence cannot follow its grammar any further. Where that is not the grammar's fault,
    the event names no field of the request.
    """
    assert isinstance(matcher.answer, Refused | Unanswerable)
    return OutputEvent(
        request_id=sequence.request.id,
        index=sequence.index,
        finish_reason=FinishReason.ERROR,
        usage=sequence.usage,
        error=f"{matcher.param}: {matcher.answer.error}",
        param=matcher.param if isinstance(matcher.answer, Refused) else None,
    )
