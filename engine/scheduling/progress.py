"""Takes in what a step has computed of a sequence: KV is published, tokens are appended and read,
and a sequence that ends leaves.
"""

from collections.abc import Callable, Iterator, Sequence

from engine.drafts.draft import Draft
from engine.drafts.speculator import Speculator
from engine.scheduling import events
from engine.scheduling.counters import SchedulerCounters
from engine.scheduling.sequence import LiveSequence, LiveSequences, lease_of
from engine.step.plan import SampledToken, StepResult
from engine.types.output import FinishReason, OutputEvent, TokenLogprob
from kvstore.lease import Lease
from kvstore.store import KVStore

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
            return [events.refusal(sequence, failed)]
        sampled = sequence.unread
        if sampled is None:
            return []
        delta = sequence.read(sampled)
        if delta.finish_reason:
            self._retire(sequence)
        return [events.token(sequence, sampled, delta)]

    def end(self, sequence: LiveSequence, reason: FinishReason) -> OutputEvent:
        """The sequence ends without another token."""
        self._retire(sequence)
        return events.end(sequence, reason)

    def fail(self, sequence: LiveSequence, message: str) -> OutputEvent:
        """Its blocks are undefined: release them, and donate none to the cache."""
        lease = lease_of(sequence)
        self._leave(sequence)
        self._store.release(lease)
        return events.failure(sequence, message)

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
        events.prompt_logprobs(sequence, part)
        for part in _parts(sequence.take_scores(scores), PROMPT_LOGPROBS_AT_ONCE)
    ]


def _parts(
    entries: tuple[TokenLogprob | None, ...], length: int
) -> Iterator[tuple[TokenLogprob | None, ...]]:
    for start in range(0, len(entries), length):
        yield entries[start : start + length]
