"""Takes in what a step has computed of a sequence: KV is published, tokens are appended and read,
and a sequence that ends leaves.
"""

from collections.abc import Callable, Iterator, Sequence

from engine.constraints.matcher import Matcher, Refused, Unanswerable
from engine.core.metrics import SchedulerCounters
from engine.core.sequence import LiveSequence, LiveSequences, lease_of
from engine.core.step import SampledToken, StepResult
from engine.drafts.proposer import Speculator
from engine.drafts.sources import Draft
from engine.output.text import TextDelta
from engine.values.output import FinishReason, OutputEvent, TokenLogprob, Usage
from kvstore.lease import Lease
from kvstore.store import KVStore


def admission_event(sequence: LiveSequence) -> OutputEvent:
    """It has been admitted for the first time."""
    return OutputEvent(
        request_id=sequence.request.id,
        index=sequence.index,
        admission=Usage(sequence.prompt_tokens, sequence.cached_tokens, 0),
    )


def prompt_logprobs_event(
    sequence: LiveSequence, part: tuple[TokenLogprob | None, ...]
) -> OutputEvent:
    """The next entries of its prompt's log-probabilities."""
    return OutputEvent(request_id=sequence.request.id, index=sequence.index, prompt_logprobs=part)


def token_event(sequence: LiveSequence, sampled: SampledToken, delta: TextDelta) -> OutputEvent:
    """A token that it has generated, with the text that it completes."""
    return OutputEvent(
        request_id=sequence.request.id,
        index=sequence.index,
        text=delta.text,
        token_ids=(sampled.token_id,),
        logprobs=(sampled.logprob,) if sampled.logprob else (),
        finish_reason=delta.finish_reason,
        stopped_by=delta.stopped_by,
        usage=sequence.usage if delta.finish_reason else None,
    )


def end_event(sequence: LiveSequence, reason: FinishReason) -> OutputEvent:
    """It has ended without another token."""
    return OutputEvent(
        request_id=sequence.request.id,
        index=sequence.index,
        pooled=_pooled(sequence) if reason is FinishReason.LENGTH else b"",
        finish_reason=reason,
        usage=sequence.usage,
    )


def failure_event(sequence: LiveSequence, message: str) -> OutputEvent:
    """It could not be computed."""
    return OutputEvent(
        request_id=sequence.request.id,
        index=sequence.index,
        finish_reason=FinishReason.ERROR,
        usage=sequence.usage,
        error=message,
    )


def refusal_event(sequence: LiveSequence, matcher: Matcher) -> OutputEvent:
    """It cannot follow its grammar any further. Where that is not the grammar's fault, the event
    names no field of the request.
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


def _pooled(sequence: LiveSequence) -> bytes:
    return b"" if sequence.vector is None else sequence.vector.astype("<f4").tobytes()


PROMPT_LOGPROBS_AT_ONCE = 1024
"""Entries in one event: with twenty alternatives each, less than a megabyte of JSON."""

Leave = Callable[[LiveSequence], Lease | None]
"""Removes a sequence that has ended from everywhere. Returns its lease, if it has one."""


class Progress:
    """What becomes of the sequences of a scheduler."""

    def __init__(
        self,
        store: KVStore,
        live: LiveSequences,
        counters: SchedulerCounters,
        speculator: Speculator,
        leave: Leave,
    ) -> None:
        self._store = store
        self._live = live
        self._counters = counters
        self._speculator = speculator
        self._leave = leave

    def take_in(
        self, sequence: LiveSequence, n_tokens: int, result: StepResult
    ) -> list[OutputEvent]:
        """A step has computed so many tokens of the sequence, and verified its draft."""
        draft, sequence.draft = sequence.draft, None
        if message := result.failed.get(sequence.id):
            return [self.fail(sequence, message)]
        if not lease_of(sequence).is_tentative:
            self._publish(sequence, n_tokens)
        if (vector := result.pooled.get(sequence.id)) is not None:
            sequence.pool(vector)
        if sequence.is_aborted:
            return [self.end(sequence, FinishReason.ABORT)]
        news = _scores(sequence, result.scored.get(sequence.id, ()))
        sampled = result.sampled.get(sequence.id, ())
        if draft is None:
            return news + self._take(sequence, sampled)
        return news + self._take_drafted(sequence, n_tokens, draft, sampled)

    def settled(self, sequence: LiveSequence) -> list[OutputEvent]:
        """Its guide has been answered: read its last token, if there is an unread one."""
        if (failed := sequence.failed) is not None:
            self._retire(sequence)
            return [refusal_event(sequence, failed)]
        sampled = sequence.unread
        if sampled is None:
            return []
        delta = sequence.read(sampled)
        if delta.finish_reason:
            self._retire(sequence)
        return [token_event(sequence, sampled, delta)]

    def end(self, sequence: LiveSequence, reason: FinishReason) -> OutputEvent:
        """The sequence ends without another token."""
        self._retire(sequence)
        return end_event(sequence, reason)

    def fail(self, sequence: LiveSequence, message: str) -> OutputEvent:
        """Its blocks are undefined: release them, and donate none to the cache."""
        lease = lease_of(sequence)
        self._leave(sequence)
        self._store.release(lease)
        return failure_event(sequence, message)

    def _take(self, sequence: LiveSequence, sampled: Sequence[SampledToken]) -> list[OutputEvent]:
        """Append what it has sampled, until it ends. All but the last were drafted, and have KV."""
        if not sampled:
            return [self.end(sequence, FinishReason.LENGTH)] if sequence.is_computed else []
        sequence.have_sampled()
        news = list[OutputEvent]()
        for token in sampled[:-1]:
            sequence.accepted_drafts += 1
            news += self._append(sequence, token)
            if not sequence.is_live:
                return news
            if not lease_of(sequence).is_tentative:
                self._publish(sequence, 1)
        return news + self._append(sequence, sampled[-1])

    def _take_drafted(
        self,
        sequence: LiveSequence,
        n_tokens: int,
        draft: Draft,
        sampled: Sequence[SampledToken],
    ) -> list[OutputEvent]:
        """The same, where the step has computed `n_tokens` and the draft behind them. A tentative
        lease keeps all of that or nothing; what has no KV then is planned again.
        """
        n_drafts, accepted_before = len(draft.tokens), sequence.accepted_drafts
        if not sampled:  # it sits out
            self._store.rewind(lease_of(sequence))
            return []
        sequence.drafted_tokens += n_drafts
        news = self._take(sequence, sampled)
        n_accepted = sequence.accepted_drafts - accepted_before
        self._counters.count_draft(draft.source, n_drafts, n_accepted)
        if not sequence.is_live:
            return news
        if lease_of(sequence).is_tentative and len(sampled) > n_drafts:
            self._publish(sequence, n_tokens + n_drafts)
        else:
            self._store.rewind(lease_of(sequence))
        return news

    def _publish(self, sequence: LiveSequence, n_tokens: int) -> None:
        lease = lease_of(sequence)
        start = lease.written_tokens
        self._store.publish(lease, start + n_tokens)
        if start < sequence.prompt_tokens:
            computed = min(start + n_tokens, sequence.prompt_tokens) - start
            self._counters.computed_prompt_tokens += computed

    def _append(self, sequence: LiveSequence, sampled: SampledToken) -> list[OutputEvent]:
        sequence.take(sampled)
        self._counters.generated_tokens += 1
        return [] if self._live.must_be_answered(sequence) else self.settled(sequence)

    def _retire(self, sequence: LiveSequence) -> None:
        lease = self._leave(sequence)
        self._speculator.ended(sequence.namespace, sequence.tokens, sequence.prompt_tokens)
        if lease is not None:
            self._store.donate(lease)


def _scores(sequence: LiveSequence, scores: Sequence[TokenLogprob]) -> list[OutputEvent]:
    """The events that send what a chunk of a scored prompt has given."""
    return [
        prompt_logprobs_event(sequence, part)
        for part in _parts(sequence.take_scores(scores), PROMPT_LOGPROBS_AT_ONCE)
    ]


def _parts(
    entries: tuple[TokenLogprob | None, ...], length: int
) -> Iterator[tuple[TokenLogprob | None, ...]]:
    for start in range(0, len(entries), length):
        yield entries[start : start + length]
