"""A ModelRunner without a model: carries out plans on a dictionary of slots."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from engine.core.step import (
    Decode,
    Failed,
    Late,
    Masks,
    Prefill,
    Prefilled,
    Resample,
    Row,
    RowResult,
    Sampled,
    SampledToken,
    Sampling,
    SequenceId,
    StepLost,
    StepMasks,
    StepPlan,
    StepResult,
    StorageLost,
    Vector,
    Verified,
    Verify,
)
from engine.values.images import Image, ImageInput
from engine.values.output import TokenLogprob
from engine.values.request import Pooling
from kvstore.ops import (
    CopyBlock,
    CopyState,
    FillBlock,
    FillState,
    Parts,
    ReadBlock,
    ResetState,
    RollBackState,
    RoundState,
    StorageOp,
    TablePatch,
    When,
)
from kvstore.pool import BlockPool
from kvstore.recurrent import RoundedGroup
from kvstore.slots import Group
from kvstore.tokens import content_ids
from kvstore.types import BlockId, SlotId
from kvstore.window import WindowGroup
from tests.simulation.fake_tower import FakeTower
from tests.simulation.model import (
    ROOT,
    State,
    chain,
    fingerprint,
    packed,
    pooled_number,
    positions_of,
    sample,
    unpacked,
)


class InjectedError(RuntimeError):
    """What the device might raise."""


class Launching(Enum):
    """When a step's forwards are launched, as the launches of `engine.mlx_backend.runner` do it.

    It decides what a step that fails has computed.
    """

    AHEAD = "a prompt's forwards at submit, the others at sample"
    WHEN_IDLE = "all forwards at submit, one after another"


@dataclass(slots=True)
class BatchRow:
    """What the batch has of one sequence. Tables are by group, None is that of blocks."""

    sampling: Sampling
    adapter: str  # its fingerprint
    images: tuple[Image, ...] = ()
    names: dict[int, int] = field(default_factory=dict)  # of parts of images, by position
    is_broken: bool = False  # an image of its could not be encoded
    tables: dict[int | None, dict[int, int]] = field(default_factory=dict)
    position: int = 0
    last_token: int | None = None
    output_index: int = 0
    kept_kv: int | None = None  # of a token that has been computed, and not sampled after

    def patch(self, patch: TablePatch) -> None:
        table = self.tables.setdefault(patch.group, {})
        table.update(enumerate(patch.ids, start=patch.first))


@dataclass(slots=True)
class Flight:
    """A step that has been submitted. `kv`: of its sampling rows, after their last tokens and after
    each token of their drafts.
    """

    plan: StepPlan
    is_lost: bool = False  # it was in flight when the storage was lost
    kv: dict[SequenceId, list[int]] = field(default_factory=dict)
    drafts: dict[SequenceId, tuple[int, ...]] = field(default_factory=dict)
    sampled: dict[SequenceId, tuple[SampledToken, ...]] = field(default_factory=dict)
    late: set[SequenceId] = field(default_factory=set)
    scores: dict[SequenceId, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    vectors: dict[SequenceId, Vector] = field(default_factory=dict)
    read: list[Parts] = field(default_factory=list)
    broken: set[SequenceId] = field(default_factory=set)
    not_encoded: dict[bytes, str] = field(default_factory=dict)

    def pool(self, sequence_id: SequenceId, kv: Sequence[int]) -> None:
        self.vectors[sequence_id] = np.array([sum(map(pooled_number, kv))], np.float32)


class FakeRunner:
    """Computes the hash model of `tests.simulation.model`, reading and writing slots by block.

    Asserts what a real device could not notice: that no block is written which has another holder.
    `fault` is called whenever a real runner might raise, and may raise: after StorageLost nothing
    is left of what blocks and states held. `op_fault` is called before each op that changes what is
    cached, and may raise. `row_fault` names rows that fail alone, and `image_fault` is whether the
    next stages of an image cannot be computed.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: Sequence[Group],
        block_size: int,
        vocab_size: int,
        fault: Callable[[], None],
        row_fault: Callable[[SequenceId], bool],
        launching: Launching = Launching.AHEAD,
        op_fault: Callable[[], None] = lambda: None,
        images: ImageInput | None = None,
        image_fault: Callable[[], bool] = lambda: False,
    ) -> None:
        self.tower = FakeTower(images, image_fault)
        self._launching = launching
        self._pool = pool
        self._groups = groups
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._fault = fault
        self._op_fault = op_fault
        self._row_fault = row_fault
        self._rows: dict[SequenceId, BatchRow] = {}
        self._flights: deque[Flight] = deque()
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}  # KV before, and own
        self._windows: dict[tuple[int, int, int], int] = {}  # by group: the slot's own KV
        self._states: dict[int, State] = {}
        self._states_before: dict[int, State] = {}  # the last write
        self.computed_tokens: Counter[SequenceId] = Counter()
        self.n_computed = 0  # tokens of all

    def kv(self, block: BlockId, slot: int) -> int:
        """What a slot of a block holds of its own token; 0 if nothing was written to it."""
        return self._slots.get((block, slot), (0, 0))[1]

    def window(self, group: int, own: SlotId, slot: int) -> int:
        return self._windows.get((group, own, slot), 0)

    def state(self, slot: SlotId) -> State:
        return self._states.get(slot, State())

    def submit(self, plan: StepPlan) -> None:
        assert plan.rows or plan.ops or plan.encode, "a step that does nothing"
        assert not any(flight.drafts for flight in self._flights), "nobody knows where it goes on"
        self._change_batch(plan)
        flight = Flight(plan)
        if self._launching is Launching.AHEAD:  # so that a step that fails may have encoded
            flight.not_encoded = self.tower.run(plan)
        self._meet_fault()
        self._execute_all(plan.ops_at(When.FIRST))
        self._states_before.clear()
        if self._launching is not Launching.AHEAD:
            flight.not_encoded = self.tower.run(plan)
        rows = self._computable(flight)
        for row in rows:
            if isinstance(row, Prefill):
                self._prefill(flight, row)
        if self._launching is Launching.WHEN_IDLE:
            self._meet_fault()  # the launch of a later forward fails: what is before it is computed
        self._execute_all(plan.ops_at(When.AFTER_PREFILLS))
        for row in rows:
            if isinstance(row, Prefill) and row.pooling is Pooling.LAST:
                flight.pool(row.sequence_id, self._forward(row.sequence_id, row.tokens[-1:]))
        self._decode(flight, rows)
        self._execute_all(plan.ops_at(When.LAST))
        flight.read = [self._read(read) for read in plan.reads]
        self._flights.append(flight)
        assert len(self._flights) <= 2, "more than one step in flight"

    def _computable(self, flight: Flight) -> list[Row]:
        """The rows whose images are there. The others fail, and so do later rows of theirs."""
        for row in flight.plan.rows:
            own = self._rows[row.sequence_id]
            if isinstance(row, Prefill):
                own.is_broken |= self.tower.lacks(own.images, row.start, len(row.tokens))
            if own.is_broken:
                flight.broken.add(row.sequence_id)
        return [row for row in flight.plan.rows if row.sequence_id not in flight.broken]

    def _decode(self, flight: Flight, rows: Sequence[Row]) -> None:
        """Compute the last tokens of the rows that sample."""
        for row in rows:
            if isinstance(row, Prefill) and not row.samples:
                continue
            batch_row, draft = self._rows[row.sequence_id], tuple[int, ...]()
            if isinstance(row, Resample):
                assert batch_row.kept_kv is not None, "no logits were saved"
                flight.kv[row.sequence_id], batch_row.kept_kv = [batch_row.kept_kv], None
                continue
            assert batch_row.kept_kv is None, "a decode of who has yet to sample"
            if isinstance(row, Verify):
                draft = flight.drafts[row.sequence_id] = row.draft
                assert (row.start, row.token) == (batch_row.position, batch_row.last_token)
            assert batch_row.last_token is not None, "a decode of what has not been sampled"
            tokens = (batch_row.last_token, *draft)
            flight.kv[row.sequence_id] = self._forward(row.sequence_id, tokens)

    def launch(self) -> None:
        """All has been computed. A step that fails from here on is as if decodes had not been."""

    def draw(self, masks: StepMasks) -> None:
        flight = self._flights[-1]
        try:
            self._meet_fault()
        except BaseException as error:
            self._flights.pop()
            if self._launching is Launching.AHEAD and not isinstance(error, StorageLost):
                self._leave_decodes_out(flight.plan)
            raise
        self._sample(flight, masks)

    def _meet_fault(self) -> None:
        try:
            self._fault()
        except StepLost as error:
            error.not_encoded = error.not_encoded or self.tower.lose()
            if not isinstance(error, StorageLost):
                raise
            for of_storage in (self._slots, self._windows, self._states, self._states_before):
                of_storage.clear()
            self._forget_tokens()
            self.tower.clear()
            for flight in self._flights:
                flight.is_lost = True
            raise

    def _forget_tokens(self) -> None:
        """No row of the batch can decode any more."""
        for row in self._rows.values():
            row.last_token = row.kept_kv = None

    def _leave_decodes_out(self, plan: StepPlan) -> None:
        """Where another forward comes first, decodes are launched only when the step samples."""
        if not any(isinstance(row, Prefill | Verify) for row in plan.rows):
            return
        for row in plan.rows:
            for index, group in enumerate(self._groups):
                if isinstance(row, Decode) and not isinstance(group, WindowGroup):
                    state = self._rows[row.sequence_id].tables[index][0]
                    self._states[state] = self._states_before.pop(state)

    def _sample(self, flight: Flight, masks: StepMasks) -> None:
        by_row = defaultdict[SequenceId, list[Masks]](list)
        for sequence_id, mask in zip(masks.sequence_ids, masks.masks, strict=True):
            by_row[sequence_id].append(mask)
        for sequence_id, kv in flight.kv.items():
            row = self._rows[sequence_id]
            drafts = flight.drafts.get(sequence_id, ())
            row.position -= len(drafts)
            if sequence_id in masks.late:
                row.kept_kv = kv[0]
                flight.late.add(sequence_id)
                continue
            of_row: Sequence[Masks | None] = by_row.get(sequence_id) or [None] * len(kv)
            tokens = list[SampledToken]()
            for behind, mask, draft in zip(kv, of_row, [*drafts, None], strict=False):
                row.position += len(tokens) > 0  # the draft before it is right
                tokens.append(self._draw(row, behind, mask))
                if tokens[-1].token_id != draft:
                    break
            flight.sampled[sequence_id] = tuple(tokens)

    def _draw(self, row: BatchRow, kv: int, mask: Masks | None) -> SampledToken:
        ruled_out = self._ruled_out(row, mask)
        token_id = sample(kv, row.sampling.seed, row.output_index, self._vocab_size, ruled_out)
        row.last_token = token_id
        row.output_index += 1
        is_asked = row.sampling.params.top_logprobs is not None
        return SampledToken(token_id, TokenLogprob(token_id, -1.0) if is_asked else None)

    def collect(self) -> StepResult:
        flight = self._flights.popleft()
        if flight.is_lost:
            raise StepLost("its storage was lost")
        try:
            self._meet_fault()
        except BaseException:
            self._flights.clear()
            self._forget_tokens()  # nobody knows which of them were sampled by these steps
            raise
        results = tuple(self._result(flight, row) for row in flight.plan.rows)
        return StepResult(results, tuple(flight.read), not_encoded=flight.not_encoded)

    def _result(self, flight: Flight, row: Row) -> RowResult:
        name = row.sequence_id
        tokens = flight.sampled.get(name, ())
        if name in flight.broken:
            return Prefilled()  # nobody may use it
        if not isinstance(row, Resample):
            n_tokens = len(row.tokens) if isinstance(row, Prefill) else 1
            self.computed_tokens[name] += n_tokens + max(len(tokens) - 1, 0)
            self.n_computed += n_tokens
            if self._row_fault(name):
                return Failed("injected")
        scores = flight.scores.get(name, ())
        if name in flight.late:
            return Late(scores)
        if isinstance(row, Verify):
            return Verified(tokens)
        return Sampled(tokens[0], scores) if tokens else Prefilled(scores, flight.vectors.get(name))

    def _change_batch(self, plan: StepPlan) -> None:
        for sequence_id in plan.leave:
            del self._rows[sequence_id]
        for entry in plan.enter:
            assert entry.sequence_id not in self._rows, "entered twice"
            sampling = entry.sampling
            row = self._rows[entry.sequence_id] = BatchRow(
                sampling,
                fingerprint(entry.adapter),
                entry.images,
                output_index=sampling.output_index,
            )
            for image in entry.images:
                names = content_ids(image.digest, image.n_tokens)
                row.names |= zip(positions_of(image), names, strict=True)
        for sequence_id, patch in plan.patches:
            self._rows[sequence_id].patch(patch)

    def _prefill(self, flight: Flight, row: Prefill) -> None:
        """Compute all of its tokens, but a last one that is read: it comes with the decodes."""
        batch_row = self._rows[row.sequence_id]
        batch_row.position = row.start
        last_apart = row.samples or row.pooling is Pooling.LAST
        run = row.tokens[:-1] if last_apart else row.tokens
        values = self._forward(row.sequence_id, run) if run else []
        if row.samples:
            batch_row.last_token = row.tokens[-1]
        if row.score is not None:
            flight.scores[row.sequence_id] = tuple(
                TokenLogprob(token_id, -float(values[i] % 97))
                for i, token_id in enumerate(row.score.next_tokens)
            )
        if row.pooling in {Pooling.FIRST, Pooling.MEAN}:
            flight.pool(row.sequence_id, values[:1] if row.pooling is Pooling.FIRST else values)

    def _ruled_out(self, row: BatchRow, words: Masks | None) -> frozenset[int]:
        if words is None:
            too_early = row.output_index < row.sampling.params.min_tokens
            return frozenset(row.sampling.banned_tokens if too_early else ())
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: self._vocab_size]
        assert bits.any(), "a mask that leaves nothing"
        return frozenset(np.flatnonzero(bits == 0).tolist())

    def _execute_all(self, ops: Sequence[StorageOp]) -> None:
        for op in ops:
            if isinstance(op, FillBlock | FillState | RollBackState):
                self._op_fault()
            self._execute(op)

    def _execute(self, op: StorageOp) -> None:
        match op:
            case CopyBlock(source, target, n_tokens, None):
                for slot in range(n_tokens):
                    self._slots[target, slot] = self._slots.get((source, slot), (-1, -1))
            case CopyBlock(source, target, n_tokens, int(group)):
                for slot in range(n_tokens):
                    value = self._windows.get((group, source, slot), -1)
                    self._windows[group, target, slot] = value
            case FillBlock(filled, data, None):
                assert self._pool.total_refs(filled) == 1, f"block {filled} is filled and shared"
                kv = unpacked(bytes(data))
                for slot, both in enumerate(zip(kv[::2], kv[1::2], strict=True)):
                    self._slots[filled, slot] = both
            case FillBlock(filled, data, int(group)):
                for slot, value in enumerate(unpacked(bytes(data))):
                    self._windows[group, filled, slot] = value
            case _:
                self._execute_on_states(op)

    def _execute_on_states(self, op: StorageOp) -> None:
        match op:
            case ResetState(slot):
                self._states[slot] = State()
            case RoundState(slot):
                self._states[slot] = self._states[slot].rounded()
            case RollBackState(slot):
                self._states[slot] = self._states_before.pop(slot, self._states[slot])
            case CopyState(source, target):
                self._states[target] = self._states[source]
            case FillState(slot, data):
                kv, roundings = unpacked(bytes(data))
                self._states[slot] = State(kv, roundings, rounded_at=kv)

    def _read(self, read: ReadBlock) -> Parts:
        """As a real runner's, the parts are of one size, with zeros behind the tokens."""
        kv = [n for i in range(read.n_tokens) for n in self._slots[read.block, i]]
        windows = (
            slot if slot is None else self._packed_window(group, slot, read.n_tokens)
            for group, slot in enumerate(read.windows)
        )
        state = None if read.state is None else packed(self._states[read.state][:2], 2)
        return packed(kv, 2 * self._block_size), *windows, state

    def _packed_window(self, group: int, slot: SlotId, n_tokens: int) -> bytes:
        kv = [self._windows[group, slot, i] for i in range(n_tokens)]
        return packed(kv, self._block_size)

    def _forward(self, sequence_id: SequenceId, tokens: Sequence[int]) -> list[int]:
        """KV of the row's next tokens, each from the one before as the blocks have it."""
        row = self._rows[sequence_id]
        past = self._attend(row)
        kv, values = past[-1], list[int]()
        self._check_groups(row, past)
        for position, token_id in enumerate(tokens, start=row.position):
            block = BlockId(row.tables[None][position // self._block_size])
            assert self._pool.total_refs(block) == 1, f"block {block} is written and shared"
            following = chain(kv, row.names.get(position, token_id), row.adapter)
            self._slots[block, position % self._block_size] = kv, following
            kv = following
            values.append(kv)
        self._write_groups(row, values)
        row.position += len(tokens)
        return values

    def _check_groups(self, row: BatchRow, past: list[int]) -> None:
        """The windows hold what the row's tokens will see of them, and the state is its own."""
        for index, group in enumerate(self._groups):
            table = row.tables[index]
            if not isinstance(group, WindowGroup):
                state, expected = self._states[table[0]], State()
                if isinstance(group, RoundedGroup):
                    for kv in past[group.interval_tokens :: group.interval_tokens]:
                        expected = State(kv, expected.roundings).rounded()
                assert state.kv == past[-1], "the state of another prefix"
                assert state.roundings == expected.roundings, "a state was rounded elsewhere"
                continue
            for position in range(max(row.position - group.window + 1, 0), row.position):
                entry, slot = divmod(position, self._block_size)
                assert self._windows[index, table[entry], slot] == past[position + 1], (
                    f"position {position} of a window holds KV of another prefix"
                )

    def _write_groups(self, row: BatchRow, values: list[int]) -> None:
        for index, group in enumerate(self._groups):
            table = row.tables[index]
            if not isinstance(group, WindowGroup):
                self._states_before.setdefault(table[0], self._states[table[0]])
                self._states[table[0]] = self._states[table[0]]._replace(kv=values[-1])
                continue
            for position, value in enumerate(values, start=row.position):
                entry, slot = divmod(position, self._block_size)
                own = SlotId(table[entry])
                assert group.slots.ref_count(own) == 1, "a window's block is shared"
                self._windows[index, own, slot] = value

    def _attend(self, row: BatchRow) -> list[int]:
        """Read every position before the row's next, as attention does: ROOT and their KV."""
        kv = ROOT
        past = [kv]
        for position in range(row.position):
            block = row.tables[None][position // self._block_size]
            previous, own = self._slots.get((block, position % self._block_size), (-1, -1))
            assert previous == kv, f"position {position} holds KV of another prefix"
            kv = own
            past.append(kv)
        return past
