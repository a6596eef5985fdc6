"""Steps in flight: the same tokens, replayed from plans alone, and no copies of the arena."""

import pickle
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from engine.core.step import (
    NO_STEP_MASKS,
    BatchEntry,
    Decode,
    ModelRunner,
    Prefill,
    Sampled,
    Sampling,
    SequenceId,
    StepMasks,
    StepPlan,
    StepResult,
)
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.model.views import LayerView
from engine.mlx_backend.runner import Launch, MlxRunner
from engine.mlx_backend.sampling.sampler import Sampler
from engine.mlx_backend.submitted_step import SubmittedStep
from engine.values.request import Request, SamplingParams
from engine.values.tokens import pack
from kvstore.ops import TablePatch
from measuring.device import steps_in_flight
from measuring.random_checkpoint import VOCAB_SIZE
from tests.devices import cpu_attention, launches
from tests.golden.conftest import ATTENTION
from tests.golden.driving import compute, random_tokens
from tests.offline import OfflineDaemon, Room, Served, cached_model

BLOCK_SIZE = 8
ROOM = Room(n_blocks=20, block_size=BLOCK_SIZE)


class Recorder:
    """A ModelRunner that keeps all that goes down to another, pickled, and what comes back."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.calls: list[bytes] = []
        self.results: list[StepResult] = []

    def submit(self, plan: StepPlan) -> None:
        self.calls.append(pickle.dumps(plan))
        self._runner.submit(plan)

    def launch(self) -> None:
        self._runner.launch()

    def draw(self, masks: StepMasks) -> None:
        self.calls.append(pickle.dumps(masks))
        self._runner.draw(masks)

    def collect(self) -> StepResult:
        self.calls.append(pickle.dumps(None))
        self.results.append(self._runner.collect())
        return self.results[-1]


def recorded_in(recorders: list[Recorder]) -> Callable[[ModelRunner], ModelRunner]:
    def watch(runner: ModelRunner) -> ModelRunner:
        recorders.append(Recorder(runner))
        return recorders[-1]

    return watch


def test_plans_of_one_run_give_the_same_on_a_second_runner(
    served: Served, attention: Attention
) -> None:
    """Whatever the scheduler does: arrivals, hits, forks, preemption, ends. Where both launches may
    serve, the second runner's launch is the other one: results do not depend on it, to a bit.
    """
    recorders: list[Recorder] = []
    daemon = OfflineDaemon(served, attention, ROOM, recorded_in(recorders))
    [recorder] = recorders
    system = random_tokens(19, seed=60)
    drawn = SamplingParams(temperature=1.0, seed=5, repetition_penalty=1.2, top_logprobs=2)
    daemon.serve(
        Request("scored", pack(random_tokens(12, seed=61)), 3, drawn, prompt_logprobs=1),
        *(
            Request(
                str(i), pack((*system, *random_tokens(4 + i, seed=62 + i))), 20, drawn, n=1 + i % 2
            )
            for i in range(4)
        ),
    )
    assert daemon.scheduler.metrics.preemptions > 0
    model, launch = cached_model(served, attention, ROOM), launches()[-1]
    again = MlxRunner(model, Sampler(VOCAB_SIZE), launch)
    results = []
    for call in map(pickle.loads, recorder.calls):
        match call:
            case StepPlan():
                again.submit(call)
            case StepMasks():
                again.launch()
                again.draw(call)
            case _:
                results.append(again.collect())
    assert results == recorder.results


def test_a_decode_takes_few_bytes(served_of: Callable[[str], Served]) -> None:
    recorders: list[Recorder] = []
    room, attention = Room(n_blocks=200), ATTENTION["gather"]()
    daemon = OfflineDaemon(served_of("qwen3"), attention, room, recorded_in(recorders))
    [recorder] = recorders
    greedy = SamplingParams(temperature=0)
    daemon.serve(*(Request(str(i), pack((i, 1, 2)), 7, greedy) for i in range(8)))
    plans = [call for call in map(pickle.loads, recorder.calls) if isinstance(call, StepPlan)]
    [full] = [plan for plan in plans[-2:] if len(plan.rows) == 8 and not plan.patches]
    assert all(isinstance(row, Decode) for row in full.rows)
    assert len(pickle.dumps(full)) - len(pickle.dumps(StepPlan())) < 8 * 16


@pytest.mark.device
@pytest.mark.parametrize("attention", ATTENTION)
def test_writes_and_reads_in_flight_copy_no_arena(
    served_of: Callable[[str], Served], attention: str, launch: Launch
) -> None:
    room = Room(n_blocks=20_000, block_size=BLOCK_SIZE)
    model = cached_model(served_of("qwen3"), ATTENTION[attention](), room)
    found = steps_in_flight(model, launch)
    assert found["pools_times"] < 0.5


@cpu_attention
def test_what_an_unread_run_sees_in_the_last_layer_is_not_computed(
    served_of: Callable[[str], Served], launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a decode: nothing is stored or read behind it."""
    seen = list[int]()
    attend = LayerView._attend_group

    def note_and_attend(view: LayerView, index: int, queries: mx.array, *rest: Any) -> mx.array:
        if index in view._unread:
            seen.append(queries.shape[2])
        return attend(view, index, queries, *rest)

    model = cached_model(served_of("qwen3"), ATTENTION["cascade"](), ROOM)
    monkeypatch.setattr(LayerView, "_attend_group", note_and_attend)
    runner = MlxRunner(model, Sampler(VOCAB_SIZE), launch)
    names = [SequenceId(i) for i in range(2)]
    enter = [BatchEntry(name, Sampling(SamplingParams(temperature=0), seed=0)) for name in names]
    tables = [(name, TablePatch(None, 0, (2 * name, 2 * name + 1))) for name in names]
    first, decode = Prefill(names[0], 0, (1, 2, 3), samples=True), Decode(names[0])
    compute(runner, StepPlan(enter=enter, patches=tables, rows=[first]))
    assert seen == []
    unread = Prefill(names[1], 0, (1, 2, 3, 4, 5))
    compute(runner, StepPlan(rows=[decode, unread]))
    assert seen == [5]
    read = Prefill(names[1], 5, (6, 7), samples=True)
    compute(runner, StepPlan(rows=[decode, read]))
    assert seen == [5]


def test_a_result_that_cannot_be_read_leaves_no_step_behind(
    served_of: Callable[[str], Served], launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all that are collected later would be answered with an older one's."""
    model = cached_model(served_of("qwen3"), ATTENTION["gather"](), ROOM)
    mlx_runner = MlxRunner(model, Sampler(VOCAB_SIZE), launch)
    name = SequenceId(0)
    entry = BatchEntry(name, Sampling(SamplingParams(temperature=0), seed=0))
    table, prompt = TablePatch(None, 0, tuple(range(8))), tuple(random_tokens(9, seed=1))
    first = Prefill(name, 0, prompt, samples=True)
    mlx_runner.submit(StepPlan(enter=[entry], patches=[(name, table)], rows=[first]))
    mlx_runner.launch()
    mlx_runner.draw(NO_STEP_MASKS)
    mlx_runner.submit(StepPlan(rows=[Decode(name)]))
    with monkeypatch.context() as patched:
        patched.setattr(SubmittedStep, "accept_tokens", _out_of_memory)
        with pytest.raises(MemoryError):
            mlx_runner.collect()
    mlx_runner.submit(StepPlan(leave=[name], enter=[entry], patches=[(name, table)], rows=[first]))
    mlx_runner.launch()
    mlx_runner.draw(NO_STEP_MASKS)
    [result] = mlx_runner.collect().rows
    assert isinstance(result, Sampled)


def _out_of_memory(_: object) -> StepResult:
    raise MemoryError
