"""What a comparison of attentions finds: whether each is right, and how fast it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import mlx.core as mx
import pytest

from engine.mlx_backend.kv.arena import LayerArena
from engine.mlx_backend.model.attention import Attention, BlockAttention
from engine.mlx_backend.model.rows import RowGroup
from engine.mlx_backend.tuning import race as module
from engine.mlx_backend.tuning.candidates import candidates_for
from engine.mlx_backend.tuning.kinds import LayerKind
from engine.mlx_backend.tuning.race import cells_of, compare, error_of, race
from engine.values.attention import GATHER, TimedCell, TrialState, nearest_cell
from engine.values.settings import KVFormat
from tests.devices import cpu_attention

NO_MEMORY = "[malloc] Unable to allocate 1099511627776 bytes."

KIND = LayerKind(2, 4, 32, 32, "float32", "float32", KVFormat.FULL, 16, None, False, 1024)


@pytest.mark.parametrize(
    "kind",
    [
        KIND,
        replace(KIND, window=100),
        replace(KIND, has_sinks=True),
        replace(KIND, window=40, has_sinks=True, value_dim=64),
        replace(KIND, format=KVFormat.Q8),
        replace(KIND, format=KVFormat.K8V4),
        replace(KIND, format=KVFormat.F16),
        replace(KIND, kv_heads=4),
    ],
    ids=str,
)
@cpu_attention
def test_the_attentions_that_there_are_pass(kind: LayerKind) -> None:
    """What stands in for the kernel among them."""
    candidates, excluded = candidates_for(kind, Attention())
    assert {"paged", "gather"} <= {*candidates}
    assert 3 <= len([name for name in candidates if name.startswith("paged")]) <= 4
    assert ("cascade" in candidates) != ("cascade" in excluded)
    found = {
        name: error_of(kind, of)
        for name, of in candidates.items()
        if name in {"gather", "cascade", "paged"}
    }
    assert max(found.values()) < 1e-5


class Wrong(Attention):
    """An attention that computes `change` of what `gather` does."""

    name = "wrong"

    def __init__(self, change: Callable[[mx.array], mx.array]) -> None:
        super().__init__()
        self._change = change

    def prepare(self, group: RowGroup, window: int | None) -> BlockAttention:
        return _Wrong(group, self._change)


@dataclass
class _Wrong(BlockAttention):
    group: RowGroup
    change: Callable[[mx.array], mx.array]

    def attend(
        self,
        queries: mx.array,
        layer: LayerArena,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        keys, values = layer.read(self.group.gather_ids(layer.heads))
        found = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=self.group.mask(window)
        )
        return self.change(found)


def fails(output: mx.array) -> mx.array:
    raise RuntimeError("cannot compile kernel:\n  line 7: error")


def one_head(output: mx.array) -> mx.array:
    """A head of one row is another's."""
    rows, heads = output.shape[:2]
    is_wrong = (mx.arange(rows) == 2)[:, None, None, None] & (mx.arange(heads) == 1)[:, None, None]
    return mx.where(is_wrong, output[:, [heads - 1, *range(heads - 1)]], output)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (fails, "cannot compile kernel: line 7: error"),
        (one_head, "of the output's size"),
        (lambda output: output * 1.02, "it is wrong by 2.0% of the output's size"),
        (lambda output: output * mx.nan, "it is wrong by nan% of the output's size"),
        (lambda output: output * 1.0001, "times that of gather"),
    ],
)
def test_an_attention_that_is_wrong_is_left_out(
    change: Callable[[mx.array], mx.array], why: str
) -> None:
    candidates = {GATHER: Attention(), "wrong": Wrong(change)}
    found = compare(KIND, candidates, 1 << 30, 60.0)
    assert found.state is TrialState.FAILED
    assert why in found.rejected["wrong"]
    assert found.why == f"wrong: {found.rejected['wrong']}"
    assert found.cells == ()


def test_one_that_is_wrong_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", (1,))
    monkeypatch.setattr(module, "KEYS", ())
    same, wrong = Wrong(lambda output: output), Wrong(lambda output: -output)
    candidates = {GATHER: Attention(), "wrong": wrong, "same": same}
    found = compare(replace(KIND, longest=64), candidates, 1 << 30, 60.0)
    assert found.state is TrialState.PASSED
    assert {*found.rejected} == {"wrong"}
    [cell] = found.cells
    assert (cell.rows, cell.keys) == (1, 64)
    assert {*cell.milliseconds} == {GATHER, "same"}


@dataclass
class Timed:
    """Steps that take the times that a table says, by a clock that only they move."""

    milliseconds: Callable[[str, int, int], float]
    names: tuple[str, ...] = (GATHER, "paged")
    now: float = 0.0
    taken: list[tuple[str, int, int]] = field(default_factory=list)

    def steps(self, rows: int, keys: int) -> Mapping[str, Callable[[], float]]:
        def step(name: str) -> float:
            self.taken.append((name, rows, keys))
            took = self.milliseconds(name, rows, keys)
            self.now += took / 1e3
            return took

        return {name: partial(step, name) for name in self.names}

    def race(self, sizes: list[tuple[int, int]], seconds: float) -> list[TimedCell]:
        return race(sizes, self.steps, seconds, lambda: self.now)


SIZES = [(1, 1024), (8, 1024), (1, 8192), (8, 8192)]


def test_each_size_has_the_medians_of_all_entrants() -> None:
    def milliseconds(name: str, rows: int, keys: int) -> float:
        is_first = (name, rows, keys) not in timed.taken[:-1]
        return 40.0 if is_first else rows * keys / (1e4 if name == GATHER else 2e4)

    timed = Timed(milliseconds)
    cells = timed.race(SIZES, 3.0)
    assert [(cell.rows, cell.keys) for cell in cells] == SIZES
    for cell in cells:
        expected = cell.rows * cell.keys / 1e4
        assert cell.milliseconds == pytest.approx({GATHER: expected, "paged": expected / 2})
    assert timed.now < 3.0


def test_slow_steps_leave_sizes_out_and_end_in_time() -> None:
    timed = Timed(lambda name, rows, keys: 400.0)
    cells = timed.race(SIZES, 3.0)
    assert [(cell.rows, cell.keys) for cell in cells] == SIZES[: len(cells)]
    assert 0 < len(cells) < len(SIZES)
    assert timed.now < 3.0 + 4 * 0.4


def test_a_race_of_hopelessly_slow_steps_still_ends() -> None:
    timed = Timed(lambda name, rows, keys: 5000.0)
    assert len(timed.race(SIZES, 3.0)) == 1
    assert len(timed.taken) == 4


@pytest.mark.parametrize(
    ("milliseconds", "name"),
    [
        ({GATHER: 1.0, "paged": 0.5}, "paged"),
        ({GATHER: 1.0, "paged": 0.96}, GATHER),
        ({GATHER: 1.0, "paged": 0.95}, "paged"),
        ({GATHER: 1.0, "paged": 2.0}, GATHER),
        ({GATHER: 1.0, "paged": 0.5, "cascade": 0.4}, "cascade"),
    ],
)
def test_the_fastest_serves_and_gather_where_little_is_gained(
    milliseconds: dict[str, float], name: str
) -> None:
    assert TimedCell(1, 1024, milliseconds).fastest == name


def test_a_size_in_between_has_the_nearest_cell_by_ratio() -> None:
    cells = [TimedCell(rows, keys, {GATHER: 1.0}) for rows in (1, 8, 32) for keys in (1024, 8192)]

    def found(rows: int, keys: int) -> tuple[int, int]:
        cell = nearest_cell(cells, rows, keys)
        return cell.rows, cell.keys

    assert found(1, 1) == (1, 1024)
    assert found(2, 2896) == (1, 1024)
    assert found(3, 2897) == (8, 8192)
    assert found(17, 10**6) == (32, 8192)
    assert found(10**4, 1024) == (32, 1024)


def test_only_sizes_that_fit_into_memory_are_timed() -> None:
    kind = replace(KIND, longest=1 << 15)
    everything = cells_of(kind, 1 << 40)
    assert everything == [(rows, keys) for keys in (1024, 8192, 32768) for rows in (1, 8, 32)]
    previous = 0
    for budget_bytes in (1 << shift for shift in range(10, 40, 2)):
        found = cells_of(kind, budget_bytes)
        assert found == [cell for cell in everything if cell in found]
        assert len(found) >= previous
        previous = len(found)
    assert cells_of(kind, 0) == []
    assert [keys for _, keys in cells_of(replace(kind, longest=100), 1 << 40)] == [100] * 3


def test_a_comparison_without_memory_is_postponed() -> None:
    candidates = {GATHER: Attention(), "same": Wrong(lambda output: output)}
    found = compare(KIND, candidates, 0, 60.0)
    assert (found.state, found.why) == (
        TrialState.POSTPONED,
        "too little memory is left to compare",
    )


@pytest.mark.parametrize("error", [MemoryError("std::bad_alloc"), RuntimeError(NO_MEMORY)])
def test_an_attention_that_gets_no_memory_is_not_rejected(error: Exception) -> None:
    def fail(output: mx.array) -> mx.array:
        raise error

    found = compare(KIND, {GATHER: Attention(), "large": Wrong(fail)}, 1 << 40, 60.0)
    assert (found.state, found.why) == (TrialState.POSTPONED, str(error))
    assert not found.rejected
