"""What the batch keeps of each row on the device from one step to the next."""

import mlx.core as mx

from engine.core.step import BatchEntry, Decode, Sampling, SequenceId, StepPlan
from engine.mlx_backend.batch import Batch
from engine.values.request import SamplingParams

NAME = SequenceId(1)


def test_a_step_that_was_prepared_keeps_its_tokens_when_the_next_ones_are_set() -> None:
    """Its forwards may be launched only after the next tokens are set."""
    batch = Batch(n_groups=0)
    batch.change(StepPlan(enter=[BatchEntry(NAME, Sampling(SamplingParams(), seed=0))]))
    [row] = batch.prepare_inputs(StepPlan(rows=[Decode(NAME)])).rows
    batch.set_next_tokens([row], mx.array([5], dtype=mx.uint32))
    prepared = batch.prepare_inputs(StepPlan(rows=[Decode(NAME)]))
    batch.set_next_tokens([row], mx.array([7], dtype=mx.uint32))
    following = batch.prepare_inputs(StepPlan(rows=[Decode(NAME)]))
    assert prepared.token_ids[row.index].item() == 5
    assert following.token_ids[row.index].item() == 7
    assert prepared.token_ids.dtype == following.token_ids.dtype == mx.int32
