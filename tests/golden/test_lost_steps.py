"""An attention, or compiled code, that fails on the device: no request ends with an error."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest

from engine.core.step import ModelRunner, StepLost, StepResult, StorageLost
from engine.mlx_backend.gpu.paged import PagedAttention, smaller_units
from engine.mlx_backend.kv.arena import Arena, LayerArena
from engine.mlx_backend.model.attention import Attention, BlockAttention, PrepareDecodeRows
from engine.mlx_backend.model.rows import RowGroup
from engine.mlx_backend.runner import Launch, MlxRunner
from engine.values.output import OutputEvent
from engine.values.request import Pooling, Request, SamplingParams
from engine.values.tokens import pack
from tests.devices import cpu_memory
from tests.golden.compiling import Compiled, OtherRunner, Outputs
from tests.golden.driving import random_tokens
from tests.golden.test_chosen_attention import ALWAYS, Watched, chosen
from tests.golden.test_compiled import DRAWN, GREEDY, request
from tests.golden.test_failures import from_another_thread
from tests.offline import OfflineDaemon, Room, Served

ROOM = Room(n_blocks=128, first_blocks=24)
"""The arena grows while requests are served."""


class Broken(BlockAttention):
    """Attention that cannot be computed in some layers."""

    def __init__(self, rows: BlockAttention, layers: Sequence[LayerArena]) -> None:
        self._rows = rows
        self._layers = layers

    def attend(
        self,
        queries: mx.array,
        layer: LayerArena,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array | None:
        found = self._rows.attend(queries, layer, scale, window, sinks)
        is_broken = any(layer is each for each in self._layers)
        return found + from_another_thread() if found is not None and is_broken else found


class Breaking(PagedAttention):
    """`paged`, which cannot be computed from its `fails_at`-th forward or trace on, in the layers
    that `broken` returns.
    """

    def __init__(
        self,
        fails_at: int,
        broken: Callable[[Arena], Sequence[LayerArena]] = lambda arena: arena.layers,
    ) -> None:
        super().__init__(Attention(), smaller_units)
        self.left = fails_at
        self._broken = broken

    def prepare_short(self, group: RowGroup, window: int | None) -> BlockAttention | None:
        return self._break(super().prepare_short(group, window), group)

    def prepare_decode(
        self, rows: int, width: int, arena: Arena, window: int | None, sizes: tuple[int, ...]
    ) -> PrepareDecodeRows | None:
        prepare = super().prepare_decode(rows, width, arena, window, sizes)
        if prepare is None:
            return None

        def prepare_broken(group: RowGroup, work: Sequence[mx.array]) -> BlockAttention:
            found = self._break(prepare(group, work), group)
            assert found is not None
            return found

        return prepare_broken

    def _break(self, rows: BlockAttention | None, group: RowGroup) -> BlockAttention | None:
        self.left -= 1
        if rows is None or self.left > 0:
            return rows
        return Broken(rows, self._broken(group.arena))


def last_layer(arena: Arena) -> Sequence[LayerArena]:
    """No K and V depend on its attention, if the model's last layer is in this arena."""
    return arena.layers[-1:]


def come_in_turn(daemon: OfflineDaemon) -> Outputs:
    """Rows of unlike lengths, which join while others decode; two share a beginning."""
    said = defaultdict[tuple[str, int], list[int]](list)
    for at, length in enumerate((3, 21, 9, 21)):
        daemon.add(request(f"r{at}", length, 25 + 3 * at, DRAWN if at % 2 else GREEDY))
        daemon.step(4, said)
    return daemon.rest(said)


FAMILIES = ["qwen3", "gemma3_text", "qwen3_next"]
"""Full attention, windows, and recurrent states."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fails_at", [1, 7, 30])
def test_requests_go_on_with_gather(
    served_of: Callable[[str], Served], family: str, fails_at: int, launch: Launch
) -> None:
    served = served_of(family)
    expected = come_in_turn(OfflineDaemon(served, Attention(), ROOM))
    attention = chosen(Breaking(fails_at), ALWAYS)
    daemon = OfflineDaemon(served, attention, ROOM, launch=launch)
    assert dict(come_in_turn(daemon)) == dict(expected)
    assert "stream" in attention.problem.lower()
    assert attention.fallbacks == 1
    assert daemon.scheduler.metrics.recomputed_sequences > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fails_at", [2, 9])
def test_compiled_decodes_go_on_with_gather(
    served_of: Callable[[str], Served], family: str, fails_at: int, launch: Launch
) -> None:
    """The traces that fail are made anew."""
    served = served_of(family)
    expected = come_in_turn(OfflineDaemon(served, Attention(), ROOM))
    attention = chosen(Breaking(fails_at), ALWAYS)
    run = Compiled(served, attention, ROOM, launch=launch)
    assert dict(come_in_turn(run.daemon)) == dict(expected)
    assert attention.problem
    assert run.path.problem == ""
    assert run.steps[""] > 20


def test_what_is_cached_stays_where_no_key_depends_on_what_has_failed(
    served_of: Callable[[str], Served], launch: Launch
) -> None:
    served, first, second = served_of("qwen3"), request("r0", 40, 1), request("r1", 9, 12)
    expected = OfflineDaemon(served, Attention(), ROOM).serve(second)
    attention = chosen(breaking := Breaking(10**6, last_layer), ALWAYS)
    daemon = OfflineDaemon(served, attention, ROOM, launch=launch)
    daemon.serve(first)
    breaking.left = 4
    assert daemon.serve(second) == expected
    assert attention.problem
    daemon.serve(request("again", 40, 1))
    assert daemon.usage["again"].cached_tokens == 39


class LosesAtCollect(OtherRunner):
    """A device whose failure shows when its `left`-th step is collected: of what the step computes,
    and perhaps of the storage as well.
    """

    def __init__(self, runner: ModelRunner, left: int, loss: type[StepLost]) -> None:
        super().__init__(runner)
        assert isinstance(runner, MlxRunner)
        self._mlx = runner
        self._left = left
        self._loss = loss

    def collect(self) -> StepResult:
        self._left -= 1
        if self._left == 0:
            nothing = from_another_thread()
            step, storage = self._mlx._in_flight[0], self._mlx._storage
            step.awaited.append(nothing)
            if self._loss is StorageLost:
                layer = storage.full.layers[-1]
                layer.planes = tuple(plane + nothing for plane in layer.planes)
            with pytest.raises(self._loss) as raised:
                super().collect()
            raise raised.value
        return super().collect()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("left", [3, 12, 13])
@pytest.mark.parametrize("loss", [StepLost, StorageLost])
def test_a_failure_may_show_when_another_step_is_in_flight(
    served_of: Callable[[str], Served],
    family: str,
    left: int,
    loss: type[StepLost],
    launch: Launch,
) -> None:
    served = served_of(family)
    expected = come_in_turn(OfflineDaemon(served, Attention(), ROOM))
    attention = chosen(Watched(), ALWAYS)
    daemon = OfflineDaemon(
        served,
        attention,
        ROOM,
        watch=lambda runner: LosesAtCollect(runner, left, loss),
        launch=launch,
    )
    assert dict(come_in_turn(daemon)) == dict(expected)
    assert attention.problem
    assert daemon.scheduler.metrics.recomputed_sequences > 0


def test_vectors_are_those_of_gather(served_of: Callable[[str], Served], launch: Launch) -> None:
    served = served_of("qwen3")
    requests = [
        Request(str(pooling), pack(random_tokens(13, seed=at)), 0, pooling=pooling)
        for at, pooling in enumerate(Pooling)
    ]
    plain = OfflineDaemon(served, Attention(), ROOM)
    plain.serve(*requests)
    attention = chosen(Breaking(2), ALWAYS)
    daemon = OfflineDaemon(served, attention, ROOM, launch=launch)
    daemon.serve(*requests)
    assert attention.problem
    for name, vector in plain.vectors.items():
        np.testing.assert_allclose(daemon.vectors[name], vector, atol=1e-4)


def test_a_draft_model_drafts_on(served_of: Callable[[str], Served]) -> None:
    served, wanted = served_of("qwen3"), request("r0", 9, 40)
    expected = OfflineDaemon(served, Attention(), ROOM).serve(wanted)
    attention = chosen(Breaking(4), ALWAYS)
    daemon = OfflineDaemon(served, attention, ROOM, draft=(served, Room(64)))
    assert daemon.serve(wanted) == expected
    assert attention.problem
    drafts = daemon.scheduler.drafts
    assert drafts is not None
    assert drafts.model is not None
    assert drafts.model.stats().failures == 0


@cpu_memory
def test_storage_that_is_lost_is_released_before_it_is_made_anew(
    served_of: Callable[[str], Served], launch: Launch
) -> None:
    attention = chosen(breaking := Breaking(10**6), ALWAYS)
    daemon = OfflineDaemon(served_of("qwen3"), attention, Room(n_blocks=20_000), launch=launch)
    daemon.serve(request("r0", 9, 12))
    breaking.left = 4
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    daemon.serve(request("r1", 9, 12))
    assert attention.problem
    assert mx.get_peak_memory() < before + daemon.storage.full.bytes // 4
    assert mx.get_active_memory() <= before + 2**20


def test_a_lack_of_memory_on_the_device_ends_the_requests_of_its_step(
    served_of: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not the attention's failure: computed again, they might lack it again without end."""
    served = served_of("qwen3")
    attention = chosen(Watched(), ALWAYS)
    daemon = OfflineDaemon(served, attention, ROOM)
    daemon.add(request("doomed", 9, 12))
    daemon.step(4)

    events, evaluate, left = list[OutputEvent](), mx.eval, 2

    def lack_twice(*arrays: object) -> None:
        """The step, and what of it has been computed all the same."""
        nonlocal left
        left -= 1
        if left >= 0:
            raise RuntimeError("[malloc] Unable to allocate 137438953472 bytes.")
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", lack_twice)
    while not daemon.loop.is_idle:
        events += daemon.turn()
    assert [event.request_id for event in events if event.error] == ["doomed"]
    assert (attention.problem, attention.fallbacks) == ("", 1)
    assert daemon.serve(request("next", 9, 12, SamplingParams(seed=7)))
