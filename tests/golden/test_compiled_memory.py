"""The memory of compiled decodes: no pool is copied, and traces do not accumulate."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.core.step import StepPlan
from engine.mlx_backend.decode import compiled as compiled_module
from engine.mlx_backend.decode.choice import DecodePath
from engine.mlx_backend.host import process_bytes
from engine.mlx_backend.model.cached_model import CachedModel
from engine.mlx_backend.runner import Launch, MlxRunner
from engine.values.request import Request, SamplingParams
from engine.values.tokens import pack
from measuring import device
from measuring.device import compiled_in_flight
from measuring.random_checkpoint import CONFIGS
from tests.checkpoints import Family, write_family
from tests.devices import cpu_memory
from tests.golden.compiling import Compiled
from tests.golden.conftest import ATTENTION
from tests.golden.driving import BLOCK_SIZE, random_tokens
from tests.offline import OfflineDaemon, Room, Served, cached_model, load

LARGE = Room(n_blocks=20_000, block_size=BLOCK_SIZE)
"""So large that a copy of a pool is larger than all else that steps take."""

LAYERS = (1, 2, 3)
"""The fewer layers, the sooner a pool is written again after it was read."""

SMALL = Room(n_blocks=128, max_running=8)
GREEDY = SamplingParams(temperature=0)


class KeepingRunner(MlxRunner):
    """Refers to a pool for a step longer than it should."""

    def __init__(self, model: CachedModel, *rest: Any, **options: Any) -> None:
        super().__init__(model, *rest, **options)
        self._model_storage = model.storage
        self._kept = list[mx.array]()

    def submit(self, plan: StepPlan) -> None:
        self._kept = self._model_storage.arrays()[:1]
        super().submit(plan)


@pytest.fixture(scope="module")
def served_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Served]:
    """A model of this number of layers."""
    parent = tmp_path_factory.mktemp("layers")

    def make(n_layers: int) -> Served:
        config = {**CONFIGS["qwen3"], "num_hidden_layers": n_layers}
        return load(write_family(Family(f"qwen3-{n_layers}", config), parent))

    return make


@pytest.mark.device
@pytest.mark.parametrize("n_layers", LAYERS)
@pytest.mark.parametrize("attention", ATTENTION)
def test_compiled_steps_copy_no_pool(
    served_with: Callable[[int], Served], n_layers: int, attention: str, launch: Launch
) -> None:
    model = cached_model(served_with(n_layers), ATTENTION[attention](), LARGE)
    found = compiled_in_flight(model, launch)
    assert found["compiled_steps"] == device.STEPS
    assert found["pools_times"] < 0.5


@pytest.mark.device
def test_one_reference_to_a_pool_makes_a_copy_that_is_seen(
    served_with: Callable[[int], Served], launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above would find nothing."""
    monkeypatch.setattr(device, "MlxRunner", KeepingRunner)
    model = cached_model(served_with(3), ATTENTION["gather"](), LARGE)
    found = compiled_in_flight(model, launch)
    assert found["compiled_steps"] == device.STEPS
    assert found["pools_times"] >= 1


def outgrow(daemon: OfflineDaemon, n_rows: int, max_tokens: int) -> None:
    """Decode one row, then one more at a time: a shape for each number of rows and each width."""
    for n in range(1, n_rows + 1):
        rows = [(f"{n}-{at}", random_tokens(5 + n + at, seed=at)) for at in range(n)]
        daemon.serve(*(Request(name, pack(prompt), max_tokens, GREEDY) for name, prompt in rows))


def test_few_traces_are_kept(
    served_of: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many shapes, the latest."""
    most = 4
    traces = list["weakref.ref[Trace]"]()
    compile_step = mx.compile

    def compile_noted(step: Callable[..., Any]) -> Trace:
        made = Trace(compile_step(step))
        traces.append(weakref.ref(made))
        return made

    def n_kept() -> int:
        return sum(trace() is not None for trace in traces)

    monkeypatch.setattr(compiled_module, "MOST_TRACES", most)
    run = Compiled(served_of("qwen3"), ATTENTION["gather"](), SMALL)
    monkeypatch.setattr(mx, "compile", compile_noted)
    outgrow(run.daemon, n_rows=2, max_tokens=60)
    assert len(traces) > most
    gc.collect()
    before, n_before = mx.get_active_memory(), len(traces)
    outgrow(run.daemon, n_rows=8, max_tokens=60)
    assert len(traces) > n_before + 2 * most
    assert n_kept() == 2 * most  # of forwards, and of draws
    gc.collect()
    assert mx.get_active_memory() - before < 1 << 16
    assert run.steps.keys() == {""}


class Trace:
    """A compiled function that can be watched."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *inputs: Any) -> Any:
        return self._function(*inputs)


def test_a_rehearsal_leaves_nothing(served_with: Callable[[int], Served]) -> None:
    """Nor does it leave its storage to the garbage collector, which may not come for hours."""
    model = cached_model(served_with(3), ATTENTION["gather"](), SMALL)
    path = DecodePath("")
    gc.collect()
    gc.disable()
    try:
        before = mx.get_active_memory()
        path.choose(model, lambda line: None)
        path.compiled = None
        assert mx.get_active_memory() - before < 1 << 10
    finally:
        gc.enable()


@pytest.mark.slow
@cpu_memory
def test_models_that_have_gone_leave_no_traces(checkpoint_of: Callable[[str], Path]) -> None:
    """Neither objects of ours nor memory of MLX's: a model's traces take several MiB."""
    gone = list["weakref.ref[object]"]()

    def serve_and_drop() -> int:
        run = Compiled(load(checkpoint_of("qwen3")), ATTENTION["gather"](), SMALL)
        outgrow(run.daemon, n_rows=3, max_tokens=60)
        assert run.steps.keys() == {""}
        gone.append(weakref.ref(run.path.compiled))
        del run
        gc.collect()
        mx.clear_cache()
        return process_bytes()

    for _ in range(2):
        before = serve_and_drop()
    for _ in range(10):
        after = serve_and_drop()
    assert not any(one() for one in gone)
    assert after - before < 10 << 20
