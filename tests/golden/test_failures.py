"""One row's bad logits fail that row alone."""

from collections.abc import Callable
from threading import Thread

import mlx.core as mx
import numpy as np
import pytest

from engine.mlx_backend.attention.strategy import GatherAttention
from engine.mlx_backend.model.storage import Storage
from engine.mlx_backend.runner import MlxRunner
from engine.mlx_backend.sampling.sampler import Sampler
from engine.runner import RunnerLost
from engine.step import Row, SampleOrder, SequenceId, StepPlan, no_masks
from engine.types import SamplingParams
from kvstore.arena import Arena, LayerArena
from kvstore.types import BlockId, SlotId
from tests.checkpoints import VOCAB_SIZE
from tests.golden.conftest import ATTENTION
from tests.golden.driving import BLOCK_SIZE, Driver, random_tokens
from tests.offline import Room, Served, cached_model


def plain_runner(served: Served) -> MlxRunner:
    model = cached_model(served, GatherAttention(), Room(n_blocks=4))
    return MlxRunner(model, Sampler(VOCAB_SIZE))


def test_a_row_with_every_token_banned_fails_alone(
    served_of: Callable[[str], Served],
) -> None:
    runner = plain_runner(served_of("qwen3"))
    greedy = SamplingParams(temperature=0)
    sound = SampleOrder(greedy, seed=0, output_index=0)
    hopeless = SampleOrder(greedy, seed=0, output_index=0, banned_tokens=range(VOCAB_SIZE))
    rows = tuple(
        Row(SequenceId(i), 0, [5, 6, 7], [BlockId(i)], order)
        for i, order in enumerate((sound, hopeless, sound))
    )
    result = runner.run(StepPlan((), rows), no_masks)
    assert result.sampled.keys() == {0, 2}
    assert result.failed.keys() == {1}
    alone = runner.run(StepPlan((), (rows[1],)), no_masks)
    assert alone.sampled == {}
    assert alone.failed.keys() == {1}


@pytest.mark.parametrize(
    ("family", "attention"),
    [("qwen3", "gather"), ("qwen3", "cascade"), ("gemma3_text", "gather"), ("qwen3_5", "gather")],
)
def test_what_freed_blocks_and_states_held_harms_nobody(
    served_of: Callable[[str], Served], family: str, attention: str
) -> None:
    """All storage holds NaN, as if broken requests had had it: the answers are as from zeros."""
    served = served_of(family)
    clean, poisoned = (Driver(served, ATTENTION[attention]()) for _ in range(2))
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
        layer.put_blocks(blocks, keys, values)
        shape = layer.shape
        places = arena.places(mx.array([arena.scratch]), mx.array([0]), shape.kv_heads)
        nan = mx.full((1, shape.kv_heads, 1, shape.key_dim), mx.nan)
        layer.write(places, nan, nan)


def test_storage_that_cannot_be_computed_is_lost(
    served_of: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write hangs on what has failed: every later step would fail with it."""
    runner = plain_runner(served_of("qwen3"))
    write, nothing = LayerArena.write, from_another_thread()

    def write_more(layer: LayerArena, places: mx.array, *vectors: mx.array) -> None:
        write(layer, places, *(array + nothing for array in vectors))

    monkeypatch.setattr(LayerArena, "write", write_more)
    with pytest.raises(RunnerLost):
        runner.run(StepPlan((), (Row(SequenceId(0), 0, [5, 6], [BlockId(0)]),)), no_masks)


def test_a_failure_that_leaves_the_storage_alone_is_the_rows_own(
    served_of: Callable[[str], Served],
) -> None:
    runner = plain_runner(served_of("qwen3"))
    greedy = SampleOrder(SamplingParams(temperature=0), seed=0, output_index=0)
    short = Row(SequenceId(0), 0, [5] * 9, [BlockId(0)])
    with pytest.raises(ValueError, match="do not cover the positions 0 to 9"):
        runner.run(StepPlan((), (short,)), no_masks)
    sound = Row(SequenceId(1), 0, [5, 6], [BlockId(0)], greedy)
    assert runner.run(StepPlan((), (sound,)), no_masks).sampled.keys() == {1}
