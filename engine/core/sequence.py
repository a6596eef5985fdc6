"""Live sequences: their tokens, leases and states, and their rows in a step. Engine thread only."""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from engine.core.budget import StepBudget
from engine.core.step import (
    Decode,
    Encode,
    Late,
    Row,
    SampledToken,
    SequenceId,
    StepPlan,
    Vector,
    Verify,
)
from engine.disk_cache.loader import LoadAttempt
from engine.drafts.proposer import Proposer
from engine.grammar.state import GrammarState, Matcher, Refused, Unanswerable
from engine.output.text import Output, TextDelta
from engine.values.images import Image
from engine.values.output import FinishReason, TokenLogprob, Usage
from engine.values.request import Pooling, Request
from engine.values.stats import DraftSource
from kvstore.in_flight import QueuedPrompt
from kvstore.lease import Lease
from kvstore.slots import NEVER
from kvstore.tokens import Digest, Tokens
from kvstore.types import Namespace


class Status(Enum):
    WAITING = auto()  # not admitted yet
    RUNNING = auto()  # has a lease
    ABORTING = auto()  # has a lease, and ends when the step in flight is committed
    PREEMPTED = auto()  # has lost its lease, and waits to be admitted again
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class LiveSequence:
    """The `index`-th of a request's n outputs. Ids grow in the order of arrival.

    `tokens` are the prompt and the generated tokens, by the ids under which their KV is cached. The
    model reads those of `token_ids`, which differ where images are. The lease has two counters of
    progress: steps are planned for the first `planned_tokens` positions, and the first
    `computed_tokens` have KV. A sequence *prefills* while it has known tokens for which no step is
    planned. Then it *decodes*: each step computes the token that the previous step sampled, known
    to the host or not.

    `pending` is the row that was planned last for the sequence. `Late` replaces it if the mask did
    not arrive in time: the logits are saved, and the next step must draw from them. None: the
    sequence is not in the runner's batch.

    The last token is the `pending_token` until it is emitted. It waits while a worker process has
    yet to answer the grammar, because the token may complete that.
    """

    id: SequenceId
    index: int
    request: Request
    namespace: Namespace
    tokens: Tokens
    output: Output
    seed: int
    grammar: GrammarState | None = None
    proposer: Proposer | None = None
    block_hashes: Sequence[Digest] = ()  # of the prompt, if there is a disk cache
    first: "LiveSequence | None" = None  # of the request: it computes the prompt for the others
    arrived_seconds: float = 0.0  # of the metrics' clock
    last_token_seconds: float | None = None  # None before the first token
    status: Status = Status.WAITING
    lease: Lease | None = None
    pending: Row | Late | None = None
    pending_token: SampledToken | None = None
    draft_source: DraftSource | None = None  # of the draft that was verified last
    queued_prompt: QueuedPrompt | None = None  # while it waits and can use the prefix cache
    load_attempt: LoadAttempt = field(default_factory=LoadAttempt)  # while it waits
    refused_at_releases: int = -1  # the pool's `n_releases` when it last found too few blocks
    cached_tokens: int = 0  # of the prompt, found in the prefix cache at the first admission
    forked_tokens: int = 0  # of the prompt, computed by `first`, whose lease was forked
    admissions: int = 0
    drafted_tokens: int = 0  # verified so far
    accepted_drafts: int = 0  # drafted tokens that were appended
    n_scores_sent: int = 0  # entries of the prompt's logprobs that were sent, counted in `first`
    pooled: Vector | None = None  # the sum of the hidden states pooled so far
    prompt_tokens: int = field(init=False)
    decode: Decode = field(init=False)  # the row of every decode: none is allocated a step
    end_tokens: int = field(init=False)  # positions computed in all: the last token has no KV

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.request.prompt)
        self.decode = Decode(self.id)
        self.end_tokens = self.prompt_tokens + max(self.request.max_tokens - 1, 0)

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
    def unplanned_tokens(self) -> int:
        """Known tokens for which no step is planned yet."""
        return len(self.tokens) - self.planned_tokens

    def token_ids(self, start: int, stop: int) -> list[int]:
        """The ids in the vocabulary of the tokens at positions [start, stop)."""
        own = self.tokens.ids(max(start, self.prompt_tokens), stop)
        return [*self.request.prompt[start:stop], *own] if start < self.prompt_tokens else own

    @property
    def sampled_position(self) -> int:
        """The position of the last known token, which is computed with the decodes because its
        logits or its hidden state are needed. 0 if neither is needed.
        """
        is_read = self.request.max_tokens > 0 or self.request.pooling is Pooling.LAST
        return len(self.tokens) - 1 if is_read else 0

    @property
    def lacks_scores(self) -> bool:
        """Whether the prompt's logprobs are to be computed, which takes the logits of every token.
        They are sent once for all sequences of the request.
        """
        if self.request.prompt_logprobs is None:
            return False
        return (self.first or self).n_scores_sent < self.prompt_tokens

    @property
    def can_use_prefix_cache(self) -> bool:
        """False if the logits or the hidden state of every prompt token are needed."""
        return not self.lacks_scores and self.request.pooling in {None, Pooling.LAST}

    @property
    def shared_tokens(self) -> int:
        """How many of its first tokens may be cached."""
        asked = self.request.shared_tokens
        return NEVER if asked is None else asked

    @property
    def vector(self) -> Vector | None:
        """The pooled hidden state of the prompt, once all of it is computed."""
        if self.pooled is None or self.request.pooling is not Pooling.MEAN:
            return self.pooled
        return self.pooled / np.float32(self.prompt_tokens)

    @property
    def max_new_tokens_left(self) -> int:
        return self.request.max_tokens - self.output_tokens

    @property
    def is_live(self) -> bool:
        return self.status is not Status.FINISHED

    @property
    def usage(self) -> Usage:
        return Usage(
            self.prompt_tokens,
            self.cached_tokens,
            self.output_tokens - (self.pending_token is not None),
            self.accepted_drafts,
            self.drafted_tokens - self.accepted_drafts,
        )

    @property
    def unanswered(self) -> Matcher | None:
        """The grammar matcher that must be answered before the sequence continues."""
        matcher = None if self.grammar is None else self.grammar.matcher
        return matcher if matcher is not None and matcher.answer is None else None

    @property
    def failed(self) -> Matcher | None:
        """The grammar matcher that cannot be answered."""
        matcher = None if self.grammar is None else self.grammar.matcher
        if matcher is not None and isinstance(matcher.answer, Refused | Unanswerable):
            return matcher
        return None

    def banned_tokens(self, n_draft: int = 0) -> tuple[int, ...]:
        """Stop tokens, while fewer than `min_tokens` are generated, draft tokens included."""
        too_early = self.output_tokens + n_draft < self.request.sampling.min_tokens
        return tuple(self.output.stop_token_ids) if too_early else ()

    def take_scores(
        self, start: int, scores: Sequence[TokenLogprob]
    ) -> tuple[TokenLogprob | None, ...]:
        """Take the logprobs of the prompt's tokens after position `start`. Return the entries that
        were not sent yet: after a preemption the prompt is scored again from its start. The entry
        of the first token is None, and so are those of tokens that stand for parts of images.
        """
        if not self.lacks_scores:
            return ()
        first = self.first or self
        sent = first.n_scores_sent
        entries = [None, *scores][sent - start :]
        for image in self.request.images:
            for position, n_tokens in image.runs:
                for at in range(max(position, sent), min(position + n_tokens, sent + len(entries))):
                    entries[at - sent] = None
        first.n_scores_sent += len(entries)
        return tuple(entries)

    def pool(self, vector: Vector) -> None:
        """Add the pooled hidden states of some tokens of its prompt."""
        self.pooled = vector if self.pooled is None else self.pooled + vector

    def emit(self, sampled: SampledToken) -> TextDelta:
        """Return the text that the last token completes, and why the sequence ends with it, if it
        does. The grammar of a guided sequence must have advanced by that token.
        """
        delta = self.output.add(sampled.token_id)
        if self.grammar is not None and self.grammar.is_complete:
            match delta.finish_reason:
                case None:
                    last = self.output.complete()
                    delta = last._replace(text=delta.text + last.text)
                case FinishReason.LENGTH:
                    delta = delta._replace(finish_reason=FinishReason.STOP)  # nothing is missing
        self.pending_token = None
        return delta


def admission_key(sequence: LiveSequence) -> tuple[int, int]:
    """Sort key of a client's queue and of the running sequences: by priority, then by arrival."""
    return sequence.request.priority, sequence.id


class LiveSequences:
    """All sequences that have not ended, by what each of them does next.

    `running` has the sequences with a lease, sorted by `admission_key`. A running sequence is in
    `prefilling` if it has known tokens that are not planned yet, in `decoding` if it generates, and
    in neither if it is being aborted or only waits for its prompt to be committed. `unanswered` has
    the sequences whose grammar has yet to answer. `leaving` has the sequences that the next step
    removes from the runner's batch.
    """

    def __init__(self) -> None:
        self.running: list[LiveSequence] = []
        self.prefilling: dict[LiveSequence, None] = {}
        self.decoding: dict[LiveSequence, None] = {}
        self.unanswered: dict[SequenceId, LiveSequence] = {}
        self.leaving: list[SequenceId] = []
        self.n_guided = 0
        self.n_background = 0
        self.ids: set[SequenceId] = set()
        self._by_request: dict[str, list[LiveSequence]] = {}

    def __bool__(self) -> bool:
        return bool(self.ids)

    @property
    def has_waiting(self) -> bool:
        """Whether a sequence waits, or was preempted in this step."""
        return len(self.ids) > len(self.running)

    @property
    def has_proposers(self) -> bool:
        """Whether anything is drafted for a sequence that decodes."""
        return any(sequence.proposer is not None for sequence in self.decoding)

    @property
    def n_foreground(self) -> int:
        """Number of sequences that are not computed in the background."""
        return len(self.ids) - self.n_background

    def of_request(self, request_id: str) -> tuple[LiveSequence, ...]:
        return tuple(self._by_request.get(request_id, ()))

    def add(self, sequence: LiveSequence) -> None:
        self.ids.add(sequence.id)
        self._by_request.setdefault(sequence.request.id, []).append(sequence)
        self.n_guided += sequence.grammar is not None
        self.n_background += sequence.request.is_background

    def start(self, sequence: LiveSequence, lease: Lease) -> None:
        """Run a sequence that was admitted with this lease."""
        sequence.status, sequence.lease = Status.RUNNING, lease
        if sequence.admissions == 0 and lease.is_fork:
            sequence.forked_tokens = lease.cached_tokens
        elif sequence.admissions == 0:
            sequence.cached_tokens = lease.cached_tokens
        sequence.admissions += 1
        insort(self.running, sequence, key=admission_key)
        self.prefilling[sequence] = None
        self.wait_for_grammar(sequence)

    def planned(self, sequence: LiveSequence) -> None:
        """Have a sequence decode, unless it generates nothing: its known tokens are planned."""
        del self.prefilling[sequence]
        if sequence.request.max_tokens > 0:
            self.decoding[sequence] = None

    def prefill_again(self, sequence: LiveSequence) -> None:
        """Have a decoding sequence prefill again: known tokens have lost their KV."""
        self.decoding.pop(sequence, None)
        self.prefilling[sequence] = None

    def abort(self, sequence: LiveSequence) -> None:
        """Have a sequence in flight end when its step is committed."""
        sequence.status = Status.ABORTING
        self.prefilling.pop(sequence, None)
        self.decoding.pop(sequence, None)

    def preempt(self, sequence: LiveSequence) -> Lease:
        """Stop a running sequence. Return its lease, which the caller must donate."""
        lease = self._stop(sequence)
        assert lease is not None, f"sequence {sequence.id} is {sequence.status.name}: no lease"
        sequence.status = Status.PREEMPTED
        sequence.pooled = None
        return lease

    def remove(self, sequence: LiveSequence) -> Lease | None:
        """Remove a sequence that has ended. Return its lease, if any, for the caller to release."""
        assert sequence.is_live, f"sequence {sequence.id} has ended before"
        lease = self._stop(sequence)
        sequence.status = Status.FINISHED
        self.ids.remove(sequence.id)
        if sequence.grammar is not None:
            self.n_guided -= 1
            sequence.grammar.end()
        self.n_background -= sequence.request.is_background
        self.unanswered.pop(sequence.id, None)
        siblings = self._by_request[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self._by_request[sequence.request.id]
        return lease

    def _stop(self, sequence: LiveSequence) -> Lease | None:
        if sequence.pending is not None:
            self.leaving.append(sequence.id)
            sequence.pending = None
        lease, sequence.lease = sequence.lease, None
        if lease is not None:
            self.running.remove(sequence)
            self.prefilling.pop(sequence, None)
            self.decoding.pop(sequence, None)
        return lease

    def step_tokens(self, limit: int) -> int:
        """The most tokens of a step, of `limit`: fewer where all sequences are background ones."""
        if self.n_foreground:
            return limit
        return max(limit // BACKGROUND_SHARE, len(self.running) + 1)

    def wait_for_grammar(self, sequence: LiveSequence) -> bool:
        """Add the sequence to `unanswered` if its grammar has yet to answer. True if it has."""
        if sequence.unanswered is None:
            return False
        self.unanswered[sequence.id] = sequence
        return True

    def take_answered(self) -> list[LiveSequence]:
        """Remove the sequences whose grammar has answered from `unanswered`, and return them."""
        answered = [one for one in self.unanswered.values() if one.unanswered is None]
        for sequence in answered:
            del self.unanswered[sequence.id]
        return answered


BEGINNING_TOKENS = 16
"""A prompt is admitted to a step that has time for this many of its tokens."""

BACKGROUND_SHARE = 4
"""A step of background sequences alone has at most this part of a step's tokens, and a token for
each that decodes. A request that arrives meanwhile waits for the steps in flight, and for no other.
"""


MAX_BEGUN_BLOCKS = 4096
"""A step admits sequences until their tables have this many blocks, in 1 to 2 ms."""

ADMISSION_BLOCKS = 256
"""An admission takes as long as this many blocks, besides those of its table: 0.1 ms."""


class PlannedRow(NamedTuple):
    """A row of a step, the sequence that computes it, and the sequence's lease at that time.

    A sequence may lose its lease and be admitted again before the step is collected. The result
    then belongs to blocks and tokens that the sequence no longer has, and must be ignored: the row
    is not *current*.
    """

    sequence: LiveSequence
    lease: Lease
    row: Row

    @property
    def is_current(self) -> bool:
        """Whether the sequence still has the lease that the row was planned for."""
        return self.sequence.lease is self.lease


@dataclass(slots=True)
class Step:
    """A step that is being planned, then in flight. `plan` gets the rows when all are planned."""

    plan: StepPlan
    budget: StepBudget
    budget_tokens: int  # that may still be planned
    rows: list[PlannedRow] = field(default_factory=list)
    # Sequences that wait for an image, and the leases with which they were admitted: ops of this
    # step are for these leases.
    rowless: Sequence[tuple[LiveSequence, Lease]] = ()
    preempted: list[LiveSequence] = field(default_factory=list)
    n_drafts: int = 0  # rows that verify a draft
    is_reading: bool = False  # blocks are read to be written to disk
    is_loading: bool = False  # blocks are filled in from disk
    is_short_of_blocks: bool = False  # then no prompt begins
    begun_blocks: int = 0  # of the sequences that it admits; see `begin`

    @property
    def comes_alone(self) -> bool:
        """Whether the step is collected before the next is planned: only then are the tokens of its
        sequences known.
        """
        return self.n_drafts > 0 or self.plan.draft is not None

    @property
    def has_room(self) -> bool:
        """Whether a prompt that begins may join."""
        if self.is_short_of_blocks or self.budget_tokens == 0:
            return False
        if self.begun_blocks >= MAX_BEGUN_BLOCKS:
            return False
        return self.budget.chunk_tokens(0, BEGINNING_TOKENS) > 0

    def begin(self, lease: Lease) -> None:
        """Count a sequence that the step admits with this lease."""
        self.begun_blocks += ADMISSION_BLOCKS + len(lease.table)

    def allow(self, sequence: LiveSequence) -> int:
        """How many of the sequence's next known tokens may join. A single token always may."""
        wanted = sequence.unplanned_tokens
        if wanted == 1:
            return 1
        wanted = min(wanted, self.budget_tokens)
        scored = 1.0 if sequence.lacks_scores else 0.0
        return self.budget.chunk_tokens(sequence.planned_tokens, wanted, scored)

    def allow_stages(self, sequence: LiveSequence, image: Image, wanted: int, n_stages: int) -> int:
        """How many of `wanted` stages of a vision tower may join, for an image of the sequence. All
        `n_stages` of the tower count as the image's tokens. At least one stage may, unless the step
        has chunks or stages already.
        """
        room = self.budget_tokens // (BACKGROUND_SHARE if sequence.request.is_background else 1)
        most = room * n_stages // image.n_tokens
        if not self.budget.has_prompts:
            most = max(most, 1)
        return self.budget.stages(image.n_tokens, min(wanted, most))

    def encode(self, encode: Encode, n_stages: int) -> None:
        """Add stages of a vision tower, which has `n_stages`."""
        n_tokens = encode.image.n_tokens
        self.plan.encode.append(encode)
        self.budget.add_stages(n_tokens, encode.n_stages)
        taken = -(-n_tokens * encode.n_stages // n_stages)
        self.budget_tokens = max(self.budget_tokens - taken, 0)

    def add(self, sequence: LiveSequence, lease: Lease, row: Row) -> None:
        """Add a row of the sequence over its lease, and the changes of its tables."""
        sequence.pending = row
        self.rows.append(PlannedRow(sequence, lease, row))
        self.patch_tables(sequence.id, lease)

    def verify(self, index: int, row: Verify) -> None:
        """Verify a draft in place of the decode in row `index`."""
        sequence, lease, _ = self.rows[index]
        self.rows[index] = PlannedRow(sequence, lease, row)
        sequence.pending = row
        self.n_drafts += 1
        self.budget_tokens -= len(row.draft)
        self.budget.add_draft(row.start, len(row.draft))
        self.patch_tables(sequence.id, lease)

    def patch_tables(self, sequence_id: SequenceId, lease: Lease) -> None:
        if lease.is_patched:
            self.plan.patches += [(sequence_id, patch) for patch in lease.take_patches()]
