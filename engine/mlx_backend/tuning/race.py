"""Compares attentions on this device: first whether each is right, then how fast it is.

All go through the same views as in a forward of a model. Runs in a process of its own
(`child.py`), because a wrong kernel may end the process that launches it.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.api import one_line
from engine.mlx_backend.host import is_lack_of_memory
from engine.mlx_backend.kv.arena import Arena, LayerArena
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.model.rows import ArenaForward, RowGroup, TokenSpan
from engine.mlx_backend.model.views import LayerView, scaled_dot_product_attention
from engine.mlx_backend.tuning.kinds import LayerKind
from engine.values.attention import GATHER, AttentionTrial, TimedCell, TrialState
from kvstore.pool import blocks_for
from kvstore.window import first_needed

MOST_ERROR = 5e-3
"""The largest error of an attention, the root of its mean square relative to the output's."""

TIMES_GATHER = 2.0
"""The largest error of an attention relative to that of `gather`."""

ROUNDING = 1e-5
"""Errors up to this are not compared with those of `gather`: any order of sums has them."""

CHECKED_TOKENS = (1, 3)
"""Tokens of each row in the check: a decode, and one with drafts."""

ROWS, SHARED_ROWS = (1, 8, 32), 32
"""Numbers of rows that are timed. With SHARED_ROWS rows all share a prefix."""

KEYS = (1 << 10, 1 << 13)
"""Numbers of keys that are timed, apart from the longest."""

RACE_SECONDS = 3.0
LEAST_ROUNDS, MOST_ROUNDS = 3, 9

LAYERS = 4
"""Layers that are timed together, each with K and V of its own."""

COPIES = 3
"""Arrays of the size of all rows' K and V that `gather` may hold at once."""

_DRAWN = 1 << 22  # random numbers; larger arrays repeat them

Candidates: TypeAlias = Mapping[str, Attention]
"""Attentions by name, `gather` among them."""

Step: TypeAlias = Callable[[], float]
"""Computes a step of some attention, and returns the milliseconds of a layer."""

Steps: TypeAlias = Callable[[int, int], Mapping[str, Step]]
"""The steps of a number of rows and of keys, by the name of the attention."""

Numbers: TypeAlias = npt.NDArray[np.float32]


def compare(
    kind: LayerKind,
    candidates: Candidates,
    budget_bytes: int,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> AttentionTrial:
    """Check all candidates, and time those that are right, within about `seconds`. It takes at most
    `budget_bytes` of memory. Where memory is lacking nothing is found out.
    """
    try:
        return _compare(kind, candidates, budget_bytes, seconds, clock)
    except Exception as error:
        if not is_lack_of_memory(error):
            raise
        return AttentionTrial(str(kind), TrialState.POSTPONED, one_line(error))


def _compare(
    kind: LayerKind,
    candidates: Candidates,
    budget_bytes: int,
    seconds: float,
    clock: Callable[[], float],
) -> AttentionTrial:
    if not (sizes := cells_of(kind, budget_bytes)):
        why = "too little memory is left to compare"
        return AttentionTrial(str(kind), TrialState.POSTPONED, why)
    end = clock() + seconds
    right, rejected = {GATHER: candidates[GATHER]}, dict[str, str]()
    gather_error = error_of(kind, candidates[GATHER])
    for name, attention in candidates.items():
        if name == GATHER:
            continue
        if clock() > end - RACE_SECONDS:
            rejected[name] = "no time was left to check it"
        elif problem := _problem(kind, attention, gather_error):
            rejected[name] = problem
        else:
            right[name] = attention
    mx.clear_cache()
    if len(right) == 1:
        why = "; ".join(f"{name}: {problem}" for name, problem in rejected.items())
        return AttentionTrial(str(kind), TrialState.FAILED, why, rejected=rejected)
    field = RaceField(kind, sizes)
    cells = race(
        sizes,
        lambda rows, keys: field.steps(rows, keys, right),
        min(RACE_SECONDS, end - clock()),
        clock,
    )
    if not cells:
        why = "no time was left to compare"
        return AttentionTrial(str(kind), TrialState.FAILED, why, rejected=rejected)
    return AttentionTrial(str(kind), TrialState.PASSED, cells=tuple(cells), rejected=rejected)


def _problem(kind: LayerKind, attention: Attention, gather_error: float) -> str:
    """Why an attention may not serve, in a few words; "" if it may."""
    try:
        error = error_of(kind, attention)
    except Exception as failure:  # MLX may raise anything where a kernel does not compile
        if is_lack_of_memory(failure):
            raise
        return one_line(failure)
    if not error <= MOST_ERROR:
        return f"it is wrong by {error:.1%} of the output's size"
    if error > max(TIMES_GATHER * gather_error, ROUNDING):
        return f"its error of {error:.1g} is {error / gather_error:.1f} times that of {GATHER}"
    return ""


def error_of(kind: LayerKind, attention: Attention) -> float:
    """The largest error of a row's attention, relative to the row's output, over random rows of
    unlike length that partly share a prefix. Raises whatever MLX raises.
    """
    errors = []
    for seed, n_tokens in enumerate(CHECKED_TOKENS):
        draw = np.random.default_rng(seed)
        tables, lengths = _checked_rows(kind, n_tokens, draw)
        spans = [
            _span(kind, table, length, n_tokens)
            for table, length in zip(tables, lengths, strict=True)
        ]
        n_blocks = 1 + max(int(table.max()) for table in tables)
        used = np.unique(np.concatenate([span.blocks for span in spans]))
        arena = random_arena(kind, 1, n_blocks, seed, used)
        step = AttentionStep(kind, arena, attention, spans, seed)
        [found] = step.outputs()
        mx.eval(found)
        expected = step.expected()
        wrong = np.array(found.astype(mx.float32)) - expected
        by_row = [_size(row) / _size(own) for row, own in zip(wrong, expected, strict=True)]
        errors.append(float(np.max(by_row)))  # NaN if any is
    return float(np.max(errors))


def _size(numbers: Numbers) -> float:
    return float(np.sqrt(np.mean(np.square(numbers, dtype=np.float64))))


def _checked_rows(
    kind: LayerKind, n_tokens: int, draw: np.random.Generator
) -> tuple[list[npt.NDArray[np.uint32]], list[int]]:
    """The tables of the rows that are checked, sorted by table, and the number of tokens of each.
    Sixteen share a prefix, and the others share nothing; between their blocks some are unused.
    """
    size = kind.block_size
    longest = max(1024, 8 * size, (kind.window or 0) + 2 * size)
    prefix = longest // size
    own = [n_tokens, size, size + 1, 3 * size - 1, int(draw.integers(4 * size, longest))]
    shared = [prefix * size + int(draw.integers(n_tokens, 2 * size)) for _ in range(16)]
    n_blocks = prefix + sum(blocks_for(n, size) for n in own + shared)
    free = iter(draw.permutation(n_blocks + n_blocks // 4).astype(np.uint32).tolist())
    common = [next(free) for _ in range(prefix)]
    rows = [([next(free) for _ in range(blocks_for(n, size))], n) for n in own]
    rows += [
        (common + [next(free) for _ in range(blocks_for(n, size) - prefix)], n) for n in shared
    ]
    rows.sort()
    return [np.array(table, np.uint32) for table, _ in rows], [n for _, n in rows]


def _span(kind: LayerKind, table: npt.NDArray[np.uint32], length: int, n_tokens: int) -> TokenSpan:
    """The last `n_tokens` tokens of a row of `length` tokens."""
    start = length - n_tokens
    if kind.window is None:
        return TokenSpan(start, n_tokens, table)
    first = first_needed(start, kind.window, kind.block_size)
    return TokenSpan(start, n_tokens, table[first:], first_block=first)


class AttentionStep:
    """The attention of a forward's rows, in each layer of an arena in turn."""

    def __init__(
        self,
        kind: LayerKind,
        arena: Arena,
        attention: Attention,
        spans: Sequence[TokenSpan],
        seed: int = 0,
    ) -> None:
        self._kind = kind
        self._group = RowGroup(spans, arena)
        self._prepared = attention.prepare(self._group, kind.window)
        shape, rows, length = kind.shape, len(spans), self._group.length
        self._scale = kind.key_dim**-0.5
        key = mx.random.key(seed)
        sizes = [
            (kind.query_heads, kind.key_dim, shape.key_dtype),
            (kind.kv_heads, kind.key_dim, shape.key_dtype),
            (kind.kv_heads, kind.value_dim, shape.value_dtype),
        ]
        self._queries, self._keys, self._values = (
            mx.random.normal((rows, heads, length, dim), key=own).astype(dtype)
            for own, (heads, dim, dtype) in zip(mx.random.split(key, 3), sizes, strict=True)
        )
        self._sinks = (
            mx.random.normal((kind.query_heads,), key=key).astype(shape.key_dtype)
            if kind.has_sinks
            else None
        )
        mx.eval(self._queries, self._keys, self._values)

    def outputs(self) -> list[mx.array]:
        """The output of each layer, `[rows, heads, length, value_dim]`, not evaluated. Each layer
        waits for the one before.
        """
        outputs = list[mx.array]()
        queries = self._queries
        for layer in self._group.arena.layers:
            forward = ArenaForward([self._group], stands_in=True)
            view = LayerView(layer, forward, self._kind.window, [self._prepared])
            keys, values = view.update_and_fetch(self._keys, self._values)
            mask = view.make_mask(self._group.length)
            output = scaled_dot_product_attention(
                queries, keys, values, view, self._scale, mask, self._sinks
            )
            outputs.append(output)
            queries = self._queries + 0 * output[..., :1].astype(self._queries.dtype)
        return outputs

    def milliseconds(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """The time in which the device computes a layer, without that in which Python describes it
        to MLX: most steps replay what has been described before.
        """
        outputs = self.outputs()
        mx.synchronize()
        start = clock()
        mx.eval(outputs)
        return 1e3 * (clock() - start) / len(outputs)

    def expected(self) -> Numbers:
        """What the first layer's output should be, computed plainly on the host. K and V have been
        written.
        """
        kind, group = self._kind, self._group
        layer: LayerArena = group.arena.layers[0]
        keys, values = (_numbers(of) for of in layer.read(group.gather_ids(layer.heads)))
        rows, length = group.rows, group.length
        queries = _numbers(layer.rotated(self._queries)) * self._scale
        by_head = queries.reshape(rows, kind.kv_heads, -1, kind.key_dim)
        scores = by_head @ keys.swapaxes(-1, -2)
        scores = scores.reshape(rows, kind.query_heads, length, -1)
        scores = np.where(np.array(group.mask(kind.window)), scores, -np.inf)
        if self._sinks is not None:
            sinks = np.broadcast_to(_numbers(self._sinks)[:, None, None], (*scores.shape[:3], 1))
            scores = np.concatenate([sinks, scores], axis=-1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        if self._sinks is not None:
            weights = weights[..., 1:]
        by_head = weights.reshape(rows, kind.kv_heads, -1, weights.shape[-1])
        output: Numbers = (by_head @ values).reshape(rows, kind.query_heads, length, -1)
        return output


def _numbers(array: mx.array) -> Numbers:
    return np.array(array.astype(mx.float32))


def random_arena(
    kind: LayerKind,
    n_layers: int,
    n_blocks: int,
    seed: int,
    used: npt.NDArray[np.uint32] | None = None,
) -> Arena:
    """An arena of random K and V of about unit size. All blocks but these are NaN, and the one that
    pads tables; None: no block is.
    """
    arena = Arena([kind.shape] * n_layers, n_blocks, kind.block_size)
    ids = mx.arange(n_blocks + 2)
    is_used = np.ones(n_blocks + 2, np.bool_)
    if used is not None:
        is_used[:] = False
        is_used[[*used, arena.blank]] = True
    kept = mx.array(is_used)[:, None, None, None]
    key = mx.random.key(seed)
    codecs = kind.shape.codecs
    scales = [
        0.0 if index == 0 and codec.bits else math.sqrt(3) / codec.zero if codec.bits else 1.0
        for codec in codecs
        for index in range(len(codec.planes))
    ]
    for layer in arena.layers:
        contents = []
        for array, scale in zip(layer.blocks(ids), scales, strict=True):
            key, own = mx.random.split(key)
            spoiled = mx.array(math.nan if scale else 255, array.dtype)
            contents.append(mx.where(kept, _random(array, scale, own), spoiled))
        layer.put_blocks(0, *contents)
        mx.eval(layer.planes)
    return arena


def _random(array: mx.array, scale: float, key: mx.array) -> mx.array:
    """Random contents for a plane. `scale` 0: codes. Large arrays repeat their numbers."""
    n = min(array.size, _DRAWN)
    if scale:
        drawn = mx.random.normal((n,), key=key) * scale
        drawn = mx.abs(drawn) if scale != 1.0 else drawn
    else:
        drawn = mx.random.randint(0, 256, (n,), key=key)
    drawn = mx.tile(drawn.astype(array.dtype), -(-array.size // n))
    return drawn[: array.size].reshape(array.shape)


def cells_of(kind: LayerKind, budget_bytes: int) -> list[tuple[int, int]]:
    """The numbers of rows and keys to time, the fewest keys first: as many as fit into memory."""
    keys = sorted({*(n for n in KEYS if n < kind.longest), kind.longest})
    shape, size = kind.shape, kind.block_size
    found = list[tuple[int, int]]()
    for rows, n_keys in ((rows, n_keys) for n_keys in keys for rows in ROWS):
        stored = max(_n_blocks(size, *cell) for cell in [*found, (rows, n_keys)]) * size
        needed = LAYERS * stored * shape.token_bytes + COPIES * rows * n_keys * shape.read_bytes
        if needed <= budget_bytes:
            found.append((rows, n_keys))
    return found


def _n_blocks(size: int, rows: int, n_keys: int) -> int:
    """The blocks that the rows of a cell take together."""
    return (
        blocks_for(n_keys, size) + rows if rows == SHARED_ROWS else rows * blocks_for(n_keys, size)
    )


class RaceField:
    """An arena for the rows of all cells."""

    def __init__(self, kind: LayerKind, sizes: Sequence[tuple[int, int]]) -> None:
        self._kind = kind
        n_blocks = max((_n_blocks(kind.block_size, *cell) for cell in sizes), default=1)
        self._arena = random_arena(kind, LAYERS, n_blocks, seed=0)
        self._order = np.random.default_rng(0).permutation(n_blocks).astype(np.uint32)

    def steps(self, rows: int, n_keys: int, candidates: Candidates) -> dict[str, Step]:
        """The step of each candidate for rows of this many keys."""
        spans = list(self._spans(rows, n_keys))
        return {
            name: AttentionStep(self._kind, self._arena, attention, spans).milliseconds
            for name, attention in candidates.items()
        }

    def _spans(self, rows: int, n_keys: int) -> Iterator[TokenSpan]:
        """The last token of each row, sorted by table. With a window the rows have as many keys as
        it has.
        """
        kind, per_row = self._kind, blocks_for(n_keys, self._kind.block_size)
        tables = self._order[: rows * per_row].reshape(rows, -1) if rows != SHARED_ROWS else None
        if tables is None:
            prefix = np.tile(self._order[: per_row - 1], (rows, 1))
            own = self._order[per_row - 1 : per_row - 1 + rows, None]
            tables = np.concatenate([prefix, own], axis=1)
        for table in sorted(tables.tolist()):
            yield _span(replace(kind, window=None), np.array(table, np.uint32), n_keys, 1)


def race(
    sizes: Sequence[tuple[int, int]], steps: Steps, seconds: float, clock: Callable[[], float]
) -> list[TimedCell]:
    """The median time of each step at these sizes, given as rows and keys. Sizes for which no time
    is left are missing.
    """
    end, cells = clock() + seconds, list[TimedCell]()
    for index, (rows, n_keys) in enumerate(sizes):
        now = clock()
        if now >= end:
            break
        until = now + (end - now) / (len(sizes) - index)
        entrants = steps(rows, n_keys)
        for step in entrants.values():
            step()  # the first may build kernels
        times = {name: list[float]() for name in entrants}
        for done in range(MOST_ROUNDS):
            if clock() >= (until if done >= LEAST_ROUNDS else end) and done:
                break
            for name, step in entrants.items():
                times[name].append(step())
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        cells.append(TimedCell(rows, n_keys, medians))
    return cells
