"""What is computed in the background, and what is pinned: nobody else waits for it."""

import inspect
import sys
from random import Random
from typing import Any

import pytest

from engine.api import InvalidRequest
from engine.core import pins
from engine.core.sequence import Step
from engine.core.step import NO_STEP_MASKS
from engine.values.output import FinishReason
from kvstore import invariants
from kvstore.window import WindowGroup
from tests.profiles import examples
from tests.unit.engine_harness import VOCAB_SIZE, Harness, prompt, row_tokens


def warm(harness: Harness, tokens: list[int], *, pin: bool = False) -> str:
    return harness.serve(tokens, max_tokens=0, is_background=True, pin=pin)


def test_a_prompt_that_was_warmed_is_found_by_the_next_request() -> None:
    harness = Harness()
    warmed = warm(harness, prompt(1, 41))
    assert harness.reason(warmed) is FinishReason.LENGTH
    assert harness.usage(warmed).cached_tokens == 0
    found = harness.serve([*prompt(1, 41), 3, 4, 5])
    assert harness.usage(found).cached_tokens == 41
    again = warm(harness, prompt(1, 41))
    assert harness.usage(again).cached_tokens == 40
    assert harness.scheduler.metrics.warmed_tokens == 41 + 1


def test_warming_counts_neither_as_a_hit_nor_as_a_client_that_waits() -> None:
    harness = Harness()
    warm(harness, prompt(1, 41))
    warm(harness, prompt(1, 41))
    metrics = harness.scheduler.metrics
    assert (metrics.queried_prompt_tokens, metrics.cached_prompt_tokens) == (0, 0)
    assert (metrics.queue_wait_seconds.total, metrics.request_seconds.total) == (0, 0)


def steps_of(harness: Harness, request: str) -> list[dict[str, int]]:
    """How many tokens each step computes, until the request ends."""
    sequence, first = harness.sequence(request), len(harness.plans)
    while sequence.is_live:
        harness.step()
    names = {sequence.id: "request"}
    return [
        {names.get(row, "background"): n for row, n in row_tokens(plan).items()}
        for plan in harness.plans[first:]
    ]


def test_a_request_that_arrives_while_a_prompt_is_warmed_computes_the_same_steps_as_alone() -> None:
    alone, busy = Harness(n_blocks=200), Harness(n_blocks=200)
    expected = steps_of(alone, alone.add(prompt(2, 70), max_tokens=5))
    warmed = busy.add(prompt(1, 150), max_tokens=0, is_background=True)
    for _ in range(3):
        busy.step()
    assert [sum(row_tokens(plan).values()) for plan in busy.plans] == [8, 8, 8]
    assert steps_of(busy, busy.add(prompt(2, 70), max_tokens=5)) == expected
    busy.finish()
    assert busy.reason(warmed) is FinishReason.LENGTH
    assert busy.scheduler.metrics.warmed_tokens == 150
    assert busy.scheduler.metrics.preemptions == 0


def test_a_request_is_planned_while_a_chunk_in_the_background_is_in_flight() -> None:
    """As the loop does: the next step is planned before the last one is committed."""
    harness = Harness(n_blocks=200)
    warmed = harness.add(prompt(1, 150), max_tokens=0, is_background=True)
    in_flight = harness.scheduler.plan()
    assert in_flight is not None
    assert harness.scheduler.plan() is None, "one step at a time"
    request = harness.add(prompt(2, 20))
    step = harness.scheduler.plan()
    assert step is not None
    assert row_tokens(step.plan) == {harness.sequence(request).id: 20}
    harness.compute(in_flight)
    harness.compute(step)
    harness.take(harness.scheduler.take_events())
    harness.finish()
    assert harness.reason(warmed) is FinishReason.LENGTH
    assert harness.scheduler.metrics.warmed_tokens == 150, "what was in flight is not lost"


def test_a_request_that_needs_the_slot_and_the_blocks_of_a_warmed_prompt_gets_both() -> None:
    harness = Harness(n_blocks=40, max_running=1)
    harness.add(prompt(1, 120), max_tokens=0, is_background=True)
    for _ in range(5):
        harness.step()
    request = harness.add(prompt(2, 140))
    assert list(row_tokens(harness.step())) == [harness.sequence(request).id]
    harness.finish()


def test_a_request_that_shares_the_warmed_prompt_goes_on_where_it_was() -> None:
    harness = Harness(n_blocks=200)
    harness.add(prompt(1, 150), max_tokens=0, is_background=True)
    for _ in range(4):
        harness.step()
    request = harness.add([*prompt(1, 150), 1, 2, 3])
    harness.finish()
    assert harness.usage(request).cached_tokens == 32


def test_prompts_in_the_background_are_computed_one_after_the_other() -> None:
    harness = Harness(n_blocks=200)
    for start in range(3):
        harness.add(prompt(start, 40), max_tokens=0, is_background=True, client=f"{start}")
    harness.finish()
    assert {len(plan.rows) for plan in harness.plans} == {1}


def test_what_is_aborted_in_the_background_stays_cached_as_far_as_it_was() -> None:
    harness = Harness()
    warmed = harness.add(prompt(1, 60), max_tokens=0, is_background=True, pin=True)
    harness.step()
    harness.scheduler.abort(warmed)
    harness.finish()
    assert harness.scheduler.pins.n_blocks == 0
    assert harness.usage(harness.serve(prompt(1, 60))).cached_tokens == 8


def fill(harness: Harness) -> None:
    """Serve other prompts until all that may be evicted has been."""
    for start in range(2, 2 + 2 * harness.pool.n_blocks // 10):
        harness.serve(prompt(start, 40))


def test_a_pinned_prompt_outlives_all_others() -> None:
    harness = Harness()
    warm(harness, prompt(1, 42), pin=True)
    warm(harness, prompt(30, 42))
    fill(harness)
    assert harness.scheduler.pins.n_blocks == 10
    assert harness.usage(harness.serve([*prompt(1, 42), 1])).cached_tokens == 40
    assert harness.usage(harness.serve([*prompt(30, 42), 1])).cached_tokens < 4
    invariants.check_idle(harness.store)


def test_pinned_again_it_takes_no_more() -> None:
    harness = Harness()
    for _ in range(3):
        warm(harness, prompt(1, 42), pin=True)
    assert harness.scheduler.pins.n_blocks == 10
    warm(harness, prompt(1, 20), pin=True)
    assert harness.scheduler.pins.n_blocks == 10, "it begins the other one"


def test_a_clear_unpins() -> None:
    harness = Harness()
    warm(harness, prompt(1, 42), pin=True)
    harness.scheduler.pins.clear(None)
    harness.store.clear()
    harness.store.forget_cleared()
    assert harness.scheduler.pins.n_blocks == 0
    assert harness.pool.n_free == harness.pool.n_blocks
    invariants.check_idle(harness.store)


def test_pins_have_a_bound_and_the_refusal_names_it() -> None:
    harness = Harness()
    warm(harness, prompt(1, 42), pin=True)
    with pytest.raises(InvalidRequest, match=r"takes 10 blocks .* 10 are pinned of at most 16"):
        warm(harness, prompt(2, 42), pin=True)
    assert harness.scheduler.pins.n_blocks == 10


def test_of_two_that_were_accepted_the_one_for_which_there_is_no_room_any_more_fails() -> None:
    harness = Harness()
    first, second = (
        harness.add(prompt(start, 42), max_tokens=0, is_background=True, pin=True)
        for start in (1, 2)
    )
    harness.finish()
    assert harness.reason(first) is FinishReason.LENGTH
    end = harness.end(second)
    assert (end.finish_reason, end.param) == (FinishReason.ERROR, "pin")
    assert harness.usage(harness.serve(prompt(2, 42))).cached_tokens == 41, "it is warm"


def test_a_request_that_only_fits_without_the_pins_gets_their_blocks() -> None:
    harness = Harness(n_blocks=50)
    warm(harness, prompt(1, 42), pin=True)
    request = harness.serve(prompt(2, 180))
    assert harness.reason(request) is FinishReason.LENGTH
    assert harness.scheduler.pins.n_blocks == 0


def test_more_pins_than_calls_can_be_nested_are_given_up_for_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pins, "PINNED_SHARE", 1.0)
    n_pins = 250
    harness = Harness(n_blocks=n_pins, max_context_tokens=4 * n_pins, step_tokens=1024)
    for i in range(n_pins):
        warm(harness, [*divmod(i, VOCAB_SIZE), 1, 2], pin=True)
    assert harness.scheduler.pins.n_blocks == n_pins
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + n_pins // 2)
    try:
        request = harness.serve(prompt(3, 4 * n_pins - 6))
    finally:
        sys.setrecursionlimit(limit)
    assert harness.reason(request) is FinishReason.LENGTH
    assert harness.scheduler.pins.n_blocks == 0


@pytest.mark.parametrize(
    ("harness", "tokens", "message"),
    [
        (Harness().without_prefix_cache(), 42, "prefix_cache is off"),
        (
            Harness(groups=[WindowGroup(0, window=6, n_slots=64, block_size=4, step_tokens=32)]),
            42,
            "sliding windows",
        ),
        (Harness(), 3, "less than a block"),
    ],
    ids=["no cache", "windows", "short"],
)
def test_what_cannot_be_pinned_is_refused_in_words(
    harness: Harness, tokens: int, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        warm(harness, prompt(1, tokens), pin=True)


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 0}, {"is_background": True}, {"is_background": True, "n": 2, "max_tokens": 0}],
)
def test_only_prompts_without_an_answer_are_pinned(fields: dict[str, Any]) -> None:
    harness = Harness()
    with pytest.raises(InvalidRequest, match="background request with max_tokens 0"):
        harness.add(prompt(1, 8), pin=True, **fields)


def test_lines_are_decoded_together_once_their_common_prompt_is_computed() -> None:
    harness = Harness(n_blocks=200, max_running=8)
    shared = prompt(1, 64)
    lines = [
        harness.add([*shared, line], max_tokens=8, is_background=True, client="lines")
        for line in range(6)
    ]
    harness.finish()
    assert max(len(plan.rows) for plan in harness.plans) >= 4
    assert sum(harness.usage(line).cached_tokens >= 64 - 8 for line in lines) == 5
    assert all(harness.usage(line).completion_tokens == 8 for line in lines)
    metrics = harness.scheduler.metrics
    assert (metrics.first_token_seconds.total, metrics.token_gap_seconds.total) == (0, 0)


def test_a_line_that_was_refused_blocks_keeps_no_chat_waiting() -> None:
    """The engine's fairness between clients does not count what runs in the background."""
    harness = Harness(n_blocks=40, max_running=4)
    for line in range(4):
        harness.add(prompt(line, 80), max_tokens=40, is_background=True, client=f"lines {line % 2}")
    for _ in range(20):
        harness.step()
    chat = harness.add(prompt(9, 150), client="chat")
    assert list(row_tokens(harness.step())) == [harness.sequence(chat).id]
    harness.finish()


@pytest.mark.parametrize("seed", range(examples(30)))
def test_no_step_of_a_chat_has_a_row_of_a_line(seed: int) -> None:
    """Chats and lines come at random, steps overlap as in the loop, and blocks are short. Every
    request has the tokens that it has alone.
    """
    print("seed", seed)
    random = Random(seed)
    harness = Harness(n_blocks=random.choice([30, 60, 200]), max_running=random.choice([2, 4, 8]))
    scheduler, requests = harness.scheduler, dict[str, tuple[list[int], int, int]]()
    prefixes = [prompt(random.randrange(50), random.randrange(8, 60)) for _ in range(3)]

    def arrive(*, is_background: bool) -> None:
        tokens = [*random.choice(prefixes), *prompt(random.randrange(50), random.randrange(1, 30))]
        max_tokens, n = random.randrange(0, 25), random.choice([1, 1, 2])
        client = f"{is_background} {random.randrange(2)}"
        added = harness.add(tokens, max_tokens, n=n, client=client, is_background=is_background)
        requests[added] = tokens, max_tokens, n

    in_flight: Step | None = None
    for turn in range(400):
        if turn < 250 and random.random() < 0.1:
            arrive(is_background=random.random() < 0.6)
        if random.random() < 0.02 and requests:
            scheduler.abort(random.choice(list(requests)))
        has_chats = scheduler.sequences.n_foreground > 0
        step = scheduler.plan()
        if step is not None and has_chats:
            assert not [row for row in step.rows if row.sequence.request.is_background]
        if step is not None:
            harness.runner.submit(step.plan)
        if in_flight is not None:
            scheduler.commit(in_flight, harness.runner.collect())
        if step is not None:
            harness.runner.launch()
            harness.runner.draw(NO_STEP_MASKS)
        in_flight = step
        harness.take(scheduler.take_events())
        invariants.check(harness.store)
    if in_flight is not None:
        scheduler.commit(in_flight, harness.runner.collect())
        harness.take(scheduler.take_events())
    harness.finish()
    for request, (tokens, max_tokens, n) in requests.items():
        alone = Harness(n_blocks=200)
        served = alone.serve(tokens, max_tokens, n=n)
        for index in range(n):
            if harness.reason(request, index) is not FinishReason.ABORT:
                assert harness.output(request, index) == alone.output(served, index)
