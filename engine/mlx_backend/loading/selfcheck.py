"""Before a model is served: do its logits through the storage equal those through its own caches?

The answer also says how its rows may share forwards and which attention computes them: the rungs of
the ladder are tried in turn, and on each the attention that is to serve before the one that runs
anywhere. What passes here is what serves.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from typing import NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from engine.api import ModelError
from engine.mlx_backend.batch import SequenceTables
from engine.mlx_backend.kv.storage import Storage
from engine.mlx_backend.model.batching import LADDER
from engine.mlx_backend.model.cached_model import CachedModel, Execution
from engine.mlx_backend.model.layout import RUN_ERRORS, Layout
from engine.mlx_backend.model.patches import (
    NO_ADAPTER,
    OutputHead,
    RowAdapters,
    install_output_head,
)
from engine.mlx_backend.model.rows import TokenSpan
from engine.mlx_backend.model.views import Attention, install_attention
from kvstore.lease import Lease, Refusal
from kvstore.ops import ReadBlock
from kvstore.pool import BlockPool, blocks_for
from kvstore.sizes import StateCounts, StorageSizes, WindowSize, build_groups
from kvstore.store import KVStore
from kvstore.tokens import Tokens
from kvstore.types import Namespace
from kvstore.window import lease_slots

_STEPS = (
    (33, 5, 0, 0),
    (3, 2, 4, 0),  # a row begins while others go on; padding after the last token
    (2, 2, 2, 2),  # again without padding
    (1, 4, 1, 1),  # decodes and a prompt
    (1, 1, 1, 1),
)
"""Tokens of each row in each forward. Rows are far apart, and not always as many as KV heads."""

_UNREAD_STEP, _UNREAD_ROW = 1, 0
"""The logits of this row are not read in that step, as of all chunks of a prompt but the last."""

_BLOCK_SIZE = 4
_WINDOW_TOKENS = 128
"""Windows up to this are checked beyond their end; others would take long prompts."""

_EARLY = {"index_block_size": 4, "index_topk_blocks": 1, "index_local_blocks": 1}
"""Sparse attention that begins within the check's few tokens, not after thousands.

What mlx-lm's modules call the keys of a block, how many blocks a query sees, and how many of these
are the last, whatever the scores: with one of each no rounding decides.
"""

_UNBOUNDED = 1 << 30
_CPU_TOLERANCE = 1e-3
GPU_TOLERANCE = 0.01  # products of float32 may be rounded to TF32
_HALF_TOLERANCE = 0.05
"""Error relative to the logits, in float32 and in half precision.

In float32 models that are right stay below 2e-5; a wrong position costs a random one 15%.
"""


class _Row(NamedTuple):
    """A sequence of the check."""

    tokens: Sequence[int]
    adapter: str


def find_execution(
    model: Module, layout: Layout, attentions: Sequence[Attention], adapters: RowAdapters
) -> Execution:
    """The first rung of the ladder on which the model says what it does through its own caches.

    `attentions` are tried in that order on each rung: more forwards cost more than another
    attention. The check's rows take turns at the adapters. Puts our attention into the model.
    Raises ModelError when nothing passes, with what went wrong on each rung.
    """
    rows = _rows(layout, adapters.names)
    problems = []
    try:
        head = install_patches(model, layout)
        expected = _expected(model, adapters, rows)
    except RUN_ERRORS as failure:
        raise ModelError(f"the model does not run on this device: {failure}") from failure
    most = tolerance(layout)
    for execution in _candidates(attentions, head, adapters):
        name = f"{execution.batching.name} with {execution.attention.name}"
        try:
            error = deviation(_through_storage(model, layout, execution, rows), expected)
        except RUN_ERRORS as failure:
            problems.append(f"{name}: {str(failure).partition(chr(10))[0]}")
            continue
        if error < most:
            return replace(execution, deviation=error, rejected=tuple(problems))
        problems.append(f"{name}: logits are wrong by {error:.1%} of their size")
    raise ModelError(
        "the model does not say through shared storage what it says alone ("
        + "; ".join(problems)
        + ")"
    )


def install_patches(model: Module, layout: Layout) -> OutputHead:
    """Put our attention and our output head into a model. Raises whatever the model raises."""
    install_attention(model)
    return install_output_head(model, layout.vocab_size)


@contextmanager
def sparse_early(model: Module) -> Iterator[None]:
    """Within the context sparse attention begins so early that the check comes to it."""
    sparse = [
        vars(module) for _, module in model.named_modules() if _EARLY.keys() <= vars(module).keys()
    ]
    own = [{name: attributes[name] for name in _EARLY} for attributes in sparse]
    try:
        for attributes in sparse:
            attributes.update(_EARLY)
        yield
    finally:
        for attributes, before in zip(sparse, own, strict=True):
            attributes.update(before)


def _candidates(
    attentions: Sequence[Attention], head: OutputHead, adapters: RowAdapters
) -> Iterator[Execution]:
    for batching in LADDER:
        for attention in attentions:
            yield Execution(batching, attention, head, adapters)


def tolerance(layout: Layout) -> float:
    """The most that a right model's logits may be wrong by, relative to their size."""
    if {*layout.dtypes, layout.logits_dtype} != {mx.float32}:
        return _HALF_TOLERANCE
    return _CPU_TOLERANCE if mx.default_device() == mx.cpu else GPU_TOLERANCE


def _rows(layout: Layout, adapters: Sequence[str]) -> list[_Row]:
    """The first is longer than the windows. They take turns at no adapter and each of these."""
    windows = [window for window in layout.windows if window <= _WINDOW_TOKENS]
    lengths = [sum(column) for column in zip(*_STEPS, strict=True)]
    lengths[0] += max(windows, default=0)
    n_tokens = min(layout.vocab_size, 1000)
    tokens = [[(37 * i + 11 * row) % n_tokens for i in range(n)] for row, n in enumerate(lengths)]
    return list(map(_Row, tokens, cycle((NO_ADAPTER, *adapters))))


def _through_storage(
    model: Module, layout: Layout, execution: Execution, rows: Sequence[_Row]
) -> mx.array:
    """Logits after the last token of each row that is read in each step, as `_expected`."""
    longest = len(rows[0].tokens)
    layout = layout.within(longest)
    sizes = _sizes(layout, rows)
    storage = Storage(layout, sizes, _BLOCK_SIZE)
    groups = build_groups(sizes, _BLOCK_SIZE, longest)
    store = KVStore(BlockPool(sizes.n_blocks), None, _BLOCK_SIZE, groups)
    cached = CachedModel(model, layout, storage, execution)
    leases = [_admitted(store.admit(Namespace(), Tokens(row.tokens))) for row in rows]
    tables = {
        lease: SequenceTables(cached.n_groups, row.adapter)
        for lease, row in zip(leases, rows, strict=True)
    }
    found = []
    for index, step in enumerate(_steps(rows)):
        chunks = {leases[row]: n_tokens for row, n_tokens in step.items()}
        read = [leases[row] for row in _read_rows(index, step)]
        logits = _compute(store, cached, tables, chunks, read)
        found += [logits[lease] for lease in read]
    return mx.stack(found)


def _compute(
    store: KVStore,
    cached: CachedModel,
    tables: dict[Lease, SequenceTables],
    chunks: dict[Lease, int],
    read: Sequence[Lease],
) -> dict[Lease, mx.array]:
    """Compute each lease's next chunk; logits after the last tokens of those that are read."""
    starts = {lease: lease.planned_tokens for lease in chunks}
    for lease, n_tokens in chunks.items():
        assert store.plan(lease, n_tokens) is None, "the check's storage is too small"
        for patch in lease.take_patches():
            tables[lease].patch(patch)
    # No state is saved, so all ops come before the forwards.
    cached.storage.execute(op for _, op in store.take_ops() if not isinstance(op, ReadBlock))
    leases, spans, token_ids = list(chunks), list[TokenSpan](), list[int]()
    for index, (lease, n_tokens) in enumerate(chunks.items()):
        first_token, n_read = len(token_ids), int(lease in read)
        span = tables[lease].span(starts[lease], n_tokens, index, first_token, n_read)
        spans.append(span)
        token_ids += lease.tokens.ids(span.start, span.stop)
    forwards = cached.arrange(spans, _UNBOUNDED)
    found: dict[Lease, mx.array] = {}
    for batch in (*forwards.prompts, *forwards.sampling):
        computed = cached.forward(batch, mx.array(token_ids))
        answered = [leases[span.index] for span in batch.spans if span.n_read]
        mx.eval(computed.logits if answered else [], cached.storage.arrays())
        found.update(zip(answered, computed.logits, strict=False))
    for lease, n_tokens in chunks.items():
        store.commit(lease, n_tokens)
    return found


def _sizes(layout: Layout, rows: Sequence[_Row]) -> StorageSizes:
    longest = len(rows[0].tokens)
    return StorageSizes(
        n_blocks=sum(blocks_for(len(row.tokens), _BLOCK_SIZE) for row in rows),
        windows=tuple(
            WindowSize(window, len(rows) * lease_slots(window, _BLOCK_SIZE, longest))
            for window in layout.windows
        ),
        states=StateCounts(len(rows), 0) if layout.states else None,
    )


def _admitted(lease: Lease | Refusal) -> Lease:
    assert isinstance(lease, Lease), "the check's storage is too small"
    return lease


def _steps(rows: Sequence[_Row]) -> Iterator[dict[int, int]]:
    """How many tokens of which row each step computes; the first row is longer than `_STEPS`."""
    first, *rest = _STEPS
    longer = len(rows[0].tokens) - sum(step[0] for step in _STEPS)
    for step in ((first[0] + longer, *first[1:]), *rest):
        yield {row: n_tokens for row, n_tokens in enumerate(step) if n_tokens}


def _read_rows(index: int, step: dict[int, int]) -> list[int]:
    """The rows whose logits are read in the step of that index."""
    return [row for row in step if (index, row) != (_UNREAD_STEP, _UNREAD_ROW)]


def _expected(model: Module, adapters: RowAdapters, rows: Sequence[_Row]) -> mx.array:
    """Logits after the last token of each row that is read in each step, `[tokens, vocabulary]`."""
    by_row = [_own_logits(model, adapters, row) for row in rows]
    ends, found = [0] * len(rows), []
    for index, step in enumerate(_steps(rows)):
        for row, n_tokens in step.items():
            ends[row] += n_tokens
        found += [by_row[row][ends[row] - 1] for row in _read_rows(index, step)]
    return mx.stack(found)


def _own_logits(model: Module, adapters: RowAdapters, row: _Row) -> mx.array:
    with adapters.of([row.adapter]):
        logits: mx.array = model(mx.array([row.tokens]), cache=make_prompt_cache(model))
    own = logits[0].astype(mx.float32)
    mx.eval(own)
    return own


def deviation(found: mx.array, expected: mx.array) -> float:
    """The largest error of a row, relative to its logits; tokens ruled out by -inf count not."""
    finite = mx.isfinite(expected)
    expected = mx.where(finite, expected, 0)
    error = mx.where(finite, found.astype(mx.float32), 0) - expected
    relative = mx.linalg.norm(error, axis=-1) / mx.linalg.norm(expected, axis=-1)
    return float(relative.max())
