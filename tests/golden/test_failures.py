"""One row's bad logits fail that row alone."""

from collections.abc import Callable
from dataclasses import replace
from threading import Thread

import mlx.core as mx
import numpy as np
import pytest

from engine.core.step import (
    NO_STEP_MASKS,
    BatchEntry,
    Decode,
    Failed,
    Prefill,
    RunnerLost,
    Sampled,
    Sampling,
    SequenceId,
    StepPlan,
)
from engine.mlx_backend.kv.arena import Arena, LayerArena
from engine.mlx_backend.kv.shape import SlotMapping
from engine.mlx_backend.kv.storage import Storage
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.runner import Launch, MlxRunner
from engine.mlx_backend.sampling.sampler import Sampler
from engine.values.request import SamplingParams
from kvstore.ops import CopyBlock, CopyState, ResetState, RollBackState, TablePatch, When
from kvstore.types import BlockId, SlotId
from measuring.random_checkpoint import VOCAB_SIZE
from tests.golden.conftest import ATTENTION
from tests.golden.driving import BLOCK_SIZE, Driver, compute, compute_one, random_tokens
from tests.offline import Room, Served, cached_model

GREEDY = SamplingParams(temperature=0)


def plain_runner(served: Served, launch: Launch) -> MlxRunner:
    model = cached_model(served, Attention(), Room(n_blocks=4))
    return MlxRunner(model, Sampler(VOCAB_SIZE), launch)


def one_chunk(index: int, tokens: list[int], sampling: Sampling) -> StepPlan:
    """A sequence that enters with a block of its own, computes its tokens, and samples."""
    name = SequenceId(index)
    return StepPlan(
        enter=[BatchEntry(name, sampling)],
        patches=[(name, TablePatch(None, 0, (index,)))],
        rows=[Prefill(name, 0, tuple(tokens), samples=True)],
    )


def together(*plans: StepPlan) -> StepPlan:
    """One step of what several do."""
    return StepPlan(
        enter=[entry for plan in plans for entry in plan.enter],
        patches=[patch for plan in plans for patch in plan.patches],
        rows=[row for plan in plans for row in plan.rows],
    )


def test_a_row_with_every_token_banned_fails_alone(
    served_of: Callable[[str], Served], launch: Launch
) -> None:
    runner = plain_runner(served_of("qwen3"), launch)
    sound = Sampling(GREEDY, seed=0)
    everything = tuple(range(VOCAB_SIZE))
    never = replace(GREEDY, min_tokens=1)
    hopeless = Sampling(never, seed=0, banned_tokens=everything)
    rows = [
        one_chunk(index, [5, 6, 7], sampling)
        for index, sampling in enumerate((sound, hopeless, sound))
    ]
    result = compute(runner, together(*rows))
    assert [type(row) for row in result.rows] == [Sampled, Failed, Sampled]
    assert isinstance(compute_one(runner, one_chunk(3, [5, 6, 7], hopeless)), Failed)


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *(("qwen3", name) for name in ATTENTION),
        *((family, "gather") for family in ("gemma3_text", "qwen3_5")),
    ],
)
def test_what_freed_blocks_and_states_held_harms_nobody(
    served_of: Callable[[str], Served], family: str, attention: str, launch: Launch
) -> None:
    """All storage holds NaN, as if broken requests had had it: the answers are as from zeros."""
    served = served_of(family)
    clean, poisoned = (Driver(served, ATTENTION[attention](), launch=launch) for _ in range(2))
    poison(poisoned.model.storage)
    found = []
    for driver in (clean, poisoned):
        lengths = (13, 5 * BLOCK_SIZE + 3, 12)
        rows = [driver.subject(random_tokens(n, seed=n)) for n in lengths]
        found.append(np.concatenate(driver.logits(rows, lasts=9)))
    assert np.isfinite(found[1]).all()
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)


def from_another_thread() -> mx.array:
    """A zero that nobody can compute any more: an array belongs to the thread that made it."""
    made: list[mx.array] = []
    thread = Thread(target=lambda: made.append(mx.ones((1,)) - 1))
    thread.start()
    thread.join()
    return made[0]


def poison(storage: Storage) -> None:
    for arena in (storage.full, *storage.windows):
        poison_blocks(arena)
    slots = [SlotId(slot) for slot in range(storage.states.n_slots)]
    if slots:
        storage.states.write(slots, [array * mx.nan for array in storage.states.read(slots)])


def poison_blocks(arena: Arena) -> None:
    blocks = mx.arange(arena.n_blocks)
    for layer in arena.layers:
        keys, values = (array * mx.nan for array in layer.blocks(blocks))
        mx.eval(keys, values)
        layer.put_blocks(0, keys, values)
        shape = layer.shape
        slot_mapping = arena.slot_mapping(mx.array([arena.scratch]), mx.array([0]), shape.heads)
        nan_keys, nan_values = (
            mx.full((1, shape.kv_heads, 1, dim), mx.nan, dtype) for dim, dtype in shape.vectors
        )
        layer.write(slot_mapping, nan_keys, nan_values)


def test_storage_that_cannot_be_computed_is_lost(
    served_of: Callable[[str], Served], launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write hangs on what has failed: every later step would fail with it."""
    runner = plain_runner(served_of("qwen3"), launch)
    write, nothing = LayerArena.write, from_another_thread()

    def write_more(layer: LayerArena, slot_mapping: SlotMapping, *vectors: mx.array) -> None:
        write(layer, slot_mapping, *(array + nothing for array in vectors))

    monkeypatch.setattr(LayerArena, "write", write_more)
    with pytest.raises(RunnerLost):
        compute(runner, one_chunk(0, [5, 6], Sampling(GREEDY, seed=0)))


def test_a_failure_that_leaves_the_storage_alone_is_the_rows_own(
    served_of: Callable[[str], Served], launch: Launch
) -> None:
    runner = plain_runner(served_of("qwen3"), launch)
    sampling = Sampling(GREEDY, seed=0)
    with pytest.raises(ValueError, match="do not cover the positions 0 to 9"):
        runner.submit(one_chunk(0, [5] * 9, sampling))
    assert isinstance(compute_one(runner, one_chunk(1, [5, 6], sampling)), Sampled)


def test_a_step_that_fails_before_its_forwards_rolls_back_no_earlier_one(
    served_of: Callable[[str], Served], launch: Launch
) -> None:
    """A sequence ends while the next step, which has it as well, is in flight. Its state is cached,
    and rolled back by what that step adds: nothing, if the step fails at its first op.
    """
    runner = plain_runner(served_of("qwen3_5"), launch)
    states, slot, name = runner._storage.states, SlotId(0), SequenceId(0)
    first = one_chunk(0, [5, 6, 7], Sampling(GREEDY, seed=0))
    first.patches.append((name, TablePatch(0, 0, (slot,))))
    first.ops = [(When.FIRST, ResetState(slot))]
    compute(runner, first)
    runner.submit(StepPlan(rows=[Decode(name)]))
    runner.launch()
    runner.draw(NO_STEP_MASKS)
    ops = CopyBlock(BlockId(1), BlockId(2), 1), CopyState(SlotId(states.n_slots), slot)
    failing = StepPlan(rows=[Decode(name)], ops=[(When.FIRST, op) for op in ops])
    with pytest.raises(IndexError):
        _submit_next(runner, failing)
    before = states.read([slot])
    states.execute(RollBackState(slot))
    for found, expected in zip(states.read([slot]), before, strict=True):
        assert mx.array_equal(found, expected)


def _submit_next(runner: MlxRunner, plan: StepPlan) -> None:
    """It fails at once where it is built ahead, else when it is launched."""
    runner.submit(plan)
    runner.collect()
    runner.launch()
