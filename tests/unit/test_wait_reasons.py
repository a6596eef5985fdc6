"""Why a sequence waits, by what admission has found."""

from engine.values.request import WaitReason
from tests.unit.engine_harness import Harness, prompt


def reason(harness: Harness, request_id: str) -> WaitReason | None:
    return harness.scheduler.wait_reason(harness.sequence(request_id))


def test_who_runs_waits_for_nothing() -> None:
    harness = Harness()
    runs = harness.add(prompt(1, 10))
    assert reason(harness, runs) is WaitReason.TURN, "nobody has looked at it yet"
    harness.step()
    assert reason(harness, runs) is None


def test_as_many_run_as_may() -> None:
    harness = Harness(max_running=1)
    harness.add(prompt(1, 10))
    second = harness.add(prompt(2, 10))
    harness.step()
    assert reason(harness, second) is WaitReason.SLOTS


def test_too_few_blocks() -> None:
    harness = Harness(n_blocks=9, block_size=4)
    harness.add(prompt(1, 20), max_tokens=8)
    large, small = harness.add(prompt(2, 20)), harness.add(prompt(3, 3))
    harness.step()
    assert reason(harness, large) is WaitReason.MEMORY
    assert reason(harness, small) is WaitReason.MEMORY, "it stands behind the large one"


def test_another_computes_the_same_prompt() -> None:
    harness = Harness(step_tokens=16)
    harness.add(prompt(1, 40))
    twin = harness.add(prompt(1, 40))
    harness.step()
    assert reason(harness, twin) is WaitReason.TWIN
    while harness.scheduler.waiting:
        harness.step()
    assert reason(harness, twin) is None, "it runs"


def test_outputs_beyond_the_first_wait_for_it() -> None:
    harness = Harness(step_tokens=16)
    harness.add(prompt(1, 40), n=2)
    harness.step()
    (second,) = harness.scheduler.waiting
    assert harness.scheduler.wait_reason(second) is WaitReason.TWIN


def test_a_twin_that_finds_no_slot_either_waits_for_its_twin_first() -> None:
    harness = Harness(step_tokens=16, max_running=1)
    harness.add(prompt(1, 40), max_tokens=9)
    twin = harness.add(prompt(1, 40))
    harness.step()
    assert reason(harness, twin) is WaitReason.TWIN
    for _ in range(3):
        harness.step()
    assert reason(harness, twin) is WaitReason.SLOTS


def test_a_step_without_tokens_left() -> None:
    harness = Harness(step_tokens=16)
    harness.add(prompt(1, 40))
    other = harness.add(prompt(2, 10))
    harness.step()
    assert reason(harness, other) is WaitReason.TURN
