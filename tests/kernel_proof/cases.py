"""Random tables, positions and vectors for a kind of layer, and attention in numpy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.mlx_backend.gpu.kind import Kind, Stored, kind_of
from engine.mlx_backend.gpu.work_units import WorkUnits, make_units
from engine.mlx_backend.kv.formats import Codec
from engine.mlx_backend.kv.shape import LayerShape
from engine.values.settings import KVFormat
from kvstore.window import first_needed
from tests.kernel_proof.program import Arrays

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

TOLERANCES = {Stored.FLOAT32: 1e-5, Stored.FLOAT16: 1e-3, Stored.BFLOAT16: 5e-3}
"""Largest difference from float64, as a share of the largest number of the output: it is rounded
to these types.
"""


@dataclass(frozen=True, slots=True)
class Layer:
    """A kind of layer to prove: what the arena has of it, and what the kernel makes of it.

    `width`: the most tokens of a row.
    """

    shape: LayerShape
    kind: Kind
    width: int


def layer(
    dims: tuple[int, int] = (128, 128),
    kv_heads: int = 2,
    group: int = 2,
    block: int = 16,
    dtype: mx.Dtype = mx.bfloat16,
    value_dtype: mx.Dtype | None = None,
    format: KVFormat = KVFormat.FULL,
    window: int | None = None,
    has_sinks: bool = False,
    width: int = 1,
    **variant: Any,
) -> Layer:
    """A layer to prove. `variant`: fields of `Kind` that are not its own choice."""
    shape = LayerShape(kv_heads, *dims, dtype, value_dtype or dtype, format)
    heads, scale = kv_heads * group, dims[0] ** -0.5
    kind = kind_of(shape, block, heads, dtype, scale, window, has_sinks, width)
    return Layer(shape, replace(kind, **variant), width)


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of a step, and the vectors of the arena as the numbers that are stored.

    `tables`, `[rows, entries]`. `last_seen`, `[rows, width]`: the last position that each token
    sees. `first_keys`, `[rows]`: the position of the first key of each table. `queries`: `[rows,
    kv_heads, group, width, key_dim]`. `keys` and `values`: `[blocks, kv_heads, block, dim]`, NaN
    where no query sees them. `is_padding`, `[rows]`: rows that have no work.
    """

    tables: npt.NDArray[np.uint32]
    last_seen: Ints
    first_keys: Ints
    queries: Floats
    keys: Floats
    values: Floats
    sinks: npt.NDArray[np.float32]
    is_padding: npt.NDArray[np.bool_]


def attention(kind: Kind, case: Case) -> Floats:
    """The output in float64, `[rows, kv_heads, group, width, value_dim]`."""
    outputs = np.zeros((*case.queries.shape[:-1], kind.value_dim))
    ahead = np.arange(case.tables.shape[1] * kind.block_size)
    for row, token in np.ndindex(case.last_seen.shape):
        if case.is_padding[row]:
            continue
        seen = _seen(kind, case.first_keys[row] + ahead, int(case.last_seen[row, token]))
        for head in range(kind.kv_heads):
            keys, values = (
                of[case.tables[row], head].reshape(-1, of.shape[-1])[seen]
                for of in (case.keys, case.values)
            )
            scores = case.queries[row, head, :, token] @ keys.T * kind.scale
            if kind.has_sinks:
                own = case.sinks[head * kind.group : (head + 1) * kind.group]
                scores = np.concatenate([scores, own[:, None]], axis=1)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            outputs[row, head, :, token] = weights[:, : len(values)] @ values
    return outputs


def _seen(kind: Kind, positions: npt.NDArray[Any], last: int) -> npt.NDArray[np.bool_]:
    seen: npt.NDArray[np.bool_] = positions <= last
    return seen & (positions > last - kind.window) if kind.window else seen


def error(kind: Kind, output: bytes, expected: Floats) -> float:
    """The largest difference, as a share of the largest number; infinite where one is no number."""
    found = from_bytes(output, kind.queries).reshape(expected.shape)
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-6))


@dataclass(frozen=True, slots=True)
class Tables:
    """Random rows that share a prefix, or not. `starts` and `stops`: the positions of each row's
    tokens; padding rows have none, and the last block, which is all NaN.
    """

    tables: npt.NDArray[np.uint32]
    starts: Ints
    stops: Ints
    width: int
    first_keys: Ints
    n_blocks: int

    @property
    def is_padding(self) -> npt.NDArray[np.bool_]:
        padding: npt.NDArray[np.bool_] = self.stops == 0
        return padding

    @property
    def last_seen(self) -> Ints:
        positions = self.starts[:, None] + np.arange(self.width, dtype=np.int32)
        last: Ints = np.minimum(positions, np.maximum(self.stops[:, None] - 1, 0))
        return last


def random_tables(of: Layer, random: np.random.Generator) -> Tables:
    """Up to six rows of unlike lengths."""
    kind, size = of.kind, of.kind.block_size
    rows, width = int(random.integers(1, 7)), int(random.choice([1, of.width]))
    longest = int(random.choice([3, size, 5 * size, 9 * size + 1]))
    starts = random.integers(longest * 2 // 3 if random.integers(4) else 0, longest, rows)
    stops = starts + random.integers(1, width + 1, rows)
    stops[random.integers(rows)] = starts[0] + width if rows == 1 else stops.max()
    starts = np.minimum(starts, stops - 1)
    if rows > 2 and not random.integers(4):
        starts[-1] = stops[-1] = 0
    # The first rows share whole blocks before any of their tokens.
    sharing = rows if random.integers(2) else int(random.integers(0, rows + 1))
    n_shared = int(starts[:sharing].min() // size) if sharing > 1 else 0
    n_blocks = int((-(-stops // size)).sum()) + 5
    free = list(random.permutation(n_blocks - 1).astype(np.uint32))
    common = [free.pop() for _ in range(n_shared)]
    found, skipped = [], np.zeros(rows, np.int32)
    for row in range(rows):
        own = list(common) if row < sharing else []
        while len(own) * size < stops[row]:
            own.append(free.pop())
        if kind.window and stops[row]:
            skipped[row] = first_needed(int(starts[row]), kind.window, size)
        found.append(own[skipped[row] :])
    entries = max(map(len, found)) + int(random.integers(0, 3))
    tables = np.full((rows, max(entries, 1)), n_blocks - 1, np.uint32)
    for row, own in enumerate(found):
        tables[row, : len(own)] = own
    order = random.permutation(rows)
    return Tables(
        tables[order],
        starts[order].astype(np.int32),
        stops[order].astype(np.int32),
        width,
        skipped[order] * size,
        n_blocks,
    )


@dataclass(frozen=True, slots=True)
class Drawn:
    """A random case, and what the arena and the step have of it.

    `planes`: those of K and those of V. They are the same where K and V share them; `values_at`
    vectors of K then come first. `is_older`: the list was made when the rows were shorter.
    """

    case: Case
    planes: tuple[list[mx.array], list[mx.array]]
    values_at: int
    queries: mx.array
    work: WorkUnits
    is_older: bool

    @property
    def arrays(self) -> Arrays:
        """The arrays of the case that the program takes."""
        case = self.case
        return case_arrays(
            self.planes,
            self.queries,
            case.tables,
            self.work,
            case.last_seen,
            case.first_keys,
            case.sinks,
            self.values_at,
        )


def random_case(of: Layer, random: np.random.Generator) -> Drawn:
    """Random rows, vectors and queries, and a list of work, which may be older than the rows."""
    kind, step = of.kind, random_tables(of, random)
    rows, of_vectors = len(step.tables), (step.n_blocks, kind.kv_heads, kind.block_size)
    is_seen = np.broadcast_to(_seen_slots(kind, step)[:, None], of_vectors)
    keys, values = (
        _stored(codec, is_seen, float(random.choice([0.3, 1.0, 4.0])), random)
        for codec in of.shape.codecs
    )
    planes, values_at = (keys.planes, values.planes), 0
    if of.shape.heads.share_plane:  # all of K before all of V
        both = [mx.concatenate(list(pair)) for pair in zip(*planes, strict=True)]
        planes, values_at = (both, both), is_seen.size
    shape = rows, kind.kv_heads, kind.group, step.width, kind.key_dim
    numbers = mx.array(random.standard_normal(shape).astype(np.float32))
    queries = numbers.astype(_DTYPES[kind.queries])
    case = Case(
        step.tables,
        step.last_seen,
        step.first_keys,
        from_bytes(as_bytes(queries).tobytes(), kind.queries).reshape(shape),
        keys.numbers,
        values.numbers,
        random.standard_normal(max(kind.kv_heads * kind.group, 8)).astype(np.float32),
        step.is_padding,
    )
    work, is_older = _work(kind, step, random)
    return Drawn(case, planes, values_at, queries, work, is_older)


def _seen_slots(kind: Kind, step: Tables) -> npt.NDArray[np.bool_]:
    """Which slots of which blocks any query sees, `[blocks, block_size]`."""
    seen = np.zeros((step.n_blocks, kind.block_size), bool)
    ahead = np.arange(step.tables.shape[1] * kind.block_size)
    for row, token in np.ndindex(step.last_seen.shape):
        if not step.is_padding[row]:
            positions = step.first_keys[row] + ahead
            own = _seen(kind, positions, int(step.last_seen[row, token]))
            seen[step.tables[row]] |= own.reshape(-1, kind.block_size)
    return seen


class _Stored(NamedTuple):
    planes: list[mx.array]
    numbers: Floats


def _stored(
    codec: Codec, is_seen: npt.NDArray[np.bool_], size: float, random: np.random.Generator
) -> _Stored:
    """Random vectors as the codec stores them, NaN where they are not seen."""
    numbers = random.standard_normal((*is_seen.shape, codec.dim)) * size
    numbers[~is_seen] = np.nan
    vectors = mx.array(numbers.astype(np.float32)).astype(codec.dtype)
    planes = codec.encode(vectors.reshape(-1, codec.dim))
    return _Stored(planes, _meant(codec, planes).reshape(numbers.shape))


def _work(kind: Kind, step: Tables, random: np.random.Generator) -> tuple[WorkUnits, bool]:
    """A list that was made when the rows were shorter, where it still reaches them."""
    starts, stops = (np.maximum(each - step.first_keys, 0) for each in (step.starts, step.stops))
    most = np.full(len(starts), step.tables.shape[1], np.int32)
    room = most if random.integers(2) else None
    groups = int(random.choice([1, 16, 10**6]))
    for grown in (int(random.integers(1, 3 * kind.block_size)), 0):
        before = np.where(stops, np.maximum(stops - grown, 1), 0)
        at = np.maximum(np.minimum(starts, before - 1), 0)
        work = make_units(kind, step.tables, at, before, step.width, room, 1, groups)
        if work.reaches(stops, kind.block_size):
            break
    return work, grown > 0


def case_arrays(
    planes: Sequence[Sequence[mx.array]],
    queries: mx.array,
    places: npt.NDArray[np.uint32],
    work: WorkUnits,
    last_seen: Ints,
    first_keys: Ints,
    sinks: npt.NDArray[np.float32],
    values_at: int,
) -> Arrays:
    """The arrays of a case in the program's order. `planes`: of K and of V. `values_at`: the number
    of vectors in V's plane before those of V.
    """
    sizes = [len(places), work.n_partials, places.shape[1], values_at, last_seen.shape[1]]
    of_vectors = []
    for of in planes:
        of_vectors.append(as_bytes(of[0]))
        of_vectors.append(np.array(of[1]) if len(of) > 1 else np.zeros(0, np.float32))
    return [
        np.array(sizes, np.int32),
        as_bytes(queries),
        *of_vectors,
        places,
        work.units,
        work.order,
        last_seen,
        first_keys,
        work.first_parts,
        work.parts,
        sinks,
    ]


_DTYPES = {
    Stored.FLOAT32: mx.float32,
    Stored.FLOAT16: mx.float16,
    Stored.BFLOAT16: mx.bfloat16,
}


def from_bytes(data: bytes, of: Stored) -> Floats:
    """The numbers of an array of this type."""
    if of is Stored.BFLOAT16:
        bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    return np.frombuffer(data, np.float32 if of is Stored.FLOAT32 else np.float16).astype(float)


def as_bytes(array: mx.array) -> npt.NDArray[np.uint8]:
    """The bytes of an array of any type."""
    return np.array(array.reshape(-1).view(mx.uint8))


def _meant(codec: Codec, encoded: list[mx.array]) -> Floats:
    """The numbers that are stored, without the rounding to the model's type."""
    if not codec.bits:
        return np.array(encoded[0].astype(mx.float32)).astype(np.float64)
    integers = np.array(codec.integers(encoded[0])).astype(np.float64)
    return integers * np.repeat(np.array(encoded[1]).astype(np.float64), codec.group, axis=-1)
