"""Attention that reads blocks in place on GPUs, as far as a CPU shows it: its work units, the MLX
operations that stand in for the kernel, and some of the proof of the kernel's text.
"""

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from engine.mlx_backend.gpu import kind as kinds
from engine.mlx_backend.gpu.device import DeviceKernel
from engine.mlx_backend.gpu.kernel import StepArrays, UnitArrays, step_arrays
from engine.mlx_backend.gpu.kind import (
    MERGE_THREADS,
    WARP,
    Kind,
    Stored,
    Uncovered,
    kind_of,
    variants,
)
from engine.mlx_backend.gpu.stand_in import StandInKernel
from engine.mlx_backend.gpu.work_units import (
    MIN_ARRAY,
    UNIT_FIELDS,
    WorkUnits,
    make_units,
    most_partials,
)
from engine.mlx_backend.kv.arena import Arena, LayerArena
from engine.mlx_backend.kv.shape import LayerShape
from engine.values.settings import KVFormat
from tests.devices import cpu_attention
from tests.kernel_proof import arena as proof_arena
from tests.kernel_proof import program
from tests.kernel_proof.cases import (
    TOLERANCES,
    Drawn,
    Layer,
    Tables,
    as_bytes,
    attention,
    from_bytes,
    layer,
    random_case,
    random_tables,
)
from tests.kernel_proof.layers import LAYERS
from tests.kernel_proof.mutations import MUTATIONS, notice
from tests.kernel_proof.prove import label_of, prove

pytestmark = cpu_attention

TOKENS = 2
"""The place of a row's tokens in the kernel's limits."""

of_layers = pytest.mark.parametrize("of", LAYERS, ids=label_of)
proof = pytest.mark.skipif(
    sys.platform != "linux" or which("g++") is None, reason="there is no g++"
)


def filled_layer(of: Layer, drawn: Drawn) -> LayerArena:
    """A layer of an arena with the planes of a case."""
    n_blocks = len(drawn.case.keys)
    [own] = Arena([of.shape], n_blocks - 2, of.kind.block_size).layers
    keys, values = drawn.planes
    own.planes = tuple(keys if keys is values else [*keys, *values])
    return own


def step_of(drawn: Drawn) -> StepArrays:
    case = drawn.case
    return step_arrays(
        mx.array(case.tables),
        mx.array(case.last_seen),
        mx.array(case.first_keys),
        UnitArrays.of(drawn.work),
        drawn.work.n_partials,
    )


def distance(found: mx.array, expected: npt.NDArray[Any]) -> float:
    """The largest difference, as a share of the largest number; NaN where one is no number."""
    numbers = np.array(found.astype(mx.float32)).astype(np.float64).reshape(expected.shape)
    return float(np.abs(numbers - expected).max() / max(np.abs(expected).max(), 1e-6))


@of_layers
def test_the_stand_in_equals_attention_in_float64(of: Layer) -> None:
    random, kind = np.random.default_rng(1), of.kind
    with proof_arena.codes_by_token():
        for _ in range(4):
            drawn = random_case(of, random)
            rows, width = drawn.case.last_seen.shape
            heads = kind.kv_heads * kind.group
            queries = drawn.queries.reshape(rows, heads, width, kind.key_dim)
            sinks = mx.array(drawn.case.sinks[:heads]) if kind.has_sinks else None
            output = StandInKernel(kind).attend(
                queries, filled_layer(of, drawn), step_of(drawn), sinks
            )
            assert output.shape == (rows, heads, width, kind.value_dim)
            assert output.dtype == queries.dtype
            assert distance(output, attention(kind, drawn.case)) < proof_arena.tolerance(of)


@pytest.mark.parametrize("of", proof_arena.LAYERS, ids=label_of)
def test_the_stand_in_equals_plain_attention_to_what_an_arena_holds(of: Layer) -> None:
    random, kind = np.random.default_rng(2), of.kind
    for _ in range(4):
        one = proof_arena.random_comparison(of, random)
        group = one.group
        step = step_arrays(
            group.arena.place(group.table),
            mx.array(group.last_seen),
            group.first_keys,
            UnitArrays.of(one.work),
            one.work.n_partials,
        )
        sinks = mx.array(one.sinks[: kind.kv_heads * kind.group]) if kind.has_sinks else None
        output = StandInKernel(kind).attend(one.queries, one.layer, step, sinks)
        assert distance(output, np.array(one.expected)) < proof_arena.tolerance(of)


def test_a_trace_of_the_stand_in_serves_rows_that_grow() -> None:
    of, rows, entries = layer((64, 64), dtype=mx.float32, most_entries=2), 3, 6
    kind, size, random = of.kind, of.kind.block_size, np.random.default_rng(3)
    table = np.arange(rows * entries, dtype=np.uint32).reshape(rows, entries)
    table[1, :2] = table[0, :2]
    [own] = Arena([of.shape], rows * entries, size).layers
    own.planes = tuple(
        mx.array(random.standard_normal(plane.shape), plane.dtype) for plane in own.planes
    )
    traces, kernel = [], StandInKernel(kind)

    def attend(
        queries: mx.array, planes: list[mx.array], places: mx.array, last: mx.array, *work: mx.array
    ) -> mx.array:
        traces.append(queries.shape)
        own.planes = tuple(planes)
        step = step_arrays(places, last, None, UnitArrays(*work), n_partials)
        return kernel.attend(queries, own, step)

    compiled: Callable[..., mx.array] = mx.compile(attend)
    stops, planes = np.array([2 * size + 1, 2 * size + 3, 5], np.int32), list(own.planes)
    most, work = np.full(rows, entries, np.int32), None
    while stops.max() < entries * size:
        if work is None or not work.reaches(stops, size):
            work = make_units(kind, table, stops - 1, stops, 1, most, min_saved_blocks=1)
            n_partials = work.n_partials
        queries = mx.array(random.standard_normal((rows, 4, 1, 64)), mx.float32)
        last = mx.array(stops[:, None] - 1)
        output = compiled(queries, planes, mx.array(table), last, *UnitArrays.of(work))
        own.planes = tuple(planes)
        keys, values = own.read(own_ids(table, own))
        mask = (mx.arange(entries * size) <= last)[:, None, None]
        expected = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=kind.scale, mask=mask
        )
        assert distance(output, np.array(expected)) < 1e-5
        stops += random.integers(1, 5, rows, dtype=np.int32)
    assert len(traces) == 1


def own_ids(table: npt.NDArray[np.uint32], own: LayerArena) -> tuple[mx.array, mx.array]:
    heads = mx.array(table)[:, None] * own.shape.kv_heads
    keys = heads + mx.arange(own.shape.kv_heads, dtype=mx.uint32)[:, None]
    return keys, keys + own.values_at


def tables_of(of: Layer, seed: int) -> Tables:
    return random_tables(of, np.random.default_rng([4, seed]))


def units_of(
    of: Layer, step: Tables, most_blocks: npt.NDArray[np.int32] | None = None
) -> WorkUnits:
    starts, stops = (np.maximum(each - step.first_keys, 0) for each in (step.starts, step.stops))
    return make_units(of.kind, step.tables, starts, stops, step.width, most_blocks, 1, 16)


@of_layers
def test_there_are_no_more_partial_results_than_the_bound_says(of: Layer) -> None:
    for seed in range(10):
        step = tables_of(of, seed)
        for min_saved, n_groups in ((8, 512), (1, 512)):
            starts, stops = (
                np.maximum(each - step.first_keys, 0) for each in (step.starts, step.stops)
            )
            work = make_units(
                of.kind, step.tables, starts, stops, step.width, None, min_saved, n_groups
            )
            rows, n_blocks = step.tables.shape
            most = most_partials(of.kind, rows * step.width, n_blocks)
            assert work.n_partials <= max(most, MIN_ARRAY)


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("n_blocks", [1, 64, 4096])
@pytest.mark.parametrize("width", [1, 16])
@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_the_bound_of_partial_results_holds_for_long_rows(
    rows: int, n_blocks: int, width: int, shared: float
) -> None:
    kind = layer((128, 128), kv_heads=8, group=4).kind
    prefix = int(shared * (n_blocks - 1))
    own = np.arange(rows * (n_blocks - prefix)).reshape(rows, -1)
    table = np.concatenate([np.tile(np.arange(prefix), (rows, 1)), prefix + own], axis=1)
    stops = np.full(rows, n_blocks * kind.block_size, np.int32)
    work = make_units(kind, table.astype(np.uint32), stops - width, stops, width)
    most = most_partials(kind, rows * width, n_blocks)
    assert work.n_partials <= most
    if n_blocks == 4096:
        assert most <= 8 * work.n_partials


@of_layers
def test_each_query_meets_each_block_of_its_row_once(of: Layer) -> None:
    kind = of.kind
    for seed in range(10):
        step = tables_of(of, seed)
        work, of_row = units_of(of, step), kind.group * step.width
        met = np.zeros((len(step.tables), of_row, step.tables.shape[1]), int)
        partials = {}
        for row, rows, entry, entries, base, first, query_simds, _ in work.units.tolist():
            for query in range(first, min(first + query_simds * kind.tile, rows * of_row)):
                line = work.order[row + query // of_row]
                met[line, query % of_row, entry : entry + entries] += 1
                run = slice(entry, entry + entries)
                assert (step.tables[line, run] == step.tables[work.order[row], run]).all()
                assert base + query not in partials
                partials[base + query] = line, query % of_row
        for line, n_entries in enumerate(work.covered):
            assert (met[line, :, :n_entries] == 1).all()
            assert not met[line, :, n_entries:].any()
            own = work.parts[work.first_parts[line] : work.first_parts[line + 1]]
            for part, query in np.ndindex(len(own), of_row):
                assert partials.pop(own[part] + query) == (line, query)
        assert not partials
        assert work.reaches(np.maximum(step.stops - step.first_keys, 0), kind.block_size)


@of_layers
def test_sizes_of_a_list_stay_while_rows_grow_within_their_tables(of: Layer) -> None:
    for seed in range(2):
        step = tables_of(of, seed)
        entries = step.tables.shape[1]
        most = np.where(step.is_padding, 0, entries).astype(np.int32)
        sizes = set()
        for grown in range(0, entries * of.kind.block_size, 5):
            stops = np.minimum(step.stops + grown, step.first_keys + entries * of.kind.block_size)
            stops = np.where(step.is_padding, 0, stops)
            work = units_of(of, replace(step, stops=stops), most)
            assert work.order.shape == (8,)
            sizes.add((work.units.shape, work.parts.shape, work.n_partials))
        assert len(sizes) == 1
        [(units, parts, n_partials)] = sizes
        assert units[1:] == (UNIT_FIELDS,)
        for size in (units[0], *parts, n_partials):
            assert size >= 8
            assert size & (size - 1) == 0


@pytest.mark.parametrize("rows", [1, 4, 8, 32])
def test_a_shared_prefix_is_read_once_for_each_tile_of_queries(rows: int) -> None:
    kind, prefix = layer((64, 64), kv_heads=1, group=4).kind, 24
    table = np.concatenate(
        [np.tile(np.arange(prefix), (rows, 1)), prefix + np.arange(rows)[:, None]], axis=1
    ).astype(np.uint32)
    stops = np.full(rows, (prefix + 1) * kind.block_size, np.int32)
    units = make_units(kind, table, stops - 1, stops, 1, min_saved_blocks=1).units
    read = units[units[:, 1] > 0][:, 3].sum()
    assert read == -(-rows * kind.group // kind.tile_queries) * prefix + rows


def test_the_name_of_a_kernel_differs_wherever_its_text_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = layer((128, 64)).kind
    others: dict[str, Any] = {"scale_groups": (64, 32), "scale": 0.5, "has_sinks": True}
    others |= dict.fromkeys(("queries", "keys", "values"), Stored.CODES8)
    names = {kind.name}
    for field in fields(Kind):
        own = getattr(kind, field.name)
        value = others[field.name] if field.name in others else 2 * (own or 1)
        changed: dict[str, Any] = {field.name: value}
        names.add(replace(kind, **changed).name)
    assert len(names) == 1 + len(fields(Kind))
    monkeypatch.setattr(kinds, "source_text", lambda: "another text")
    assert kind.name not in names


def test_variants_share_a_kind_s_results_and_are_few() -> None:
    for of in LAYERS:
        found = variants(of.kind)
        assert found[0] == of.kind
        assert 1 < len({one.name for one in found}) == len(found) <= 4
        for one in found:
            same = replace(one, lanes=0, tile=0, batch=0)
            assert same == replace(of.kind, lanes=0, tile=0, batch=0)


@pytest.mark.parametrize(
    ("dims", "heads", "dtype", "why"),
    [
        ((512, 512), 4, mx.float32, "vectors of 512 numbers"),
        ((66, 66), 4, mx.float16, "vectors of 66 numbers do not divide among threads"),
        ((64, 64), 3, mx.float32, "3 query heads for 2 KV heads"),
        ((64, 64), 4, mx.int32, "its queries are int32"),
    ],
)
def test_a_layer_that_the_kernel_does_not_cover_is_refused(
    dims: tuple[int, int], heads: int, dtype: mx.Dtype, why: str
) -> None:
    shape = LayerShape(2, *dims, mx.float32, mx.float32)
    if dtype == mx.float16:
        shape = LayerShape(2, *dims, dtype, dtype)
    with pytest.raises(Uncovered, match=f"^{why}$"):
        kind_of(shape, 16, heads, dtype, 1.0, None, False, 1)


@proof
def test_the_text_of_the_kernel_equals_attention_in_float64(tmp_path: Path) -> None:
    of = layer((64, 64), group=4, window=20, has_sinks=True, width=3, most_entries=2)
    report = prove(of, tmp_path, "g++", [5], 20)
    assert report.problem == ""
    assert report.counts["whose rows have grown since their list was made"] > 0


class FakeKernels:
    """Stands for `mx.fast.metal_kernel`: keeps what each kernel is called with, and runs the text
    on this processor when both have been.
    """

    def __init__(self, kind: Kind, folder: Path) -> None:
        self._program = program.build(kind, folder, "g++")
        self._threads = kind.simds * WARP
        self._kind = kind
        self._inputs = dict[str, mx.array]()
        self._n_partials = 0
        self._limits = np.zeros(MIN_ARRAY, np.int32)

    def make(
        self, name: str, inputs: list[str], outputs: list[str], body: str, header: str
    ) -> Callable[..., list[mx.array]]:
        assert name.isidentifier()
        assert "paged_" in body
        assert header.startswith("#define BLOCK ")
        return partial(self._call, inputs, outputs)

    def _call(
        self,
        input_names: list[str],
        output_names: list[str],
        *,
        inputs: list[mx.array],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
    ) -> list[mx.array]:
        named = dict(zip(input_names, inputs, strict=True))
        for array in inputs:
            assert array.size >= MIN_ARRAY
        self._inputs |= {name: array for name, array in named.items() if name != "limits"}
        if output_names == ["weighted", "stats"]:
            units = len(named["units"])
            assert (grid, threadgroup) == (
                (units * self._threads, self._kind.kv_heads, 1),
                (self._threads, 1, 1),
            )
            self._limits = np.array(named["limits"])
            self._n_partials = output_shapes[0][0]
            return [mx.zeros(shape) for shape in output_shapes]
        [shape], [dtype] = output_shapes, output_dtypes
        threads = int(np.prod(shape[:3])) * MERGE_THREADS
        assert (grid, threadgroup) == ((threads, 1, 1), (MERGE_THREADS, 1, 1))
        assert np.array(named["limits"])[TOKENS] == self._limits[TOKENS]
        sizes = np.array([shape[0], self._n_partials, *self._limits], np.int32)
        order = ["queries", "keys", "key_scales", "values", "value_scales", "places", "units"]
        order += ["order", "last_seen", "first_keys", "first_parts", "parts", "sinks"]
        [outcome] = program.run(
            self._program, [[sizes, *(as_bytes(self._inputs[one]) for one in order)]]
        )
        numbers = from_bytes(outcome.output, self._kind.queries).astype(np.float32)
        return [mx.array(numbers).reshape(shape).astype(dtype)]


@proof
def test_mlx_is_given_what_the_text_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = layer((128, 64), format=KVFormat.K8V4, dtype=mx.float16, has_sinks=True, width=3)
    kind, random = of.kind, np.random.default_rng(7)
    fake = FakeKernels(kind, tmp_path)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    monkeypatch.setattr(mx.fast, "metal_kernel", fake.make)
    kernel = DeviceKernel(kind)
    with proof_arena.codes_by_token():
        for _ in range(4):
            drawn = random_case(of, random)
            rows, width = drawn.case.last_seen.shape
            heads = kind.kv_heads * kind.group
            queries = drawn.queries.reshape(rows, heads, width, kind.key_dim)
            sinks = mx.array(drawn.case.sinks[:heads]) if kind.has_sinks else None
            output = kernel.attend(queries, filled_layer(of, drawn), step_of(drawn), sinks)
            assert output.dtype == queries.dtype
            assert distance(output, attention(kind, drawn.case)) < TOLERANCES[kind.queries]


@proof
def test_a_fault_in_the_text_is_noticed(tmp_path: Path) -> None:
    before, after = MUTATIONS["no barrier after the table is read"]
    assert "FAULT" in notice(before, after, tmp_path, "g++", [6])
