"""What one engine's storage gives as bytes is as good in another's as if that had computed it."""

import pickle
from collections.abc import Callable, Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from engine.core.step import (
    NO_STEP_MASKS,
    BatchEntry,
    Decode,
    Prefill,
    Row,
    Sampling,
    SequenceId,
    StepPlan,
)
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.runner import Launch, MlxRunner
from engine.mlx_backend.sampling.sampler import Sampler
from engine.values.request import SamplingParams
from kvstore.ops import (
    CopyBlock,
    FillBlock,
    FillState,
    Parts,
    ReadBlock,
    StepOp,
    TablePatch,
    When,
)
from kvstore.pool import blocks_for
from kvstore.recurrent import RecurrentState
from kvstore.types import BlockId, SlotId
from kvstore.window import WindowState
from measuring.random_checkpoint import VOCAB_SIZE
from tests.golden.conftest import ATTENTION
from tests.golden.driving import BLOCK_SIZE, Driver, Subject, compute, random_tokens
from tests.offline import Room, Served, cached_model

LASTS = 6


def reads(subject: Subject) -> list[ReadBlock]:
    """All that the subject's written tokens have, each window's blocks where it holds them."""
    lease = subject.lease
    n_blocks = blocks_for(lease.written_tokens, BLOCK_SIZE)
    windows = [
        dict(enumerate(h.slots, h.first)) for h in lease.group_states if isinstance(h, WindowState)
    ]
    states = [state.slot for state in lease.group_states if isinstance(state, RecurrentState)]
    return [
        ReadBlock(
            lease.table[index],
            min(lease.written_tokens - index * BLOCK_SIZE, BLOCK_SIZE),
            tuple(slots.get(index) for slots in windows),
            states[0] if states and index == n_blocks - 1 else None,
        )
        for index in range(n_blocks)
    ]


def fills(targets: Sequence[ReadBlock], contents: Sequence[Parts]) -> list[StepOp]:
    """The same parts into the targets' places."""
    ops: list[StepOp] = []
    for target, (block, *windows, state) in zip(targets, contents, strict=True):
        assert block is not None
        ops.append((When.FIRST, FillBlock(target.block, bytes(block))))
        for group, (slot, data) in enumerate(zip(target.windows, windows, strict=True)):
            if slot is not None and data is not None:
                fill = FillBlock(BlockId(slot), bytes(data), group)
                ops.append((When.FIRST, fill))
        if target.state is not None and state is not None:
            ops.append((When.FIRST, FillState(target.state, bytes(state))))
    return ops


def reading(blocks: Sequence[ReadBlock]) -> tuple[StepOp, ...]:
    return tuple((When.READ, read) for read in blocks)


@pytest.mark.parametrize("n_tokens", [2 * BLOCK_SIZE, 45])
def test_what_was_read_continues_elsewhere_bit_for_bit(
    served: Served, attention: Attention, n_tokens: int
) -> None:
    """At a block's end, and in the middle of one."""
    tokens = random_tokens(n_tokens + LASTS, seed=n_tokens)
    first = Driver(served, attention, seed=1)
    subject = first.subject(tokens)
    first.prefill(subject, n_tokens)
    plan = pickle.loads(pickle.dumps(StepPlan(ops=reading(reads(subject)))))
    contents = compute(first.runner, plan).read
    assert len(contents) == blocks_for(n_tokens, BLOCK_SIZE)
    for parts in contents:
        for data, n_bytes in zip(parts, first.model.storage.part_bytes, strict=True):
            assert data is None or len(data) == n_bytes

    second = Driver(served, attention, seed=2)
    assert second.model.storage.kv_format == first.model.storage.kv_format
    other = second.subject(tokens)
    second.store.plan(other.lease, n_tokens)
    second.store.take_ops()  # nothing is computed: the state's reset comes before its fill
    targets = list(reads_of(other, n_tokens))
    filling = StepPlan(ops=tuple(fills(targets, contents)))
    compute(second.runner, pickle.loads(pickle.dumps(filling)))
    again = compute(second.runner, StepPlan(ops=reading(targets))).read
    for found, read in zip(again, contents, strict=True):
        assert all(a == b for a, b in zip(found, read, strict=True) if b is not None)

    second.store.commit(other.lease, n_tokens)
    expected = first.logits([subject], LASTS - 1)[0]
    found_logits = second.logits([other], LASTS - 1)[0]
    assert np.array_equal(found_logits, expected)


def reads_of(subject: Subject, n_tokens: int) -> list[ReadBlock]:
    """As if the first `n_tokens` had been written."""
    written, subject.lease.written_tokens = subject.lease.written_tokens, n_tokens
    found = reads(subject)
    subject.lease.written_tokens = written
    return found


def test_what_lies_behind_a_tail_is_not_read(served_of: Callable[[str], Served]) -> None:
    driver = Driver(served_of("qwen3"), ATTENTION["gather"]())
    subject = driver.subject(random_tokens(BLOCK_SIZE + 1, seed=3))
    driver.prefill(subject, BLOCK_SIZE)
    block = subject.lease.table[0]
    wanted = tuple(ReadBlock(block, n) for n in (3, BLOCK_SIZE))
    tail, whole = (parts[0] for parts in compute(driver.runner, StepPlan(ops=reading(wanted))).read)
    assert tail is not None
    assert whole is not None
    room = (-1, BLOCK_SIZE, driver.model.storage.full.layers[0].shape.key_dim)
    some, all_of_it = (np.frombuffer(data, np.float32).reshape(room) for data in (tail, whole))
    assert np.array_equal(some[:, :3], all_of_it[:, :3])
    assert not some[:, 3:].any()
    assert all_of_it[:, 3:].any()


@pytest.mark.device
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_k8v4", "gemma3_text_q8"])
def test_fills_and_reads_beside_steps_in_flight_copy_no_arena(
    served_of: Callable[[str], Served], family: str, attention: str, launch: Launch
) -> None:
    room = Room(n_blocks=20_000, block_size=BLOCK_SIZE, spare=2_000)
    model = cached_model(served_of(family), ATTENTION[attention](), room)
    n_windows = len(model.storage.windows)
    runner = MlxRunner(model, Sampler(VOCAB_SIZE), launch)
    names = [SequenceId(i) for i in range(4)]
    enter = [BatchEntry(name, Sampling(SamplingParams(temperature=0), seed=0)) for name in names]
    ids = {name: tuple(range(100 * name, 100 * name + 100)) for name in names}
    tables = [
        (name, TablePatch(group, 0, ids[name]))
        for name in names
        for group in (None, *range(n_windows))
    ]
    prompts: list[Row] = [
        Prefill(name, 0, tuple(random_tokens(40, name)), samples=True) for name in names
    ]
    block, read = BlockId(1_000), ReadBlock(BlockId(0), BLOCK_SIZE, (SlotId(0),) * n_windows)
    runner.submit(StepPlan(enter=enter, patches=tables, rows=prompts, ops=reading([read])))
    runner.launch()
    runner.draw(NO_STEP_MASKS)
    [parts] = [result.read[0] for result in [runner.collect()]]
    target = ReadBlock(block, BLOCK_SIZE, (SlotId(1_000),) * n_windows)
    ops = tuple(fills([target], [parts]))
    runner.submit(StepPlan(ops=ops, rows=list(map(Decode, names))))
    runner.launch()
    runner.draw(NO_STEP_MASKS)
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for step in range(20):
        prefill = Prefill(names[0], 100 + 30 * step, tuple(random_tokens(30, step)))
        plan = StepPlan(
            ops=(ops if step % 3 else ()) + (reading([target, read]) if step % 2 else ()),
            rows=[*map(Decode, names[1:]), prefill],
        )
        runner.submit(plan)
        runner.collect()
        runner.launch()
        runner.draw(NO_STEP_MASKS)
    assert runner.collect().read[0][0] == parts[0]
    pools = [model.storage.full, *model.storage.windows]
    pool_bytes = min(arena.layers[0].planes[0].nbytes for arena in pools)
    assert mx.get_peak_memory() - before < pool_bytes / 2


class Noted:
    """A function that notes its calls."""

    def __init__(self, notes: list[str], name: str, function: Callable[..., object]) -> None:
        self._notes = notes
        self._name = name
        self._function = function

    def __call__(self, *given: object) -> object:
        self._notes.append(self._name)
        return self._function(*given)


def copies_and_fills(
    runner: MlxRunner, groups: Sequence[int | None], names: Sequence[SequenceId]
) -> tuple[list[StepOp], Parts, list[ReadBlock]]:
    """Begins the sequences. Returns ops that copy the first one's first block along a chain and
    fill it in elsewhere, its parts, and reads of it and of where it is then.
    """
    enter = [BatchEntry(name, Sampling(SamplingParams(temperature=0), seed=0)) for name in names]
    tables = [
        (name, TablePatch(group, 0, tuple(range(100 * name, 100 * name + 100))))
        for name in names
        for group in groups
    ]
    rows: list[Row] = [
        Prefill(name, 0, tuple(random_tokens(40, name)), samples=True) for name in names
    ]
    chain = [BlockId(block) for block in (0, 1_000, 1_001, 1_002)]
    copies: list[StepOp] = [
        (When.FIRST, CopyBlock(source, target, BLOCK_SIZE, group))
        for group in groups
        for source, target in pairwise(chain)
    ]
    places = [
        ReadBlock(block, BLOCK_SIZE, (SlotId(block),) * (len(groups) - 1))
        for block in (*chain, BlockId(1_003))
    ]
    first = StepPlan(enter=enter, patches=tables, rows=rows, ops=reading(places[:1]))
    [parts] = compute(runner, first).read
    return [*copies, *fills(places[-1:], [parts])], parts, places


def run_beside(
    runner: MlxRunner, launch: Launch, notes: list[str], ops: Sequence[StepOp], n_steps: int
) -> None:
    """Steps with and without the ops, each submitted before the last is collected."""
    first, *others = (SequenceId(i) for i in range(4))
    runner.submit(StepPlan(rows=list(map(Decode, (first, *others)))))
    for step in range(n_steps):
        runner.launch()
        runner.draw(NO_STEP_MASKS)
        prefill = Prefill(first, 100 + 30 * step, tuple(random_tokens(30, step)))
        notes.clear()
        runner.submit(StepPlan(ops=ops if step % 3 else (), rows=[*map(Decode, others), prefill]))
        if launch is Launch.AHEAD:
            assert "forward" in notes
        if launch is Launch.AHEAD or step % 3:
            assert not {"eval", "synchronize"} & set(notes)
        runner.collect()
    runner.launch()
    runner.draw(NO_STEP_MASKS)
    runner.collect()


@pytest.mark.device
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_k8v4"])
def test_copies_and_fills_beside_a_step_in_flight_neither_wait_for_it_nor_copy_an_arena(
    served_of: Callable[[str], Served],
    family: str,
    attention: str,
    launch: Launch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a fork does, a hit of a partly filled block, and a load from disk. The step's forward has
    been built when the one before is collected, except where none is built ahead.
    """
    room = Room(n_blocks=20_000, block_size=BLOCK_SIZE, spare=2_000)
    model = cached_model(served_of(family), ATTENTION[attention](), room)
    runner = MlxRunner(model, Sampler(VOCAB_SIZE), launch)
    groups = [None, *range(len(model.storage.windows))]
    names = [SequenceId(i) for i in range(4)]
    ops, parts, places = copies_and_fills(runner, groups, names)
    notes = list[str]()
    for name in ("eval", "synchronize"):
        monkeypatch.setattr(mx, name, Noted(notes, name, getattr(mx, name)))
    monkeypatch.setattr(model, "forward", Noted(notes, "forward", model.forward))
    run_beside(runner, launch, notes, ops, 4)  # what is allocated once has been
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    run_beside(runner, launch, notes, ops, 12)
    pools = [model.storage.full, *model.storage.windows]
    pool_bytes = min(arena.layers[0].planes[0].nbytes for arena in pools)
    assert mx.get_peak_memory() - before < pool_bytes / 2
    alone = StepPlan(ops=(*ops, *reading(places)))
    assert compute(runner, alone).read == (parts,) * len(places)
