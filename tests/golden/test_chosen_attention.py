"""An attention that is chosen by rows and keys, and one that fails while it serves."""

import logging
from collections import Counter
from collections.abc import Callable

import mlx.core as mx
import pytest

from engine.core.step import Sampled, Sampling, StorageLost
from engine.mlx_backend.cpu.cascade import CascadeAttention
from engine.mlx_backend.gpu.paged import PagedAttention, smaller_units
from engine.mlx_backend.kv.arena import Arena, LayerArena
from engine.mlx_backend.model.attention import (
    Attention,
    BlockAttention,
    PrepareDecodeRows,
)
from engine.mlx_backend.model.rows import RowGroup
from engine.mlx_backend.runner import Launch, MlxRunner
from engine.mlx_backend.sampling.sampler import Sampler
from engine.mlx_backend.tuning.chosen import ChosenAttention, Tables
from engine.values.attention import GATHER, TimedCell
from measuring.random_checkpoint import VOCAB_SIZE
from tests.devices import cpu_attention
from tests.golden.compiling import Compiled, expect_same_outputs
from tests.golden.driving import compute, compute_one
from tests.golden.test_compiled import GREEDY, ROOM, come_and_go, request
from tests.golden.test_failures import from_another_thread, one_chunk
from tests.offline import OfflineDaemon, Room, Served, cached_model


class Watched(PagedAttention):
    """`paged`, which counts the forwards and traces that it prepares, and fails in one of them."""

    def __init__(self, fails_at: int | None = None, lacks_memory_at: int | None = None) -> None:
        super().__init__(Attention(), smaller_units)
        self.counts = Counter[str]()
        self.fails_at = fails_at
        self.lacks_memory_at = lacks_memory_at

    def prepare(self, group: RowGroup, window: int | None) -> BlockAttention | None:
        self.counts["eager"] += 1
        if self.fails_at is not None and self.counts["eager"] >= self.fails_at:
            raise RuntimeError("no kernel of this name")
        if self.counts["eager"] == self.lacks_memory_at:
            raise RuntimeError("[malloc] Unable to allocate 137438953472 bytes.")
        return super().prepare(group, window)

    def prepare_decode(
        self, rows: int, width: int, arena: Arena, window: int | None, sizes: tuple[int, ...]
    ) -> PrepareDecodeRows | None:
        self.counts["traced"] += 1
        return super().prepare_decode(rows, width, arena, window, sizes)


def chosen(
    watched: Attention,
    cells: list[TimedCell],
    failures: list[str] | None = None,
) -> ChosenAttention:
    candidates = {GATHER: Attention(), "paged": watched}
    tables = dict.fromkeys((None, 16, 128, 512), tuple(cells))
    noted = list[str]() if failures is None else failures
    return ChosenAttention(candidates, tables, ROOM.block_size, noted.append)


ALWAYS = [TimedCell(1, 64, {GATHER: 2.0, "paged": 1.0})]
SOMETIMES = [
    TimedCell(1, 32, {GATHER: 1.0, "paged": 0.96}),  # less than 5% faster
    TimedCell(1, 128, {GATHER: 2.0, "paged": 1.0}),
    TimedCell(8, 32, {GATHER: 2.0, "paged": 1.0}),
    TimedCell(8, 128, {GATHER: 1.0, "paged": 2.0}),
]


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_the_tokens_do_not_depend_on_which_attention_is_chosen(
    served_of: Callable[[str], Served], family: str
) -> None:
    """Rows come, go and grow through all regions of the table, eagerly and compiled."""
    served = served_of(family)
    expected = come_and_go(OfflineDaemon(served, Attention(), ROOM))
    watched = Watched()
    attention = chosen(watched, SOMETIMES)
    assert attention.name == "gather, paged"
    run = expect_same_outputs(served, attention, ROOM, come_and_go)
    assert dict(come_and_go(OfflineDaemon(served, attention, ROOM))) == dict(expected)
    assert watched.counts["eager"] > 10
    assert watched.counts["traced"] > 0
    assert run.steps[""] > 10
    assert not attention.problem


@pytest.mark.parametrize(
    ("rows", "keys", "name"),
    [
        *((1, 1, GATHER), (1, 63, GATHER), (2, 65, "paged"), (1, 10**6, "paged")),
        *((3, 1, "paged"), (1024, 63, "paged"), (3, 65, GATHER)),
    ],
)
def test_a_region_has_the_attention_of_the_nearest_size(rows: int, keys: int, name: str) -> None:
    attention = chosen(watched := Watched(), SOMETIMES)
    expected = watched if name == "paged" else attention.fallback
    found = attention._chosen(rows, keys, None)
    assert found is expected or (name == GATHER and found.name == GATHER)


def test_a_forward_that_fails_is_computed_again_and_gather_serves_from_then_on(
    served_of: Callable[[str], Served], caplog: pytest.LogCaptureFixture
) -> None:
    """In eager steps between compiled ones, which are traced anew."""
    served, failures = served_of("qwen3"), list[str]()
    expected = come_and_go(OfflineDaemon(served, Attention(), ROOM))
    watched = Watched(fails_at=6)
    attention = chosen(watched, ALWAYS, failures)
    assert attention.fallback is not None
    run = Compiled(served, attention, ROOM)
    with caplog.at_level(logging.WARNING):
        assert dict(come_and_go(run.daemon)) == dict(expected)
    assert failures == [attention.problem] == ["RuntimeError: no kernel of this name"]
    assert [record.getMessage() for record in caplog.records] == [
        "attention: gather from now on: RuntimeError: no kernel of this name"
    ]
    assert attention.fallbacks == 1
    assert watched.counts["eager"] == 6, "it is not tried again"
    assert run.path.problem == "", "decodes are still compiled"
    assert run.steps[""] > 40


def test_a_lack_of_memory_does_not_bar_the_attention(served_of: Callable[[str], Served]) -> None:
    """The forward is computed again with `gather`; the attention serves the next one, and the next
    start does not know of it.
    """
    served, failures = served_of("qwen3"), list[str]()
    expected = come_and_go(OfflineDaemon(served, Attention(), ROOM))
    watched = Watched(lacks_memory_at=6)
    attention = chosen(watched, ALWAYS, failures)
    assert dict(come_and_go(Compiled(served, attention, ROOM).daemon)) == dict(expected)
    assert (failures, attention.problem, attention.fallbacks) == ([], "", 1)
    assert attention.fallback is not None
    assert watched.counts["eager"] > 6


class Traced(Attention):
    """`gather`, which counts its traces."""

    traces = 0

    def prepare_decode(
        self, rows: int, width: int, arena: Arena, window: int | None, sizes: tuple[int, ...]
    ) -> PrepareDecodeRows | None:
        self.traces += 1
        return None


class FailingCascade(CascadeAttention):
    """`cascade`, whose traces have no list that tells them from those of `gather`."""

    fails = False

    def prepare(self, group: RowGroup, window: int | None) -> BlockAttention | None:
        if self.fails:
            raise RuntimeError("no kernel of this name")
        return super().prepare(group, window)


@cpu_attention
def test_what_was_traced_before_a_failure_is_traced_anew(
    served_of: Callable[[str], Served],
) -> None:
    """The same request again: its shapes have been traced with the attention that then fails."""
    cascade, gather = FailingCascade(), Traced()
    tables: Tables = {None: [TimedCell(1, 64, {GATHER: 2.0, "cascade": 1.0})]}
    attention = ChosenAttention({GATHER: gather, "cascade": cascade}, tables, ROOM.block_size)
    run = Compiled(served_of("qwen3"), attention, ROOM)
    first = run.daemon.serve(request("first", 5, 12))
    assert gather.traces == 0
    cascade.fails = True
    again = run.daemon.serve(request("again", 5, 12))
    assert list(again.values()) == list(first.values())
    assert attention.problem
    assert gather.traces > 0
    assert run.steps.keys() == {""}


class Hopeless(BlockAttention):
    """Attention that cannot be computed, as where a device fails."""

    def attend(
        self,
        queries: mx.array,
        layer: LayerArena,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        return queries + from_another_thread()


class FailsOnTheDevice(Attention):
    """An attention whose failure shows when it is computed."""

    def prepare(self, group: RowGroup, window: int | None) -> BlockAttention | None:
        return Hopeless()


def test_a_failure_on_the_device_costs_what_is_stored(
    served_of: Callable[[str], Served], launch: Launch
) -> None:
    """K and V of later layers hang on it. The same step is computed next, in another storage."""
    failures = list[str]()
    attention = chosen(FailsOnTheDevice(), ALWAYS, failures)
    model = cached_model(served_of("qwen3"), attention, Room(n_blocks=4))
    runner = MlxRunner(model, Sampler(VOCAB_SIZE), launch)
    sampling = Sampling(GREEDY, seed=0)
    with pytest.raises(StorageLost):
        compute(runner, one_chunk(0, [5, 6], sampling))
    assert failures == [attention.problem]
    assert attention.problem
    assert isinstance(compute_one(runner, one_chunk(1, [5, 6], sampling)), Sampled)


def test_an_error_that_gather_has_too_is_not_the_attention_s(
    served_of: Callable[[str], Served], launch: Launch
) -> None:
    failures = list[str]()
    attention = chosen(Watched(), ALWAYS, failures)
    model = cached_model(served_of("qwen3"), attention, Room(n_blocks=4))
    runner = MlxRunner(model, Sampler(VOCAB_SIZE), launch)
    with pytest.raises(ValueError, match="do not cover the positions 0 to 9"):
        runner.submit(one_chunk(0, [5] * 9, Sampling(GREEDY, seed=0)))
    assert (failures, attention.problem, attention.fallbacks) == ([], "", 0)
