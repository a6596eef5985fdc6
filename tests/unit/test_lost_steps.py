"""Steps that are lost, with their own blocks or with all that was stored: no request notices."""

import logging
from random import Random

import pytest

from engine.core.inbox import Inbox
from engine.core.loop import EngineLoop
from engine.core.step import StepLost, StorageLost
from engine.values.output import FinishReason
from engine.values.request import Pooling, SamplingParams
from kvstore import invariants
from kvstore.node import BlockEvent, NamespaceCleared
from kvstore.sizes import StorageBytes
from tests.unit.engine_harness import Harness, prompt

NO_BYTES = StorageBytes(block=0, slots=(), arenas=0)
LOSSES: list[type[StepLost]] = [StepLost, StorageLost]
SYSTEM = prompt(9, 21)


class Device:
    """An engine's loop over a device that fails when it is called for the `lost`-th time."""

    def __init__(
        self, lost: dict[int, type[StepLost]], n_blocks: int = 64, step_tokens: int = 16
    ) -> None:
        self.harness = Harness(n_blocks, step_tokens=step_tokens, max_running=8)
        self.harness.fault = self._lose_perhaps
        self.lost = lost
        self.calls = 0
        self.loop = EngineLoop(
            self.harness.scheduler, self.harness.runner, Inbox(), self.harness.take, NO_BYTES
        )

    def _lose_perhaps(self) -> None:
        self.calls += 1
        if self.calls in self.lost:
            raise self.lost[self.calls]("no client may see this")

    def lose_next(self, loss: type[StepLost]) -> None:
        """Have the next call fail."""
        self.lost[self.calls + 1] = loss

    def turn(self) -> None:
        self.loop.turn()
        invariants.check(self.harness.store)

    def finish(self) -> None:
        """Take turns until everybody has ended."""
        for _ in range(500):
            if self.loop.is_idle:
                invariants.check_idle(self.harness.store)
                return
            self.turn()
        raise AssertionError("no end after 500 turns")

    def serve(self, tokens: list[int]) -> str:
        request = self.harness.add(tokens)
        self.finish()
        return request


def requests(harness: Harness) -> list[str]:
    """Requests of all kinds, some with a common beginning."""
    return [
        harness.add([*SYSTEM, *prompt(1, 6)], 12, n=3),
        harness.add([*SYSTEM, *prompt(2, 3)], 9, sampling=SamplingParams(seed=5, top_logprobs=1)),
        harness.add(prompt(3, 30), 6, prompt_logprobs=1),
        harness.add(prompt(4, 26), 0, pooling=Pooling.MEAN),
        harness.add([*SYSTEM, *prompt(5, 9)], 0, pooling=Pooling.LAST),
        harness.add(prompt(6, 5), 20, stop=("ab",)),
    ]


def answers(device: Device) -> list[object]:
    """What clients get: texts, tokens, log-probabilities, vectors and reasons."""
    found: list[object] = []
    names = requests(device.harness)
    device.finish()
    for name in names:
        events = device.harness.events[name]
        found.append([token for event in events for token in event.prompt_logprobs])
        for index in {event.index for event in events}:
            end = device.harness.end(name, index)
            of_index = [event for event in events if event.index == index]
            logprobs = [one for event in of_index for one in event.logprobs]
            texts = device.harness.text(name, index), device.harness.output(name, index)
            found.append((*texts, logprobs, end.pooled, end.finish_reason, end.error))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_answers_are_those_of_a_device_that_loses_nothing(seed: int) -> None:
    """Whichever calls fail, in steps that overlap, and in an arena that is short of blocks too."""
    random = Random(seed)
    n_blocks, rate = random.choice([18, 64]), random.choice([0.02, 0.1, 0.3])
    lost = {n: random.choice(LOSSES) for n in range(1, 200) if random.random() < rate}
    device, expected = Device(lost, n_blocks), answers(Device({}, n_blocks))
    assert answers(device) == expected
    n_recomputed = device.harness.scheduler.metrics.recomputed_sequences
    assert bool(n_recomputed) == any(n <= device.calls for n in lost)


@pytest.mark.parametrize(("loss", "cached_tokens"), [(StepLost, 39), (StorageLost, 0)])
def test_what_other_steps_have_computed_is_lost_only_with_the_storage(
    loss: type[StepLost], cached_tokens: int
) -> None:
    device = Device({})
    device.serve(prompt(1, 40))
    device.lose_next(loss)
    request = device.serve(prompt(2, 20))
    assert device.harness.reason(request) is FinishReason.LENGTH
    assert device.harness.scheduler.metrics.recomputed_sequences == 1
    assert device.harness.usage(device.serve(prompt(1, 40))).cached_tokens == cached_tokens


def test_what_a_sequence_had_computed_before_the_lost_steps_is_not_computed_again() -> None:
    device = Device({})
    request = device.harness.add(prompt(1, 40), 4)
    device.turn()
    device.turn()
    device.lost[device.calls + 2] = StepLost  # the second step is collected, the third in flight
    device.finish()
    assert device.harness.reason(request) is FinishReason.LENGTH
    assert device.harness.scheduler.metrics.recomputed_sequences == 1
    assert device.harness.runner.n_computed == 40 + 3


def test_a_sequence_without_a_row_in_flight_loses_what_it_has_with_the_storage() -> None:
    """Prompts of three clients take turns, and each chunk is a whole step."""
    device = Device({})
    prompts = [prompt(client, 60) for client in range(3)]
    names = [
        device.harness.add(tokens, client=str(client)) for client, tokens in enumerate(prompts)
    ]
    for _ in range(4):
        device.turn()
    device.lose_next(StorageLost)
    device.finish()
    assert device.harness.scheduler.metrics.recomputed_sequences == 3
    for name, tokens in zip(names, prompts, strict=True):
        alone = Device({})
        assert device.harness.text(name) == alone.harness.text(alone.serve(tokens))


@pytest.mark.parametrize("loss", LOSSES)
def test_an_aborted_sequence_of_a_lost_step_ends_as_aborted(loss: type[StepLost]) -> None:
    device = Device({})
    request = device.harness.add(prompt(1, 10), 30)
    for _ in range(4):
        device.turn()
    device.loop.abort(request)
    device.lose_next(loss)
    device.finish()
    assert device.harness.reason(request) is FinishReason.ABORT
    assert device.harness.scheduler.metrics.recomputed_sequences == 0


def test_pinned_prefixes_go_with_the_storage_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = Device({})
    device.harness.add(prompt(1, 40), 0, is_background=True, pin=True)
    device.finish()
    assert device.harness.scheduler.pins.n_blocks == 10
    device.lose_next(StorageLost)
    with caplog.at_level(logging.WARNING):
        device.serve(prompt(2, 9))
    assert device.harness.scheduler.pins.n_blocks == 0
    assert "10 pinned blocks" in caplog.text


def test_routers_are_notified_that_nothing_is_cached_any_more() -> None:
    device = Device({})
    device.serve(prompt(1, 40))
    tree = device.harness.store.tree
    assert tree is not None
    facts = tree.block_events = list[BlockEvent]()
    device.lose_next(StorageLost)
    device.serve(prompt(1, 40))
    cleared = [at for at, fact in enumerate(facts) if isinstance(fact, NamespaceCleared)]
    assert cleared == [0]


def test_an_error_that_is_no_loss_still_ends_the_requests_of_its_step() -> None:
    device = Device({})

    def fail() -> None:
        raise RuntimeError("out of memory")

    device.harness.fault = fail
    request = device.harness.add(prompt(1, 10))
    device.turn()
    assert device.harness.end(request).error == "the step failed: RuntimeError: out of memory"
    assert device.harness.scheduler.metrics.recomputed_sequences == 0
