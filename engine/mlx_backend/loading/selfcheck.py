"""The check of a model at load: are its logits through shared storage those through its own caches?

The check also finds out how rows may share forwards and which attention computes them. It tries the
rungs of the ladder in turn, and on each rung the attention that should serve before the one that
runs anywhere. The first combination that passes is the one that serves.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, product
from typing import NamedTuple, TypeAlias

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from engine.api import ModelError
from engine.mlx_backend.kv.layout import RUN_ERRORS, Layout, run_problem
from engine.mlx_backend.kv.storage import Storage
from engine.mlx_backend.loading.compiler import failure_of_compiler
from engine.mlx_backend.loading.memory import activation_bytes, footprint
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.model.batching import LADDER
from engine.mlx_backend.model.cached_model import CachedModel, Execution
from engine.mlx_backend.model.patches import (
    NO_ADAPTER,
    OutputHead,
    RowAdapters,
    install_output_head,
)
from engine.mlx_backend.model.rows import TokenSpan
from engine.mlx_backend.model.sequences import SequenceImages, SequenceTables
from engine.mlx_backend.model.views import install_attention
from engine.values.settings import KVFormat
from kvstore.lease import Lease
from kvstore.ops import ReadBlock, StepOp, StorageOp, When
from kvstore.pool import BlockPool, blocks_for
from kvstore.sizes import StateCounts, StorageSizes, WindowSize, build_groups
from kvstore.store import KVStore
from kvstore.tokens import Tokens
from kvstore.types import Namespace
from kvstore.window import lease_slots

_STEPS = (
    (33, 5, 0, 0),
    (3, 2, 4, 0),  # a row begins while others continue; padding after the last token
    (2, 2, 2, 2),  # the same without padding
    (1, 4, 1, 1),  # decodes and a prompt
    (1, 1, 1, 1),
    (1, 0, 0, 0),  # a row that has no adapter, without rows that have one
)
"""Tokens of each row in each step. Rows are of unlike lengths, and there are not always as many as
KV heads.
"""

_UNREAD_STEP, _UNREAD_ROW = 1, 0
"""The logits of this row are not read in this step, as in all chunks of a prompt but the last."""

BLOCK_SIZE = 4
_CPU_WINDOW_TOKENS, _GPU_WINDOW_TOKENS = 128, 512
"""The longest window that is checked beyond its end: longer ones would take long prompts."""

_GPU_CHUNK_TOKENS = 512
"""Tokens that a GPU computes in one forward of the check at least, as many as a step of the default
size has. Some of MLX's kernels cannot be launched for shapes that only large forwards have: those
of CUDA take blocks of at most 64 threads along z, and RoPE of small heads asks for more.
"""

_EARLY = {"index_block_size": 4, "index_topk_blocks": 1, "index_local_blocks": 1}
"""Attributes of mlx-lm's modules for sparse attention that begins within the check's few tokens,
instead of after thousands: the keys of a block, how many blocks a query attends to, and how many of
these are the last ones whatever their scores. With one of each no rounding decides.
"""

_MEASURED_TOKENS = 64

OWN_LOGIT_BYTES = 8
"""A logit that the model computes through its own caches, and the array that it is made of."""

_UNBOUNDED = 1 << 30
_CPU_TOLERANCE = 1e-3
GPU_TOLERANCE = 0.01  # products of float32 may be rounded to TF32
_HALF_TOLERANCE = 0.05
"""Error relative to the logits, in float32 and in half precision.

In float32 the error of correct models stays below 2e-5; with a wrong position a random model's
logits are wrong by 15%.
"""


class Row(NamedTuple):
    """A sequence of the check."""

    tokens: Sequence[int]
    adapter: str
    images: SequenceImages | None = None


class Chunk(NamedTuple):
    """The tokens of a row that one step computes. `n_read`: of how many of the last ones the logits
    are read.
    """

    row: int
    start: int
    stop: int
    n_read: int

    @property
    def read(self) -> range:
        """The positions whose logits are read."""
        return range(self.stop - self.n_read, self.stop)


Agree: TypeAlias = Callable[[float], float]
"""The largest of the numbers that the ranks of a model find, so that all decide the same."""


def alone(number: float) -> float:
    """An `Agree` for a model that one process computes."""
    return number


def find_execution(
    model: Module,
    layout: Layout,
    attentions: Sequence[Attention],
    adapters: RowAdapters,
    agree: Agree = alone,
) -> Execution:
    """The first rung of the ladder on which the model's logits are those through its own caches.

    `attentions` are tried in their order on each rung, because more forwards cost more than another
    attention. The check's rows take turns at no adapter and each of `adapters`. Changes the model's
    layers by `install_patches` after its own logits have been computed. Ranks take the first
    combination that passes on all. Raises ModelError when nothing passes, with the problem on each
    rung.
    """
    rows = _rows(layout, adapters.names)
    steps = _steps(rows)
    problems = list[str]()
    with _sparse_early(model):
        try:
            expected = own_logits(model, adapters, rows, steps)
            head = install_patches(model, layout, adapters)
        except RUN_ERRORS as failure:
            problem = failure_of_compiler(failure) or run_problem(failure)
            raise ModelError(f"the model does not run on this device: {problem}") from failure
        for batching, attention in product(LADDER, attentions):
            execution = Execution(batching, attention, head, adapters)
            name = f"{batching.name} with {attention.name}"
            try:
                found = logits_through_storage(model, layout, execution, rows, steps)
                error = deviation(found, expected)
            except RUN_ERRORS as failure:
                problems.append(f"{name}: {str(failure).partition(chr(10))[0]}")
                agree(math.inf)
                continue
            error = agree(error)
            if error < tolerance(layout):
                return replace(execution, deviation=error, rejected=tuple(problems))
            problems.append(f"{name}: logits are wrong by {error:.1%} of their size")
        error = looks_ahead(model, rows[0].tokens)
    if error > tolerance(layout):
        raise ModelError(
            "mlx-lm's model is not causal: later tokens change an earlier token's logits "
            f"({error:.0%} of their size)"
        )
    raise ModelError(
        "the model computes other logits through shared storage than alone ("
        + "; ".join(problems)
        + ")"
    )


def looks_ahead(model: Module, tokens: Sequence[int]) -> float:
    """How much a token's logits change when other tokens follow it, through the model's own caches,
    relative to their size.
    """
    first = tokens[: len(tokens) // 2]
    alone, followed = (
        model(mx.array([part]), cache=make_prompt_cache(model))[0, len(first) - 1]
        for part in (first, tokens)
    )
    return deviation(alone[None], followed[None].astype(mx.float32))


def check_bytes(layout: Layout) -> int:
    """The memory that `find_execution` takes at most, in addition to the weights."""
    rows = _rows(layout, ())
    longest = len(rows[0].tokens)
    layout = layout.within(longest).in_blocks_of(BLOCK_SIZE).stored_as(KVFormat.FULL)
    stored = footprint(layout, BLOCK_SIZE).storage_bytes(storage_sizes(layout, rows))
    n_read = sum(chunk.n_read for step in _steps(rows) for chunk in step)
    return (
        stored.arenas
        + stored.states
        + activation_bytes(longest, n_read, layout.vocab_size)
        + longest * layout.vocab_size * OWN_LOGIT_BYTES
    )


def measured_token_bytes(model: Module, layout: Layout, execution: Execution) -> int:
    """What a step's arrays take for each token of a prompt, by MLX's count; 0 for a model without
    recurrent states, or on a GPU. There MLX has kernels for them. Elsewhere mlx-lm's layers may
    make an array of the size of a state for each token, some of them several.
    """
    state = layout.state_bytes
    if state is None or mx.default_device() != mx.cpu:
        return 0
    tokens = [(37 * i) % min(layout.vocab_size, 1000) for i in range(_MEASURED_TOKENS)]
    rows, steps = [Row(tokens, NO_ADAPTER)], [[Chunk(0, 0, len(tokens), 1)]]
    held = footprint(layout, BLOCK_SIZE).storage_bytes(storage_sizes(layout, rows))
    mx.clear_cache()
    before_bytes = mx.get_active_memory() + held.arenas + held.states + state.replaced
    mx.reset_peak_memory()
    mx.eval(logits_through_storage(model, layout, execution, rows, steps))
    return max(mx.get_peak_memory() - before_bytes, 0) // len(tokens)


def install_patches(model: Module, layout: Layout, adapters: RowAdapters) -> OutputHead:
    """Put our adapters, attention and output head into a model. Raises whatever the model
    raises.
    """
    adapters.install()
    install_attention(model)
    return install_output_head(model, layout.vocab_size)


@contextmanager
def _sparse_early(model: Module) -> Iterator[None]:
    """Within the context sparse attention begins so early that the check covers it."""
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


def tolerance(layout: Layout, in_half: float = _HALF_TOLERANCE) -> float:
    """The largest error of a correct model's logits, relative to their size; `in_half` is that of a
    model in half precision, or with K and V in another format than it computes them in.
    """
    if {*layout.dtypes, layout.logits_dtype} != {mx.float32} or not layout.is_stored_in_full:
        return in_half
    return _CPU_TOLERANCE if mx.default_device() == mx.cpu else GPU_TOLERANCE


def deviation(found: mx.array, expected: mx.array) -> float:
    """The largest error of a row of logits `[rows, vocabulary]`, relative to the row's size. Tokens
    whose expected logit is not finite do not count.
    """
    finite = mx.isfinite(expected)
    expected = mx.where(finite, expected, 0)
    error = mx.where(finite, found.astype(mx.float32), 0) - expected
    relative = mx.linalg.norm(error, axis=-1) / mx.linalg.norm(expected, axis=-1)
    return float(relative.max())


def _rows(layout: Layout, adapters: Sequence[str]) -> list[Row]:
    """The rows, which take turns at no adapter and each of `adapters`. The first row is longer than
    all windows that are checked.
    """
    lengths = [sum(column) for column in zip(*_STEPS, strict=True)]
    lengths[0] += longer_by(layout, mx.default_device())
    n_tokens = min(layout.vocab_size, 1000)
    tokens = [[(37 * i + 11 * row) % n_tokens for i in range(n)] for row, n in enumerate(lengths)]
    return list(map(Row, tokens, cycle((NO_ADAPTER, *adapters))))


def longer_by(layout: Layout, device: mx.Device) -> int:
    """The tokens that the first row has in addition to `_STEPS`, all in its first chunk."""
    if device == mx.cpu:
        longest, least = _CPU_WINDOW_TOKENS, 0
    else:
        longest, least = _GPU_WINDOW_TOKENS, _GPU_CHUNK_TOKENS
    return max([least, *(window for window in layout.windows if window <= longest)])


def _steps(rows: Sequence[Row]) -> list[list[Chunk]]:
    """The chunks of each step: `_STEPS`, with a first chunk as long as the first row needs."""
    longer = len(rows[0].tokens) - sum(step[0] for step in _STEPS)
    starts = [0] * len(rows)
    steps = []
    for index, step in enumerate(_STEPS):
        chunks = []
        for row, n_tokens in enumerate(step):
            stop = starts[row] + n_tokens + (longer if index == row == 0 else 0)
            if stop > starts[row]:
                n_read = int((index, row) != (_UNREAD_STEP, _UNREAD_ROW))
                chunks.append(Chunk(row, starts[row], stop, n_read))
            starts[row] = stop
        steps.append(chunks)
    return steps


def storage_sizes(layout: Layout, rows: Sequence[Row]) -> StorageSizes:
    """Storage for all rows at once. No state is saved; if they are rounded, after every chunk."""
    longest = len(rows[0].tokens)
    states = None
    if layout.states:
        states = StateCounts(len(rows), 0, 1 if layout.rounds_states else None)
    return StorageSizes(
        n_blocks=sum(blocks_for(len(row.tokens), BLOCK_SIZE) for row in rows),
        windows=tuple(
            WindowSize(window, len(rows) * lease_slots(window, BLOCK_SIZE, longest))
            for window in layout.windows
        ),
        states=states,
    )


def own_logits(
    model: Module,
    adapters: RowAdapters,
    rows: Sequence[Row],
    steps: Sequence[Sequence[Chunk]],
) -> mx.array:
    """The logits that are read, chunk by chunk, through the model's own layers and caches: float32
    `[logits, vocabulary]`.

    Each row is one chunk: there are models in mlx-lm that compute a second chunk of several tokens
    otherwise, such as plamo3 in its windows.
    """
    chunks = [chunk for step in steps for chunk in step]
    found = dict[tuple[int, int], mx.array]()
    for index, row in enumerate(rows):
        with adapters.by_mlx_lm(model, row.adapter):
            logits = model(mx.array([row.tokens]), cache=make_prompt_cache(model))[0]
        positions = [at for chunk in chunks if chunk.row == index for at in chunk.read]
        own = logits[mx.array(positions)].astype(mx.float32)
        mx.eval(own)
        found.update(((index, at), of_one) for at, of_one in zip(positions, own, strict=True))
    return mx.stack([found[chunk.row, at] for chunk in chunks for at in chunk.read])


def logits_through_storage(
    model: Module,
    layout: Layout,
    execution: Execution,
    rows: Sequence[Row],
    steps: Sequence[Sequence[Chunk]],
) -> mx.array:
    """The logits that `own_logits` returns, computed through shared storage."""
    longest = len(rows[0].tokens)
    layout = layout.within(longest).in_blocks_of(BLOCK_SIZE)
    sizes = storage_sizes(layout, rows)
    storage = Storage(layout, sizes, BLOCK_SIZE)
    groups = build_groups(sizes, BLOCK_SIZE, longest)
    store = KVStore(BlockPool(sizes.n_blocks), None, BLOCK_SIZE, groups)
    cached = CachedModel(model, layout, storage, execution)
    leases = list[Lease]()
    for row in rows:
        lease = store.admit(Namespace(), Tokens(row.tokens))
        assert isinstance(lease, Lease), "the check's storage is too small"
        leases.append(lease)
    tables = [SequenceTables(cached.n_groups, row.adapter, row.images) for row in rows]
    found = list[mx.array]()
    for chunks in steps:
        spans, token_ids = list[TokenSpan](), list[int]()
        for index, chunk in enumerate(chunks):
            lease, table, n_tokens = leases[chunk.row], tables[chunk.row], chunk.stop - chunk.start
            assert store.plan(lease, n_tokens) is None, "the check's storage is too small"
            for patch in lease.take_patches():
                table.patch(patch)
            spans.append(
                TokenSpan.of(table, chunk.start, n_tokens, index, len(token_ids), chunk.n_read)
            )
            token_ids += rows[chunk.row].tokens[chunk.start : chunk.stop]
        ops = store.take_ops()
        for copied in storage.execute(_at(ops, When.FIRST)):
            mx.eval(copied)
        forwards = cached.arrange(spans, _UNBOUNDED)
        logits = dict[int, mx.array]()
        for batch in (*forwards.prompts, *forwards.sampling):
            computed = cached.forward(batch, mx.array(token_ids))
            read = [span for span in batch.spans if span.n_read]
            mx.eval(computed.logits if read else [], storage.arrays())
            first = 0
            for span in read:
                logits[span.index] = computed.logits[first : first + span.n_read]
                first += span.n_read
        storage.execute(_at(ops, When.LAST))
        found += [logits[index] for index, chunk in enumerate(chunks) if chunk.n_read]
        for chunk in chunks:
            store.commit(leases[chunk.row], chunk.stop - chunk.start)
    return mx.concatenate(found)


def _at(ops: Iterable[StepOp], phase: When) -> Iterator[StorageOp]:
    """What changes the storage in a phase of a step. There are no decodes of a prompt's last token
    here, so nothing happens between prefills and decodes.
    """
    return (op for when, op in ops if when is phase and not isinstance(op, ReadBlock))
