"""The outputs being generated: each one's tokens, lease and status. Engine thread only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import numpy as np

from engine.constraints.guide import FreeGuide, Guide, matcher_of
from engine.constraints.matcher import Matcher, Refused, Unanswerable
from engine.core.step import SampledToken, SequenceId, StepPlan, Vector
from engine.drafts.proposer import NO_SPECULATION, Speculation
from engine.drafts.sources import Draft
from engine.output.text import Output, TextDelta
from engine.values.output import FinishReason, TokenLogprob, Usage
from engine.values.request import Pooling, Request
from kvstore.lease import Lease
from kvstore.tokens import Digest, Tokens
from kvstore.types import Namespace


class Status(Enum):
    WAITING = auto()  # never scheduled yet
    RUNNING = auto()  # has a lease
    PREEMPTED = auto()  # lost its lease, waits to come back
    FINISHED = auto()


LEGAL_TRANSITIONS = {
    Status.WAITING: {Status.RUNNING, Status.FINISHED},
    Status.RUNNING: {Status.PREEMPTED, Status.FINISHED},
    Status.PREEMPTED: {Status.RUNNING, Status.FINISHED},
    Status.FINISHED: set[Status](),
}


class IllegalTransitionError(RuntimeError):
    """The sequence's status does not allow this."""


@dataclass(eq=False, slots=True)
class LiveSequence:
    """The `index`-th of a request's n outputs. Ids grow in the order of arrival.

    `tokens` are prompt and output. Progress is two numbers: for `planned_tokens` of them a step has
    been planned, and `computed_tokens` have KV. `in_flight_outputs` are further tokens, which steps
    that have been planned will sample. A decode is a sequence that lacks one token.

    While another process has to answer the guide's matcher, the sequence is held back in two ways:
    its last token is `unread`, because it may complete the grammar, and the next is not sampled. If
    a step has computed the logits for that one, the runner keeps them (`keeps_logits`).
    """

    id: SequenceId
    index: int
    request: Request
    namespace: Namespace
    tokens: Tokens
    output: Output
    seed: int
    stop_token_ids: frozenset[int]
    guide: Guide = field(default_factory=FreeGuide)
    block_hashes: tuple[Digest, ...] = ()  # of the prompt, where it may be on disk
    first: "LiveSequence | None" = None  # of the same request; computes the prompt for the others
    status: Status = Status.WAITING
    lease: Lease | None = None
    cached_tokens: int = 0  # of the prompt, adopted at the first admission
    admissions: int = 0
    in_flight_outputs: int = 0
    is_aborted: bool = False  # ends with the step that is in flight
    is_in_batch: bool = False  # of the runner
    is_sampling: bool = False  # has sampled since it entered the batch
    keeps_logits: bool = False  # they are sampled as soon as the guide allows
    unread: SampledToken | None = None
    speculation: Speculation = NO_SPECULATION
    draft: Draft | None = None  # that the step in flight verifies
    drafted_tokens: int = 0  # that steps have verified
    accepted_drafts: int = 0  # those of them that were appended
    n_scored: int = 0  # entries of its prompt's logprobs computed since it was last admitted
    n_scores_sent: int = 0  # those of them that events have had
    pooled: Vector | None = None  # the sum of what has been pooled

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def computed_tokens(self) -> int:
        return self.lease.written_tokens if self.lease else 0

    @property
    def planned_tokens(self) -> int:
        return self.lease.planned_tokens if self.lease else 0

    @property
    def remaining_tokens(self) -> int:
        """Tokens for which a step is to be planned; none when all others exist or are in flight."""
        in_flight = self.in_flight_outputs
        if self.is_aborted or (self.request.max_tokens and in_flight == self.lacks_tokens):
            return 0
        return len(self.tokens) + in_flight - self.planned_tokens

    @property
    def last_position(self) -> int:
        """The position whose token is computed apart, because what comes of it is read; 0: none."""
        is_read = self.request.max_tokens > 0 or self.request.pooling is Pooling.LAST
        return len(self.tokens) - 1 if is_read else 0

    @property
    def is_in_flight(self) -> bool:
        """Whether a step computes tokens of it that has not been committed."""
        return self.planned_tokens > self.computed_tokens

    @property
    def is_computed(self) -> bool:
        """Whether it samples nothing and all of its prompt has KV."""
        return self.request.max_tokens == 0 and self.computed_tokens == len(self.tokens)

    @property
    def lacks_scores(self) -> bool:
        """Whether its prompt logprobs are still to be computed, from the logits of every token."""
        return self.request.prompt_logprobs is not None and self.output_tokens == 0

    @property
    def may_adopt(self) -> bool:
        """Whether cached blocks serve it. What is read of its tokens is in no cache."""
        return not self.lacks_scores and self.request.pooling in {None, Pooling.LAST}

    @property
    def vector(self) -> Vector | None:
        """What has been pooled of the prompt, when all of it is computed."""
        if self.pooled is None or self.request.pooling is not Pooling.MEAN:
            return self.pooled
        return self.pooled / np.float32(self.prompt_tokens)

    @property
    def lacks_tokens(self) -> int:
        """Tokens that it may still generate."""
        return self.request.max_tokens - self.output_tokens

    @property
    def has_said_all(self) -> bool:
        """Whether all its tokens are generated; the last is not read yet."""
        return self.unread is not None and self.lacks_tokens == 0

    @property
    def is_live(self) -> bool:
        return self.status is not Status.FINISHED

    @property
    def usage(self) -> Usage:
        return Usage(
            self.prompt_tokens,
            self.cached_tokens,
            self.output_tokens - (self.unread is not None),
            self.accepted_drafts,
            self.drafted_tokens - self.accepted_drafts,
        )

    @property
    def unanswered(self) -> Matcher | None:
        """The matcher that has to be answered before it goes on."""
        matcher = matcher_of(self.guide.choice)
        return matcher if matcher is not None and matcher.answer is None else None

    @property
    def failed(self) -> Matcher | None:
        """The matcher that cannot be answered."""
        matcher = matcher_of(self.guide.choice)
        if matcher is not None and isinstance(matcher.answer, Refused | Unanswerable):
            return matcher
        return None

    def banned_tokens(self, behind: int) -> tuple[int, ...]:
        """Tokens that must not come behind so many more: stop tokens, before `min_tokens`."""
        too_early = self.output_tokens + behind < self.request.sampling.min_tokens
        return tuple(self.stop_token_ids) if too_early else ()

    def plan_sample(self) -> None:
        """A step has been planned that samples its next token."""
        self.in_flight_outputs += 1
        self.is_sampling = True

    def have_sampled(self) -> None:
        """The step has been computed that was to sample its next token."""
        self.in_flight_outputs -= 1

    def sit_out(self) -> None:
        """The step that was to sample its next token has only computed the logits."""
        self.in_flight_outputs -= 1
        self.keeps_logits = True

    def take_scores(self, scores: Sequence[TokenLogprob]) -> tuple[TokenLogprob | None, ...]:
        """Take in the logprobs of a chunk of its prompt. Returns the entries that no event has had:
        after a preemption the prompt is scored again from its start. The first entry is None.
        """
        if not self.lacks_scores:
            return ()
        start = self.n_scored
        entries = scores if start else (None, *scores)
        self.n_scored += len(entries)
        new = tuple(entries[max(self.n_scores_sent - start, 0) :])
        self.n_scores_sent += len(new)
        return new

    def pool(self, vector: Vector) -> None:
        """Add what a chunk of its prompt has given."""
        self.pooled = vector if self.pooled is None else self.pooled + vector

    def take(self, sampled: SampledToken) -> None:
        """Append the token that was sampled. It is read when the guide's matcher, where it has
        one, has been answered.
        """
        self.tokens.append(sampled.token_id)
        self.guide.accept(sampled.token_id)
        self.speculation.accept(sampled.token_id)
        self.unread = sampled

    def read(self, sampled: SampledToken) -> TextDelta:
        """The text that its last token completes, and why the sequence ends with it, if it does."""
        self.unread = None
        self.guide.answered()
        piece = self.output.add(sampled.token_id)
        match piece.finish_reason:
            case None if self.guide.is_complete:
                last = self.output.complete()
                return replace(last, text=piece.text + last.text)
            case FinishReason.LENGTH if self.guide.is_complete:
                return replace(piece, finish_reason=FinishReason.STOP)  # nothing is missing
        return piece

    def run_with(self, lease: Lease) -> None:
        """It has been admitted with this lease."""
        self._move(Status.RUNNING)
        self.lease = lease
        if self.admissions == 0:
            self.cached_tokens = lease.cached_tokens
        self.admissions += 1

    def preempt(self) -> Lease:
        """Put it back to waiting. Returns its lease."""
        lease = self._give_lease()
        self._move(Status.PREEMPTED)
        self.n_scored = 0  # the prompt is scored again, from its first token
        self.pooled = None
        self.in_flight_outputs = 0  # it will sample them again
        self.is_in_batch = self.is_sampling = self.keeps_logits = False
        return lease

    def finish(self) -> Lease | None:
        """End it. Returns its lease, if it has one."""
        lease = self._give_lease() if self.lease else None
        self._move(Status.FINISHED)
        return lease

    def _give_lease(self) -> Lease:
        lease, self.lease = self.lease, None
        if lease is None:
            raise IllegalTransitionError(f"sequence {self.id} is {self.status.name}: no lease")
        return lease

    def _move(self, status: Status) -> None:
        if status not in LEGAL_TRANSITIONS[self.status]:
            raise IllegalTransitionError(f"sequence {self.id}: {self.status.name} -> {status.name}")
        self.status = status


def lease_of(sequence: LiveSequence) -> Lease:
    """The lease of a running sequence."""
    assert sequence.lease is not None, f"sequence {sequence.id} is {sequence.status.name}"
    return sequence.lease


class LiveSequences:
    """All that have not ended, by id and by request, and those whose guides are not answered."""

    def __init__(self) -> None:
        self._by_id: dict[SequenceId, LiveSequence] = {}
        self._by_request: dict[str, list[LiveSequence]] = {}
        self._unanswered: dict[SequenceId, LiveSequence] = {}

    def __bool__(self) -> bool:
        return bool(self._by_id)

    @property
    def unanswered(self) -> tuple[LiveSequence, ...]:
        """Those whose guides' matchers have to be answered before they go on."""
        return tuple(self._unanswered.values())

    def get(self, sequence_id: SequenceId) -> LiveSequence | None:
        """None when it has ended."""
        return self._by_id.get(sequence_id)

    def of_request(self, request_id: str) -> tuple[LiveSequence, ...]:
        return tuple(self._by_request.get(request_id, ()))

    def add(self, sequence: LiveSequence) -> None:
        self._by_id[sequence.id] = sequence
        self._by_request.setdefault(sequence.request.id, []).append(sequence)

    def remove(self, sequence: LiveSequence) -> None:
        """It has ended."""
        del self._by_id[sequence.id]
        self._unanswered.pop(sequence.id, None)
        siblings = self._by_request[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self._by_request[sequence.request.id]

    def must_be_answered(self, sequence: LiveSequence) -> bool:
        """Whether its matcher has to be answered. Then it is listed in `unanswered`."""
        if sequence.unanswered is None:
            return False
        self._unanswered[sequence.id] = sequence
        return True

    def take_answered(self) -> list[LiveSequence]:
        """Remove those from `unanswered` whose matchers have been answered, and return them."""
        answered = [sequence for sequence in self.unanswered if sequence.unanswered is None]
        for sequence in answered:
            del self._unanswered[sequence.id]
        return answered

    def running(self, plan: StepPlan) -> Iterator[tuple[LiveSequence, int]]:
        """The step's sequences that still run, each with how many tokens the step computes of it.

        Others have ended or been preempted since the step was planned. A preempted one samples
        again what it has sampled here.
        """
        for sequence_id, n_tokens in plan.rows():
            sequence = self._by_id.get(sequence_id)
            if sequence is not None and sequence.status is Status.RUNNING:
                yield sequence, n_tokens
