"""Two ranks of the hash model under random load: what rank 0 sends is all that the other one has.

Disks, images and faults are left out: ranks refuse the first two, and end with the third.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from engine.core.step import (
    Masks,
    RunnerLost,
    SampledToken,
    StepMasks,
    StepPlan,
    StepResult,
)
from engine.mlx_backend.ranks.follower import follow
from engine.mlx_backend.ranks.leader import Leader
from engine.mlx_backend.ranks.plan import Frame
from tests.simulation import daemon, simulator
from tests.simulation.fake_runner import BatchRow, FakeRunner
from tests.simulation.simulator import Simulation


class Follower(FakeRunner):
    """A rank that does not sample: its tokens are those of rank 0, in the order of its draws."""

    tokens: Iterator[int]

    def draw(self, masks: StepMasks) -> None:
        assert not len(masks.masks), "masks are rank 0's"
        unmasked = cast(Masks, [None] * len(masks.sequence_ids))
        super().draw(masks._replace(masks=unmasked))

    def _draw(self, row: BatchRow, kv: int, mask: Masks | None) -> SampledToken:
        row.last_token = next(self.tokens)
        row.output_index += 1
        return SampledToken(row.last_token)


@dataclass
class Own:
    """The calls of rank 0's own runner."""

    runner: "RankedRunner"

    def submit(self, plan: StepPlan) -> None:
        FakeRunner.submit(self.runner, plan)

    def launch(self) -> None:
        FakeRunner.launch(self.runner)

    def draw(self, masks: StepMasks) -> None:
        FakeRunner.draw(self.runner, masks)

    def collect(self) -> StepResult:
        return FakeRunner.collect(self.runner)


class RankedRunner(FakeRunner):
    """Rank 0, with another rank in the same process. After each call both hold the same."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.n_compared = 0
        self._other = Follower(*arguments)
        self._sampled = deque[int]()
        self._other.tokens = iter(self._sampled.popleft, None)
        self._frames = deque[bytes]()
        self._leader = Leader(cast(Any, Own(self)), self._send, lambda seconds: None)

    def submit(self, plan: StepPlan) -> None:
        self._leader.submit(plan)
        self._compare()

    def launch(self) -> None:
        self._leader.launch()
        self._compare()

    def draw(self, masks: StepMasks) -> None:
        self._leader.draw(masks)
        self._compare()

    def collect(self) -> StepResult:
        result = self._leader.collect()
        self._compare()
        self.n_compared += 1
        return result

    def _draw(self, row: BatchRow, kv: int, mask: Masks | None) -> SampledToken:
        token = super()._draw(row, kv, mask)
        self._sampled.append(token.token_id)
        return token

    def _send(self, frame: Frame, body: bytes) -> None:
        self._frames.append(bytes([frame]) + body)

    def _receive(self) -> bytes:
        if not self._frames:
            raise Empty
        return self._frames.popleft()

    def _compare(self) -> None:
        """Have the other rank make the calls that it has been sent; then it holds the same."""
        with suppress(Empty):
            follow(self._receive, cast(Any, SimpleNamespace(runner=self._other)))
        other = self._other
        assert not self._sampled, "the other rank draws less often"
        for name in ("_slots", "_windows", "_states", "_states_before"):
            assert getattr(other, name) == getattr(self, name), name
        assert other._rows.keys() == self._rows.keys()
        for sequence_id, row in self._rows.items():
            assert _state(other._rows[sequence_id]) == _state(row), sequence_id


def _state(row: BatchRow) -> tuple[object, ...]:
    return row.tables, row.position, row.last_token, row.kept_kv, row.adapter


class RankedSimulation(Simulation):
    """One seed decides the sizes, the arrivals, the aborts, the clears, the restarts."""

    n_compared = 0

    def _start(self) -> None:
        self._has_disk = False
        self._fault_rate = self._op_fault_rate = self._host_fault_rate = self._loss_rate = 0.0
        if self.steps:
            self._count()
        super()._start()

    def settle(self) -> None:
        super().settle()
        self._count()

    def _count(self) -> None:
        assert isinstance(self.daemon.runner, RankedRunner)
        self.n_compared += self.daemon.runner.n_compared


def run_ranks(seed: int, n_turns: int) -> int:
    """Simulate two ranks for so many turns. Returns the steps that both have computed."""
    with (
        patch.object(daemon, "FakeRunner", RankedRunner),
        patch.object(simulator, "IMAGE_MACHINES", 0.0),
    ):
        simulation = RankedSimulation(seed)
        try:
            for _ in range(n_turns):
                simulation.step()
        except RunnerLost as lost:
            raise AssertionError(lost) from lost
        simulation.settle()
        return simulation.n_compared
