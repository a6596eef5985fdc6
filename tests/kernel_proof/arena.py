"""The text over the project's own arena, row groups and work lists, compared with plain attention
to what `LayerArena.read` gathers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.mlx_backend.gpu.work_units import WorkUnits, make_units
from engine.mlx_backend.kv.arena import Arena, LayerArena
from engine.mlx_backend.kv.shape import Heads, LayerShape
from engine.mlx_backend.model.rows import RowGroup, TokenSpan
from engine.values.settings import KVFormat
from kvstore.window import first_needed
from tests.kernel_proof.cases import TOLERANCES, Layer, case_arrays, error, layer
from tests.kernel_proof.program import Arrays, Fault, build, run
from tests.kernel_proof.prove import Report, label_of

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
LAYERS = [
    *(layer((64, 64), group=4, width=3, dtype=dtype) for dtype in DTYPES),
    *(layer((128, 128), dtype=dtype, format=KVFormat.Q8) for dtype in DTYPES),
    *(layer((192, 128), dtype=dtype, format=KVFormat.K8V4, width=2) for dtype in DTYPES),
    layer((128, 64), format=KVFormat.F16),
    layer((64, 64), window=40, has_sinks=True, width=2, most_entries=2),
    layer((256, 256), block=32, window=70, dtype=mx.float32, format=KVFormat.K8V4),
]


@contextmanager
def codes_by_token() -> Iterator[None]:
    """Codes of K lie as on a GPU. On a CPU they are stored by channel."""

    def heads(shape: LayerShape) -> Heads:
        keys, values = shape.codecs
        return Heads(shape.kv_heads, shape.key_dim > 0 and keys == values, 0)

    with mock.patch.object(LayerShape, "heads", property(heads)):
        yield


def random_rows(of: Layer, random: np.random.Generator) -> tuple[RowGroup, LayerArena]:
    """Up to six rows, most of which share a prefix, in an arena that grows: there blocks are not
    where their ids say. All their tokens are written.
    """
    size = of.kind.block_size
    arena = Arena([of.shape], 64, size, first_blocks=48)
    [own] = arena.layers
    rows, prefix = int(random.integers(1, 7)), int(random.integers(0, 5))
    free = list(random.permutation(48).astype(np.uint32))
    common, spans = [free.pop() for _ in range(prefix)], []
    for row in range(rows):
        n_tokens = int(random.integers(1, of.width + 1))
        stop = int(random.integers(n_tokens, 3 * size)) + (prefix * size if row < 4 else 0)
        blocks = list(common) if row < 4 else []
        while len(blocks) * size < stop:
            blocks.append(free.pop())
        table = np.array(blocks, np.uint32)
        at = np.arange(stop)
        slots = mx.array(table[at // size]), mx.array((at % size).astype(np.uint32))
        keys, values = (
            mx.array(random.standard_normal((1, of.kind.kv_heads, stop, dim))).astype(dtype)
            for dim, dtype in of.shape.vectors
        )
        own.write(arena.slot_mapping(*slots, own.heads), keys, values)
        start = stop - n_tokens
        first = first_needed(start, of.kind.window, size) if of.kind.window else 0
        spans.append(TokenSpan(start, n_tokens, table[first:], first))
    return RowGroup(spans, arena), own


class Compared(NamedTuple):
    """Rows of an arena, queries as they meet its keys, a list of work, and what plain attention
    makes of them, in float32. `sinks`: at least 8, of which the first are the heads'.
    """

    group: RowGroup
    layer: LayerArena
    queries: mx.array
    sinks: npt.NDArray[np.float32]
    work: WorkUnits
    expected: mx.array

    @property
    def arrays(self) -> Arrays:
        """The arrays of the case that the program takes."""
        group, own = self.group, self.layer
        return case_arrays(
            (own.key_planes, own.value_planes),
            self.queries,
            np.array(group.arena.place(group.table)).astype(np.uint32),
            self.work,
            group.last_seen,
            group.first_positions,
            self.sinks,
            own.values_at * own.block_size,
        )


def random_comparison(of: Layer, random: np.random.Generator) -> Compared:
    """Random rows of an arena, and plain attention to their keys."""
    kind, (group, own) = of.kind, random_rows(of, random)
    heads = kind.kv_heads * kind.group
    numbers = random.standard_normal((group.rows, heads, group.length, kind.key_dim))
    queries = own.rotated(mx.array(numbers).astype(of.shape.key_dtype))
    sinks = random.standard_normal(max(heads, 8)).astype(np.float32)
    mask = group.mask(kind.window or None)
    keys, values = (each[:, :, : mask.shape[-1]] for each in own.read(group.gather_ids(own.heads)))
    expected = mx.fast.scaled_dot_product_attention(
        queries.astype(mx.float32),
        keys.astype(mx.float32),
        values.astype(mx.float32),
        scale=kind.scale,
        mask=mask,
        sinks=mx.array(sinks[:heads]) if kind.has_sinks else None,
    )
    starts, stops = (each - group.first_positions for each in (group.starts_host, group.stops_host))
    work = make_units(kind, group.host_table, starts, stops, group.length, min_saved_blocks=1)
    return Compared(group, own, queries, sinks, work, expected)


def tolerance(of: Layer) -> float:
    """How far from plain attention an output may be: what plain attention reads is rounded once
    more where it is stored otherwise.
    """
    roundings = 1 if all(codec.is_plain for codec in of.shape.codecs) else 2
    return roundings * TOLERANCES[of.kind.queries]


def prove_arena(
    of: Layer, folder: Path, compiler: str, seed: Sequence[int], n_cases: int
) -> Report:
    """Build the text for a layer and compare `n_cases` random cases, within `codes_by_token`."""
    random, report = np.random.default_rng(seed), Report(label_of(of))
    cases = [random_comparison(of, random) for _ in range(n_cases)]
    try:
        outcomes = run(build(of.kind, folder, compiler), [one.arrays for one in cases])
    except Fault as fault:
        report.problem = str(fault)
        return report
    errors = [
        error(of.kind, outcome.output, np.array(one.expected).astype(np.float64))
        for one, outcome in zip(cases, outcomes, strict=True)
    ]
    report.counts["cases"] += len(cases)
    report.worst = max(errors)
    if not report.worst < tolerance(of):
        report.problem = f"differs by {report.worst:.1e} of the largest number"
    return report
