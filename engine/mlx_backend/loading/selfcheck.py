"""Before a model is served: do its logits through the storage equal those through its own caches?

The answer also says how its rows may share forwards and which attention computes them: the rungs of
the ladder are tried in turn, and on each the attention that is to serve before the one that runs
anywhere. What passes here is what serves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from engine.mlx_backend.attention import dispatch
from engine.mlx_backend.attention.strategy import Attention
from engine.mlx_backend.errors import UnsupportedModel
from engine.mlx_backend.model.batching import LADDER, Batching
from engine.mlx_backend.model.cached_model import CachedModel
from engine.mlx_backend.model.discovery import RUN_ERRORS
from engine.mlx_backend.model.forward import padded_tokens
from engine.mlx_backend.model.layout import Layout
from engine.mlx_backend.model.storage import Storage
from engine.mlx_backend.model.tables import SequenceTables
from engine.storage_sizes import StateCounts, StorageSizes, WindowSize, build_groups
from kvstore.block_pool import BlockPool
from kvstore.block_table import blocks_for
from kvstore.groups.window import lease_slots
from kvstore.lease import Lease, Refusal
from kvstore.prefix_index import NoIndex
from kvstore.store import KVStore
from kvstore.tokens import Tokens
from kvstore.types import Namespace

_STEPS = (
    (33, 5, 0, 0),
    (3, 2, 4, 0),  # a row that begins beside others, and padding behind the last token
    (2, 2, 2, 2),  # again without padding
    (1, 1, 1, 1),
)
"""Tokens of each row in each forward. Rows are far apart, and not always as many as KV heads."""

_BLOCK_SIZE = 4
_WINDOW_TOKENS = 128
"""Windows up to this are checked beyond their end; others would take long prompts."""

_UNBOUNDED = 1 << 30
_CPU_TOLERANCE = 1e-3
_GPU_TOLERANCE = 0.01  # products of float32 may be rounded to TF32
_HALF_TOLERANCE = 0.05
"""Error relative to the logits, in float32 and in half precision.

In float32 models that are right stay below 2e-5; a wrong position costs a random one 15%.
"""


@dataclass(frozen=True, slots=True)
class Execution:
    """How the model runs over shared storage. `rejected`: what was tried before, and why not."""

    batching: Batching
    attention: Attention
    rejected: tuple[str, ...] = ()


def find_execution(model: Module, layout: Layout, attentions: Sequence[Attention]) -> Execution:
    """The first rung of the ladder on which the model says what it does through its own caches.

    `attentions` are tried in that order on each rung: more forwards cost more than another
    attention. Puts ours into the model. Raises UnsupportedModel when nothing passes, with what went
    wrong on each rung.
    """
    dispatch.install(model)
    rows = _rows(layout)
    problems = []
    try:
        expected = mx.stack([_last_logits(model, tokens) for tokens in rows])
    except RUN_ERRORS as error:
        raise UnsupportedModel(f"the model does not run on this device: {error}") from error
    tolerance = _tolerance(layout)
    for execution in _candidates(attentions):
        name = f"{execution.batching.name} with {execution.attention.name}"
        try:
            deviation = _deviation(_through_storage(model, layout, execution, rows), expected)
        except RUN_ERRORS as error:
            problems.append(f"{name}: {str(error).partition(chr(10))[0]}")
            continue
        if deviation < tolerance:
            return replace(execution, rejected=tuple(problems))
        problems.append(f"{name}: logits are wrong by {deviation:.1%} of their size")
    raise UnsupportedModel(
        "the model does not say through shared storage what it says alone ("
        + "; ".join(problems)
        + ")"
    )


def _candidates(attentions: Sequence[Attention]) -> Iterator[Execution]:
    for batching in LADDER:
        for attention in attentions:
            yield Execution(batching, attention)


def _tolerance(layout: Layout) -> float:
    if {*layout.dtypes, layout.logits_dtype} != {mx.float32}:
        return _HALF_TOLERANCE
    return _CPU_TOLERANCE if mx.default_device() == mx.cpu else _GPU_TOLERANCE


def _rows(layout: Layout) -> list[list[int]]:
    """Tokens of each row, the first longer than the windows."""
    windows = [window for window in layout.windows if window <= _WINDOW_TOKENS]
    lengths = [sum(column) for column in zip(*_STEPS, strict=True)]
    lengths[0] += max(windows, default=0)
    n_tokens = min(layout.vocab_size, 1000)
    return [[(37 * i + 11 * row) % n_tokens for i in range(n)] for row, n in enumerate(lengths)]


def _through_storage(
    model: Module, layout: Layout, execution: Execution, rows: Sequence[Sequence[int]]
) -> mx.array:
    """Logits after each row's last token, `[rows, vocabulary]`."""
    layout = layout.within(max(map(len, rows)))
    sizes = _sizes(layout, rows)
    storage = Storage(layout, sizes, _BLOCK_SIZE)
    groups = build_groups(sizes, _BLOCK_SIZE, len(rows[0]))
    store = KVStore(BlockPool(sizes.n_blocks), NoIndex(), _BLOCK_SIZE, groups)
    cached = CachedModel(model, layout, storage, execution.attention, execution.batching)
    leases = [_admitted(store.admit(Namespace(), Tokens(tokens))) for tokens in rows]
    tables = {lease: SequenceTables(cached.n_groups) for lease in leases}
    first, *rest = _STEPS
    longer = len(rows[0]) - sum(step[0] for step in _STEPS)
    logits: dict[Lease, mx.array] = {}
    for step in ((first[0] + longer, *first[1:]), *rest):
        chunks = {lease: n for lease, n in zip(leases, step, strict=True) if n}
        logits = _compute(store, cached, tables, chunks)
    return mx.stack([logits[lease] for lease in leases])


def _compute(
    store: KVStore,
    cached: CachedModel,
    tables: dict[Lease, SequenceTables],
    chunks: dict[Lease, int],
) -> dict[Lease, mx.array]:
    """Compute so many tokens of each lease; logits after the last ones."""
    starts = {lease: lease.planned_tokens for lease in chunks}
    for lease, n_tokens in chunks.items():
        room = store.extend(lease, n_tokens)
        assert not isinstance(room, Refusal), "the check's storage is too small"
        cached.storage.carry_out(room.before)
        for patch in lease.take_patches():
            tables[lease].patch(patch)
    leases = list(chunks)
    pieces = [tables[lease].piece(starts[lease], n_tokens) for lease, n_tokens in chunks.items()]
    found: dict[Lease, mx.array] = {}
    for group in cached.groups(pieces, _UNBOUNDED):
        tokens = [leases[i].tokens.ids(pieces[i].start, pieces[i].stop) for i in group]
        logits = cached.forward([pieces[i] for i in group], padded_tokens(tokens)).logits
        lasts = {leases[i]: logits[row, chunks[leases[i]] - 1] for row, i in enumerate(group)}
        mx.eval(list(lasts.values()), cached.storage.arrays())
        found |= lasts
    for lease, n_tokens in chunks.items():
        store.publish(lease, lease.written_tokens + n_tokens)
    return found


def _sizes(layout: Layout, rows: Sequence[Sequence[int]]) -> StorageSizes:
    longest = len(rows[0])
    return StorageSizes(
        n_blocks=sum(blocks_for(len(tokens), _BLOCK_SIZE) for tokens in rows),
        windows=tuple(
            WindowSize(window, len(rows) * lease_slots(window, _BLOCK_SIZE, longest))
            for window in layout.windows
        ),
        states=StateCounts(len(rows), 0) if layout.states else None,
    )


def _admitted(lease: Lease | Refusal) -> Lease:
    assert isinstance(lease, Lease), "the check's storage is too small"
    return lease


def _last_logits(model: Module, tokens: Sequence[int]) -> mx.array:
    logits: mx.array = model(mx.array([tokens]), cache=make_prompt_cache(model))
    last = logits[0, -1].astype(mx.float32)
    mx.eval(last)
    return last


def _deviation(found: mx.array, expected: mx.array) -> float:
    """The largest error of a row, relative to its logits; tokens ruled out by -inf count not."""
    finite = mx.isfinite(expected)
    expected = mx.where(finite, expected, 0)
    error = mx.where(finite, found.astype(mx.float32), 0) - expected
    relative = mx.linalg.norm(error, axis=-1) / mx.linalg.norm(expected, axis=-1)
    return float(relative.max())
