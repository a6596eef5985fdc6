"""One row's bad logits fail that row alone."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from engine.mlx_backend.attention.gather import GatherAttention
from engine.mlx_backend.attention.strategy import Attention
from engine.mlx_backend.loader import LoadedModel
from engine.mlx_backend.runner import MlxRunner
from engine.mlx_backend.sampler import Sampler
from engine.step import Row, SampleOrder, SequenceId, StepPlan
from engine.types import SamplingParams
from kvstore.arena import Arena
from kvstore.types import BlockId
from tests.checkpoints import VOCAB_SIZE
from tests.golden.driving import BLOCK_SIZE, Driver, random_tokens


def test_a_row_with_every_token_banned_fails_alone(
    loaded_of: Callable[[str], LoadedModel],
) -> None:
    loaded = loaded_of("qwen3")
    arena = Arena(loaded.layers, loaded.dtype, n_blocks=4, block_size=8)
    runner = MlxRunner(loaded.model, arena, GatherAttention(), Sampler(VOCAB_SIZE))
    greedy = SamplingParams(temperature=0)
    sound = SampleOrder(greedy, seed=0, output_index=0)
    hopeless = SampleOrder(greedy, seed=0, output_index=0, banned_tokens=range(VOCAB_SIZE))
    rows = tuple(
        Row(SequenceId(i), 0, [5, 6, 7], [BlockId(i)], order)
        for i, order in enumerate((sound, hopeless, sound))
    )
    result = runner.run(StepPlan((), rows))
    assert result.sampled.keys() == {0, 2}
    assert result.failed.keys() == {1}
    alone = runner.run(StepPlan((), (rows[1],)))
    assert alone.sampled == {}
    assert alone.failed.keys() == {1}


def test_a_table_that_is_too_short_is_refused(loaded_of: Callable[[str], LoadedModel]) -> None:
    loaded = loaded_of("qwen3")
    arena = Arena(loaded.layers, loaded.dtype, n_blocks=4, block_size=8)
    runner = MlxRunner(loaded.model, arena, GatherAttention(), Sampler(VOCAB_SIZE))
    row = Row(SequenceId(0), 0, [5] * 9, [BlockId(0)])
    with pytest.raises(ValueError, match="does not cover 9 positions"):
        runner.run(StepPlan((), (row,)))


def test_what_freed_blocks_held_harms_nobody(
    loaded_of: Callable[[str], LoadedModel], attention: Attention
) -> None:
    """All blocks hold NaN, as if a broken request had had them: the answers are as from zeros."""
    loaded = loaded_of("qwen3")
    clean, poisoned = Driver(loaded, attention), Driver(loaded, attention)
    poison(poisoned.arena)
    found = []
    for driver in (clean, poisoned):
        lengths = (13, 5 * BLOCK_SIZE + 3, 12)
        rows = [driver.subject(random_tokens(n, seed=n)) for n in lengths]
        found.append(np.concatenate(driver.logits(rows, [n - 9 for n in lengths])))
    assert np.isfinite(found[1]).all()
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)


def poison(arena: Arena) -> None:
    blocks = mx.arange(arena.n_blocks)
    for layer in arena.layers:
        keys, values = (array * mx.nan for array in layer.blocks(blocks))
        mx.eval(keys, values)
        layer.put_blocks(blocks, keys, values)
    places = arena.places(mx.array([arena.scratch]), mx.array([0]), arena.layers[0].shape.kv_heads)
    nan = mx.full((1, arena.layers[0].shape.kv_heads, 1, arena.layers[0].shape.key_dim), mx.nan)
    for layer in arena.layers:
        layer.write(places, nan, nan)
