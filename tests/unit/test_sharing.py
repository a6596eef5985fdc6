"""Nobody stops another: how slots, blocks and prompts are shared between clients, in steps."""

from collections import Counter
from unittest.mock import Mock

import pytest

from engine.core.queue import WaitingQueue
from tests.unit.engine_harness import Harness, prompt


def steps_until_first_token(harness: Harness, request: str) -> int:
    for steps in range(1, 1000):
        harness.step()
        if harness.output(request):
            return steps
    raise AssertionError("no token in 1000 steps")


def test_one_client_s_many_rows_make_room_for_another_s() -> None:
    harness = Harness(n_blocks=900, max_running=32, step_tokens=64)
    many = harness.add(prompt(1, 5), max_tokens=90, n=32, client="many")
    while len(harness.scheduler.running) < 32:
        harness.step()
    one = harness.add(prompt(2, 5), max_tokens=1, client="one")
    assert steps_until_first_token(harness, one) == 1
    assert harness.scheduler.metrics.client_preemptions == 1
    harness.finish()
    alone = Harness(n_blocks=900, max_running=32, step_tokens=64)
    again = alone.add(prompt(1, 5), max_tokens=90, n=32, client="many")
    alone.finish()
    for index in range(32):
        assert harness.output(many, index) == alone.output(again, index)


def test_one_client_s_many_prompts_do_not_come_before_another_s() -> None:
    harness = Harness(n_blocks=900, max_running=32, max_waiting=300)
    for i in range(120):
        harness.add(prompt(i, 150), max_tokens=9, client="many")
    for _ in range(3):
        harness.step()
    one = harness.add(prompt(200, 20), max_tokens=1, client="one")
    assert steps_until_first_token(harness, one) == 1


def test_a_client_s_slots_go_to_whoever_runs_less_and_never_back() -> None:
    harness = Harness(n_blocks=900, max_running=8)
    for client in ("a", "b", "c"):
        harness.add(prompt(ord(client), 5), max_tokens=90, n=16, client=client)
        for _ in range(20):
            harness.step()
    rows = Counter(s.request.client for s in harness.scheduler.running)
    assert sorted(rows.values()) == [2, 3, 3]
    assert harness.scheduler.metrics.client_preemptions == 4 + 2
    for _ in range(20):
        harness.step()
    assert harness.scheduler.metrics.client_preemptions == 4 + 2
    harness.finish()


def test_blocks_that_one_client_holds_are_given_up_for_another() -> None:
    harness = Harness(n_blocks=40, block_size=4, max_running=16)
    many = [harness.add(prompt(i, 12), max_tokens=30, client="many") for i in range(10)]
    while not harness.scheduler.metrics.preemptions:
        harness.step()
    one = harness.add(prompt(20, 12), max_tokens=1, client="one")
    assert steps_until_first_token(harness, one) <= 4
    assert 0 < harness.scheduler.metrics.client_preemptions <= 3
    harness.finish()
    assert {len(harness.output(request)) for request in many} == {30}


def test_where_one_block_is_short_whose_client_runs_most_is_preempted() -> None:
    """All rows want another block in one step, and there are too few for all by one."""
    harness = Harness(n_blocks=17, block_size=4, max_running=16)
    for i in range(5):
        harness.add(prompt(i, 7), max_tokens=9, client="many")
    harness.step()
    harness.add(prompt(9, 7), max_tokens=9, client="one")
    while not harness.scheduler.metrics.preemptions:
        harness.step()
    assert [s.request.client for s in harness.scheduler.waiting] == ["many"]
    harness.finish()


def test_nobody_is_preempted_for_whoever_would_hold_more() -> None:
    harness = Harness(n_blocks=20, block_size=4)
    short = [harness.add(prompt(i, 8), max_tokens=20, client="short") for i in range(2)]
    harness.step()
    long = harness.add(prompt(9, 70), max_tokens=2, client="long")
    harness.finish()
    assert list(harness.events) == [*short, long]
    assert harness.scheduler.metrics.client_preemptions == 0


def test_a_slot_that_was_freed_for_one_client_keeps_no_other_from_another_slot() -> None:
    harness = Harness(max_running=2)
    harness.add(prompt(1, 5), max_tokens=20, n=2, client="many")
    while len(harness.scheduler.running) < 2:
        harness.step()
    for client in ("one", "other"):
        harness.add(prompt(ord(client[0]), 5), client=client)
    admission, sequences = harness.scheduler._admission, harness.scheduler.sequences
    victim = admission.victim(prompts=())
    assert victim is not None
    harness.store.donate(sequences.preempt(victim))
    assert admission.admit("other") is None
    (left,) = sequences.running
    harness.store.donate(sequences.preempt(left))
    assert admission.admit("other") is not None


def test_who_was_passed_over_for_want_of_another_s_blocks_is_asked_again_in_that_step() -> None:
    harness = Harness(n_blocks=24, step_tokens=64)
    harness.add(prompt(1, 12), max_tokens=30, client="holder")
    harness.add(prompt(2, 48), max_tokens=3, client="large")
    harness.step()
    harness.add(prompt(3, 4), max_tokens=30, client="little")
    harness.step()
    harness.add(prompt(4, 24), client="little")
    harness.step()
    assert len(harness.scheduler.waiting) == 1, "no blocks for it"
    late = harness.add(prompt(5, 4), client="holder")
    while len(harness.scheduler.waiting) == 2:
        plan = harness.step()
    assert len(plan.enter) == 2
    assert harness.sequence(late) in harness.scheduler.running


def test_while_no_slot_is_to_be_had_nobody_who_waits_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness(n_blocks=900, max_running=4, max_waiting=300)
    for i in range(120):
        harness.add(prompt(i, 5), max_tokens=50, client="many")
    for _ in range(4):
        harness.step()
    looks = Mock(wraps=harness.scheduler._admission.waiting.next)
    monkeypatch.setattr(WaitingQueue, "next", looks)
    for _ in range(20):
        harness.step()
    assert looks.call_count == 0
