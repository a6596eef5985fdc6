"""One row's bad logits fail that row alone."""

from collections.abc import Callable

import pytest

from engine.mlx_backend.attention.gather import GatherAttention
from engine.mlx_backend.loader import LoadedModel
from engine.mlx_backend.runner import MlxRunner
from engine.mlx_backend.sampler import Sampler
from engine.step import Row, SampleOrder, SequenceId, StepPlan
from engine.types import SamplingParams
from kvstore.arena import Arena
from kvstore.types import BlockId
from tests.checkpoints import VOCAB_SIZE


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
