"""Prompts that are pooled go through the scheduler as others do, and leave in the cache only what
others begin with.
"""

import numpy as np
import pytest

from engine.api import InvalidRequest
from engine.core.request import validate
from engine.core.step import Limits
from engine.values.output import FinishReason
from engine.values.request import Pooling, Request
from engine.values.tokens import pack
from kvstore.recurrent import RecurrentGroup
from kvstore.tokens import Tokens
from tests.simulation.model import ROOT, chain, pooled_number
from tests.unit.engine_harness import Harness, prompt

BLOCK = 4


def numbers(tokens: list[int]) -> list[int]:
    """What the model's positions are pooled from."""
    kv, found = ROOT, list[int]()
    for token in tokens:
        kv = chain(kv, token)
        found.append(pooled_number(kv))
    return found


def pooled(harness: Harness, request: str) -> float:
    (end,) = (event for event in harness.events[request] if event.finish_reason is not None)
    assert end.finish_reason is FinishReason.LENGTH
    (number,) = np.frombuffer(end.pooled, "<f4")
    return float(number)


def cached(harness: Harness, tokens: list[int]) -> int:
    """How many tokens a prompt that goes on behind these would find."""
    namespace = harness.scheduler.namespaces.of("", "")
    return harness.store.probe(namespace, Tokens([*tokens, 0]))


@pytest.mark.parametrize("step_tokens", [16, 17, 64])
def test_each_way_of_pooling_in_chunks_or_at_once(step_tokens: int) -> None:
    harness = Harness(step_tokens=step_tokens)
    text = prompt(1, 41)
    asked = {way: harness.add(text, 0, pooling=way) for way in Pooling}
    harness.finish()
    own = numbers(text)
    assert pooled(harness, asked[Pooling.LAST]) == own[-1]
    assert pooled(harness, asked[Pooling.FIRST]) == own[0]
    assert pooled(harness, asked[Pooling.MEAN]) == np.float32(sum(own)) / np.float32(len(own))


def test_the_last_token_is_pooled_behind_a_prefix_that_others_computed() -> None:
    harness = Harness(n_blocks=200, step_tokens=16)
    instruction = prompt(1, 40)
    texts = [[*instruction, i, i + 1, i + 2] for i in range(16)]
    asked = [harness.add(text, 0, pooling=Pooling.LAST, shared_tokens=40) for text in texts]
    harness.finish()
    assert [pooled(harness, one) for one in asked] == [numbers(text)[-1] for text in texts]
    assert harness.scheduler.metrics.computed_prompt_tokens == 40 + 16 * 3


@pytest.mark.parametrize("way", [Pooling.MEAN, Pooling.FIRST])
def test_what_needs_more_than_the_last_token_adopts_nothing(way: Pooling) -> None:
    harness = Harness()
    harness.serve(prompt(1, 41))
    asked = harness.add(prompt(1, 41), 0, pooling=way)
    harness.finish()
    assert harness.usage(asked).cached_tokens == 0
    assert harness.scheduler.metrics.queried_prompt_tokens == 41  # of the first alone


def test_a_text_that_comes_once_leaves_what_is_shared_of_it() -> None:
    harness = Harness()
    text = prompt(1, 30)
    harness.add(text, 0, pooling=Pooling.LAST, shared_tokens=10)
    harness.finish()
    assert cached(harness, text) == 8, "in whole blocks"
    assert harness.store.pool.n_free == harness.store.pool.n_blocks - 2


def test_a_flood_of_texts_evicts_no_more_than_what_runs_of_it_at_a_time() -> None:
    harness = Harness(n_blocks=64, max_running=2, max_waiting=600)
    conversation = prompt(1, 100)
    harness.serve(conversation)
    instruction = prompt(2, 12)
    for i in range(300):
        text = [*instruction, *prompt(3 + i, 20)]
        harness.add(text, 0, pooling=Pooling.LAST, shared_tokens=len(instruction))
    harness.finish()
    assert cached(harness, conversation) >= 100
    assert cached(harness, instruction) == 12
    assert harness.store.counters.evictions == 0


def test_the_same_flood_cached_whole_would_have_evicted_the_conversation() -> None:
    harness = Harness(n_blocks=64, max_running=2, max_waiting=600)
    conversation = prompt(1, 100)
    harness.serve(conversation)
    for i in range(300):
        harness.add([*prompt(2, 12), *prompt(3 + i, 20)], 0, pooling=Pooling.LAST)
    harness.finish()
    assert cached(harness, conversation) == 0


def test_nobody_waits_for_what_another_will_not_share() -> None:
    """Two texts are the same for longer than is known: both compute that."""
    harness = Harness(step_tokens=16)
    text = prompt(1, 60)
    for _ in range(2):
        harness.add(text, 0, pooling=Pooling.LAST, shared_tokens=8)
    harness.finish()
    assert harness.scheduler.metrics.computed_prompt_tokens == 8 + 2 * 52


def test_what_is_shared_resumes_from_a_recurrent_state() -> None:
    groups = [RecurrentGroup(16, 8, BLOCK, 10_000)]
    harness = Harness(n_blocks=200, step_tokens=16, groups=groups)
    texts = [[*prompt(1, 40), i, i + 1, i + 2] for i in range(8)]
    asked = [harness.add(text, 0, pooling=Pooling.LAST, shared_tokens=40) for text in texts]
    harness.finish()
    assert [pooled(harness, one) for one in asked] == [numbers(text)[-1] for text in texts]
    assert harness.scheduler.metrics.computed_prompt_tokens == 40 + 8 * 3


def test_preempted_and_pooled_all_the_same() -> None:
    harness = Harness(n_blocks=24, step_tokens=16, max_running=4)
    texts = [prompt(i, 50) for i in range(3)]
    asked = [harness.add(text, 0, pooling=Pooling.MEAN, shared_tokens=0) for text in texts]
    harness.add(prompt(9, 10), max_tokens=40)
    harness.finish()
    for one, text in zip(asked, texts, strict=True):
        assert pooled(harness, one) == pytest.approx(sum(numbers(text)) / len(text))


LIMITS = Limits(50, 100, 100, 4, 4, 16, pools=True)


@pytest.mark.parametrize(
    ("request_", "limits", "param"),
    [
        (Request("r", pack((1,)), 1, pooling=Pooling.LAST), LIMITS, "pooling"),
        (Request("r", pack((1,)), 0, pooling=Pooling.LAST, n=2), LIMITS, "pooling"),
        (Request("r", pack((1,)), 0, pooling=Pooling.LAST, prompt_logprobs=0), LIMITS, "pooling"),
        (
            Request("r", pack((1,)), 0, pooling=Pooling.LAST),
            Limits(50, 100, 100, 4, 4, 16),
            "pooling",
        ),
        (Request("r", pack((1,)), 0, shared_tokens=-1), LIMITS, "shared_tokens"),
    ],
)
def test_what_cannot_be_pooled_is_refused(request_: Request, limits: Limits, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate(request_, limits)
    assert refused.value.param == param
