"""The step that is being planned: what is in it so far, and what may still join."""

from dataclasses import dataclass, field

from engine.core.budget import StepBudget
from engine.core.sequence import LiveSequence, lease_of
from engine.core.step import BatchEntry, Chunk, Sampling, SequenceId, StepPlan
from engine.drafts.sources import Draft
from engine.values.request import Pooling
from kvstore.ops import NO_OPS, ReadBlock, StepOps, StorageOp, TablePatch

BEGINNING_TOKENS = 16
"""A prompt is admitted to a step that has time for so many tokens of it."""


@dataclass(slots=True)
class StepBuilder:
    """The step that is being planned."""

    budget_tokens: int
    time: StepBudget
    number: int = 0
    sequence_ids: set[SequenceId] = field(default_factory=set)
    enter: list[BatchEntry] = field(default_factory=list)
    patches: list[tuple[SequenceId, TablePatch]] = field(default_factory=list)
    before: list[StorageOp] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    after_chunks: list[StorageOp] = field(default_factory=list)
    decodes: list[SequenceId] = field(default_factory=list)
    after: list[StorageOp] = field(default_factory=list)
    reads: list[ReadBlock] = field(default_factory=list)
    kept: list[SequenceId] = field(default_factory=list)
    preempted: list[LiveSequence] = field(default_factory=list)
    is_short_of_blocks: bool = False  # then no prompt begins

    @property
    def is_empty(self) -> bool:
        """Whether nothing is computed, filled in or read."""
        return not (self.sequence_ids or self.before or self.reads)

    @property
    def has_room(self) -> bool:
        """Whether a prompt that begins may join."""
        if self.is_short_of_blocks or self.budget_tokens == 0:
            return False
        return self.time.allow(0, BEGINNING_TOKENS) > 0

    def allow(self, sequence: LiveSequence, n_tokens: int) -> int:
        """How many of its next tokens may join; every decode may."""
        if n_tokens == 1:
            return 1
        return self.time.allow(sequence.planned_tokens, min(n_tokens, self.budget_tokens))

    def add(self, sequence: LiveSequence, start: int, n_tokens: int, step_ops: StepOps) -> None:
        """Compute tokens of the sequence, from position `start` on."""
        self.sequence_ids.add(sequence.id)
        self.budget_tokens -= n_tokens
        if not sequence.is_in_batch:
            self.enter.append(_entry(sequence))
            sequence.is_in_batch = True
        self._change(sequence, step_ops)
        if n_tokens == 1:
            self.time.decode(start)
        else:
            self.time.chunk(start, n_tokens)
        is_last = sequence.remaining_tokens == 0  # else tokens are computed again, one at a time
        if sequence.is_sampling and n_tokens == 1 and is_last:
            self.decodes.append(sequence.id)
            sequence.plan_sample()
            return
        chunk = _chunk(sequence, start, n_tokens)
        self.chunks.append(chunk)
        if chunk.samples:
            sequence.plan_sample()

    def draft(self, sequence: LiveSequence, draft: Draft, step_ops: StepOps) -> None:
        """Verify a draft behind the token that the sequence decodes in this step."""
        n_drafts = len(draft.tokens)
        sequence.draft = draft
        lease = lease_of(sequence)
        start = lease.planned_tokens - n_drafts - 1
        self.decodes.remove(sequence.id)
        tokens = (sequence.tokens[start], *draft.tokens)
        self.chunks.append(Chunk(sequence.id, start, tokens, samples=True, n_drafts=n_drafts))
        self.budget_tokens -= n_drafts
        self.time.draft(start, n_drafts)
        self._change(sequence, step_ops)

    def keep(self, sequence: LiveSequence) -> None:
        """Sample the sequence from the logits that it has kept."""
        self.sequence_ids.add(sequence.id)
        self.kept.append(sequence.id)
        sequence.plan_sample()

    def _change(self, sequence: LiveSequence, step_ops: StepOps) -> None:
        """Bring the sequence's tables up to date, and have the ops carried out."""
        lease = lease_of(sequence)
        if lease.is_patched:
            self.patches += [(sequence.id, patch) for patch in lease.take_patches()]
        if step_ops is not NO_OPS:
            self.before += step_ops.before
            self.after_chunks += step_ops.after_chunks
            self.after += step_ops.after

    def plan(self, leave: list[SequenceId]) -> StepPlan:
        return StepPlan(
            leave=tuple(leave),
            enter=tuple(self.enter),
            patches=tuple(self.patches),
            before=tuple(self.before),
            chunks=tuple(self.chunks),
            after_chunks=tuple(self.after_chunks),
            decodes=tuple(self.decodes),
            after=tuple(self.after),
            work=self.time.work,
            reads=tuple(self.reads),
            number=self.number,
            kept=tuple(self.kept),
        )


def _entry(sequence: LiveSequence) -> BatchEntry:
    """The sequence as it enters the batch."""
    params, tokens = sequence.request.sampling, sequence.tokens
    repeats = params.repetition_penalty != 1.0
    penalised = repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    output = tokens.ids(sequence.prompt_tokens, len(tokens)) if penalised else ()
    sampling = Sampling(
        params=params,
        seed=sequence.seed,
        output_index=sequence.output_tokens,
        prompt_tokens=sequence.request.prompt if repeats else (),
        output_tokens=tuple(output),
        banned_tokens=sequence.banned_tokens(behind=0),
    )
    return BatchEntry(sequence.id, sampling, sequence.request.adapter)


def _chunk(sequence: LiveSequence, start: int, n_tokens: int) -> Chunk:
    """Tokens of the sequence from position `start` on; samples after its last one."""
    tokens, end = sequence.tokens, start + n_tokens
    scored_end = min(end + 1, sequence.prompt_tokens)
    has_scores = sequence.lacks_scores and start + 1 < scored_end
    return Chunk(
        sequence_id=sequence.id,
        start=start,
        tokens=tuple(tokens.ids(start, end)),
        samples=end == len(tokens) and sequence.request.max_tokens > 0,
        prompt_logprobs=sequence.request.prompt_logprobs if has_scores else None,
        next_tokens=tuple(tokens.ids(start + 1, scored_end)) if has_scores else (),
        pooling=_pooling(sequence, start, end),
    )


def _pooling(sequence: LiveSequence, start: int, end: int) -> Pooling | None:
    """How a chunk of these positions is pooled; None where it has none of the tokens for that."""
    pooling = sequence.request.pooling
    match pooling:
        case Pooling.LAST if end < len(sequence.tokens):
            return None
        case Pooling.FIRST if start > 0:
            return None
    return pooling
