"""Rank 0's runner: what it sends, what it expects, and how a failure ends."""

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.step import (
    NO_STEP_MASKS,
    Decode,
    Prefill,
    Row,
    RunnerLost,
    SequenceId,
    StepPlan,
    StepResult,
    Verify,
)
from engine.mlx_backend.ranks.leader import STEP_SECONDS, TOKEN_SECONDS, Leader
from engine.mlx_backend.ranks.link import RankLost
from engine.mlx_backend.ranks.plan import Frame, decode_ids, decode_plan
from kvstore.types import BlockId, SlotId


class Runner:
    """Remembers its calls, and fails in one of them."""

    def __init__(self, calls: list[str], failing: str = "") -> None:
        self._calls = calls
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*_: object) -> StepResult:
            self._calls.append(name)
            if name == self._failing:
                raise ValueError("no such block")
            return StepResult([])

        return call


class Case:
    def __init__(self, failing: str = "") -> None:
        self.calls = list[str]()
        self.sent = list[tuple[Frame, bytes]]()
        self.limits = list[float | None]()
        self.leader = Leader(cast(Any, Runner(self.calls, failing)), self._send, self.limits.append)

    def _send(self, frame: Frame, body: bytes) -> None:
        self.calls.append(frame.name)
        self.sent.append((frame, body))


def test_each_call_is_sent_first() -> None:
    case = Case()
    leader = case.leader
    leader.submit(StepPlan(7))
    leader.launch()
    leader.draw(NO_STEP_MASKS)
    leader.collect()
    leader.resize_ahead()
    leader.shrink([BlockId(5), BlockId(3)])
    leader.give_back([BlockId(5)], [[SlotId(1)], []])
    assert case.calls == [
        *("SUBMIT", "submit", "LAUNCH", "launch", "DRAW", "draw", "COLLECT", "collect"),
        *("RESIZE", "resize_ahead", "SHRINK", "shrink", "GIVE_BACK", "give_back"),
    ]
    bodies = [body for _, body in case.sent]
    assert decode_plan(bodies[0]) == StepPlan(7, leave=[], ops=[])
    assert bodies[1:5] == [b""] * 4
    assert decode_ids(bodies[5]) == [[3, 5]]
    assert decode_ids(bodies[6]) == [[5], [1], []]


@given(st.lists(st.integers(0, 512), min_size=1, max_size=5), st.integers(0, 9))
def test_the_limit_follows_from_the_tokens(prompts: list[int], n_draft: int) -> None:
    case = Case()
    rows: list[Row] = [
        Prefill(SequenceId(i), 0, tuple(range(n_tokens))) for i, n_tokens in enumerate(prompts)
    ]
    rows += [Decode(SequenceId(90)), Verify(SequenceId(91), 5, 6, tuple(range(n_draft)))]
    case.leader.submit(StepPlan(rows=rows))
    seconds = STEP_SECONDS + TOKEN_SECONDS * (sum(prompts) + 1 + 1 + n_draft)
    assert case.limits == [seconds]
    case.leader.submit(StepPlan())  # while the first is computed
    assert case.limits == [seconds]
    case.leader.collect()
    assert case.limits == [seconds, STEP_SECONDS]
    case.leader.collect()
    assert case.limits == [seconds, STEP_SECONDS, None]


@pytest.mark.parametrize("failing", ["submit", "launch", "draw", "collect"])
def test_an_error_of_a_call(failing: str) -> None:
    """The others have made the call, or have not: all must end."""
    leader = Case(failing).leader
    steps = {
        "submit": lambda: leader.submit(StepPlan()),
        "launch": leader.launch,
        "draw": lambda: leader.draw(NO_STEP_MASKS),
        "collect": leader.collect,
    }
    with pytest.raises(RunnerLost, match="a step failed on rank 0: ValueError: no such block"):
        steps[failing]()


def test_a_plan_that_cannot_be_sent() -> None:
    case = Case()
    with pytest.raises(RunnerLost, match="images or a draft model"):
        case.leader.submit(StepPlan(forget=[b"image"]))
    assert not case.calls


def test_a_lost_rank() -> None:
    def send(frame: Frame, body: bytes) -> None:
        raise RankLost("rank 1 has ended")

    calls = list[str]()
    leader = Leader(cast(Any, Runner(calls)), send, lambda seconds: None)
    with pytest.raises(RunnerLost, match=r"^rank 1 has ended$"):
        leader.launch()
    assert not calls
