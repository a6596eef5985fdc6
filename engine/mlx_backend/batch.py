"""What the runner keeps of each sequence from one step to the next."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from engine.core.step import Decode, Prefill, Resample, SequenceId, StepPlan, Verify
from engine.mlx_backend.kv.states import are_computable
from engine.mlx_backend.model.rows import TokenSpan
from engine.mlx_backend.model.sequences import SequenceImages, SequenceTables
from engine.mlx_backend.sampling.edits import SamplingRow
from engine.values.request import Pooling

_LEAST_ROWS = 8


@dataclass(eq=False, slots=True)
class BatchRow:
    """One sequence of the batch. `index` is its index in the batch's arrays on the device."""

    sequence_id: SequenceId
    index: int
    tables: SequenceTables
    sampling: SamplingRow
    position: int = 0  # of the next token to compute
    logits: mx.array | None = None  # [1, vocab], computed, whose token is not drawn yet

    def take(self, n_tokens: int, index: int, first_token: int, n_read: int) -> TokenSpan:
        """The next tokens to compute; the position moves to after them. See `TokenSpan`."""
        start = self.position
        self.position += n_tokens
        return TokenSpan.of(self.tables, start, n_tokens, index, first_token, n_read)

    def rewind(self, n_tokens: int) -> None:
        """Discard the last `n_tokens` tokens: others will overwrite their KV."""
        self.position -= n_tokens

    def take_saved_logits(self) -> mx.array:
        """The logits that a step saved when the row's mask was late. They are not kept after."""
        logits, self.logits = self.logits, None
        assert logits is not None, "a row resamples and has no saved logits"
        return logits


@dataclass(slots=True)
class StepInputs:
    """What a step computes. `token_ids`: those of its prefills and drafts, then one of each batch
    row.

    `spans[i]` belongs to `rows[i]`. `pooled` are the indices of spans whose last token is pooled
    and not sampled after; `drafts` are the drafts that spans end with, by index. Of `scored` and
    `gathered` spans every token is read, each in forwards of its own: to score the tokens that
    follow, and to pool them. `resampled` rows compute nothing.
    """

    token_ids: mx.array
    spans: list[TokenSpan] = field(default_factory=list)
    rows: list[BatchRow] = field(default_factory=list)
    scored: list[tuple[Prefill, TokenSpan]] = field(default_factory=list)
    gathered: list[tuple[Prefill, TokenSpan]] = field(default_factory=list)
    pooled: set[int] = field(default_factory=set)
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    resampled: list[BatchRow] = field(default_factory=list)

    def add(self, row: BatchRow, n_tokens: int, first_token: int, n_read: int) -> None:
        self.spans.append(row.take(n_tokens, len(self.rows), first_token, n_read))
        self.rows.append(row)

    def add_draft(self, row: BatchRow, draft: tuple[int, ...], first_token: int) -> None:
        """The row's own token and its draft; all of them are sampled after."""
        self.drafts[len(self.rows)] = draft
        self.add(row, 1 + len(draft), first_token, n_read=1 + len(draft))

    def add_prefill(self, row: BatchRow, prefill: Prefill, first_token: int) -> None:
        n_tokens, n_read = len(prefill.tokens), int(prefill.samples)
        if prefill.pooling is Pooling.LAST:
            self.pooled.add(len(self.rows))
            self.add(row, n_tokens, first_token, n_read=1)
        elif prefill.pooling is not None:
            self.gathered.append((prefill, row.take(n_tokens, -1, first_token, n_tokens)))
        elif prefill.score is None:
            self.add(row, n_tokens, first_token, n_read)
        else:
            n_scored = n_tokens - n_read
            if n_scored:
                self.scored.append((prefill, row.take(n_scored, -1, first_token, n_scored)))
            if n_read:
                self.add(row, n_read, first_token + n_scored, n_read)


class Batch:
    """The sequences that have entered and not left, and the next token of each on the device."""

    def __init__(self, n_groups: int, merge: int | None = None) -> None:
        """`merge`: see `SequenceImages`."""
        self._merge = merge
        self._n_groups = n_groups
        self._rows: dict[SequenceId, BatchRow] = {}
        self._free: list[int] = []  # indices that no row has
        self._tokens = mx.zeros(0, dtype=mx.int32)  # by a row's index: the token to compute next
        self._latest: tuple[Sequence[BatchRow], mx.array] | None = None  # drawn, not yet stored

    def change(self, plan: StepPlan) -> None:
        """Removes the sequences that leave, adds those that enter, patches the tables."""
        for sequence_id in plan.leave:
            self._free.append(self._rows.pop(sequence_id).index)
        for entry in plan.enter:
            images = SequenceImages(entry.images, self._merge) if entry.images else None
            tables = SequenceTables(self._n_groups, entry.adapter, images)
            sampling = SamplingRow(entry.sampling)
            self._rows[entry.sequence_id] = BatchRow(
                entry.sequence_id, self._take_index(), tables, sampling
            )
        for sequence_id, patch in plan.patches:
            self._rows[sequence_id].tables.patch(patch)

    def prepare_inputs(self, plan: StepPlan) -> StepInputs:
        """The tokens that a step computes. The rows' positions move to after them."""
        known = list[int]()
        for planned in plan.rows:
            match planned:
                case Prefill():
                    known += planned.tokens
                case Verify():
                    known += (planned.token, *planned.draft)
        inputs = StepInputs(self._following(known))
        first = 0
        for planned in plan.rows:
            row = self._rows[planned.sequence_id]
            match planned:
                case Decode():
                    inputs.add(row, 1, len(known) + row.index, n_read=1)
                case Prefill():
                    row.position = planned.start
                    inputs.add_prefill(row, planned, first)
                    first += len(planned.tokens)
                case Verify():
                    row.position = planned.start
                    inputs.add_draft(row, planned.draft, first)
                    first += 1 + len(planned.draft)
                case Resample():
                    inputs.resampled.append(row)
        return inputs

    def decoding_rows(self, plan: StepPlan) -> tuple[list[BatchRow], list[BatchRow]] | None:
        """The rows that decode and those that resample; None where any does something else, or
        none decodes.
        """
        decodes, resampled = list[BatchRow](), list[BatchRow]()
        for planned in plan.rows:
            match planned:
                case Decode():
                    decodes.append(self._rows[planned.sequence_id])
                case Resample():
                    resampled.append(self._rows[planned.sequence_id])
                case _:
                    return None
        return (decodes, resampled) if decodes else None

    def set_next_tokens(self, rows: Sequence[BatchRow], tokens: mx.array) -> None:
        """What each row decodes next; `tokens`: uint32 `[rows]`, or more, the first of which are
        these rows'. They may still have to be computed.
        """
        if self._latest is not None and self._latest[0] != rows:
            self._store_latest()
        self._latest = rows, tokens

    def next_tokens(self, rows: Sequence[BatchRow], size: int) -> mx.array:
        """The token that each row decodes next, uint32 `[size]`; beyond the rows any tokens."""
        if self._latest is not None:
            latest_rows, tokens = self._latest
            if len(tokens) == size and latest_rows == rows:
                return tokens
            self._store_latest()
        indices = [row.index for row in rows]
        return self._tokens[mx.array(indices + indices[:1] * (size - len(rows)))].astype(mx.uint32)

    def settle(self) -> None:
        """After a step has failed: compute the tokens that rows decode next. If they cannot be
        computed, no row of the batch decodes any more: those that do are in every step.
        """
        latest = [] if self._latest is None else [self._latest[1]]
        if not are_computable([self._tokens, *latest]):
            self.forget_tokens()

    def forget_tokens(self) -> None:
        """Release what was sampled for all rows, and the logits that were saved."""
        self._latest, self._tokens = None, mx.zeros(self._tokens.size, dtype=mx.int32)
        for row in self._rows.values():
            row.logits = None

    def _store_latest(self) -> None:
        """Move the tokens that were drawn last to where each row finds its own."""
        if self._latest is None:
            return
        (rows, tokens), self._latest = self._latest, None
        indices = mx.array([row.index for row in rows])
        tokens = tokens[: len(rows)].astype(mx.int32)
        # A new array: forwards that have been built and not launched may read this one.
        self._tokens = mx.put_along_axis(self._tokens, indices, tokens, axis=0)

    def _following(self, known: list[int]) -> mx.array:
        """These tokens, followed by the next token of each batch row."""
        self._store_latest()
        if not known:
            return self._tokens
        return mx.concatenate([mx.array(known, dtype=mx.int32), self._tokens])

    def _take_index(self) -> int:
        if not self._free:
            first = self._tokens.size
            room = max(first, _LEAST_ROWS)
            self._tokens = mx.concatenate([self._tokens, mx.zeros(room, dtype=mx.int32)])
            self._free = list(reversed(range(first, first + room)))
        return self._free.pop()
