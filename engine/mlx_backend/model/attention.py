"""How queries attend to the blocks of an arena, and the attention that gathers them.

Those that read blocks in place are in packages of their own, `cpu/` and `gpu/`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import mlx.core as mx

from engine.mlx_backend.kv.arena import Arena, LayerArena
from engine.mlx_backend.kv.shape import LayerShape
from engine.mlx_backend.model.rows import BlockTable, Counts, RowGroup

KEY_READS = 4
"""A gathered key is read, written, and read again by the product."""

SHORT_TOKENS = 16
"""On a GPU, rows of up to this many tokens may read blocks in place. Of longer ones a gather costs
less: each key has so many queries that products bind, for which MLX's own attention has matrix
units.
"""


class BlockAttention(ABC):
    """Attention of a row group's queries to its blocks, prepared once for all layers."""

    @abstractmethod
    def attend(
        self,
        queries: mx.array,
        layer: LayerArena,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array | None:
        """Causal attention of `queries`, `[rows, heads, length, key_dim]`, to the keys of their
        rows; `[rows, heads, length, value_dim]` in the dtype of the queries. None: this attention
        does not cover such a layer, and the model's own computes it.

        `scale`: of the scores. `window`: a token sees itself and the `window - 1` tokens before it;
        None: all before it. `sinks`, `[heads]`: a score that adds to the sum of weights.
        """


class ListedWork(NamedTuple):
    """What an attention reads in steps that are traced, in addition to tables and positions.

    `arrays` are inputs of the trace. `sizes` and the number of rows and blocks are all that the
    trace depends on. `shared`, `[rows]`: the number of blocks at the beginning of each row's table
    that must stay those of the rows that share them.
    """

    arrays: Sequence[mx.array]
    sizes: tuple[int, ...]
    shared: Counts


PrepareDecodeRows: TypeAlias = Callable[[RowGroup, Sequence[mx.array]], BlockAttention]
"""Prepares the attention of a row group that is being traced, and of its list of work."""


class Attention:
    """How a forward's queries attend to the blocks. This is the reference, `gather`, for any
    device: all rows' blocks are gathered, padded to the longest row, for the model's own attention.

    `gathered_copies`: the largest number of copies, held at once, of the K and V that a layer
    gathers. `padding_keys`: padding rows by this many keys costs as much as one more forward.
    `in_place_tokens`: in arenas that it `covers`, rows of up to this many tokens are not padded to
    the longest, and take no memory for their keys; 0: all are gathered.
    `fallback`: computes a forward again that has failed; None: nothing does. `problem`: the failure
    for which it serves, and `fallbacks` the number of forwards and steps that have failed.
    """

    name = "gather"
    gathered_copies = 1
    in_place_tokens = 0
    fallback: "Attention | None" = None
    problem = ""
    fallbacks = 0

    def __init__(self, padding_keys: float = math.inf) -> None:
        self.padding_keys = padding_keys

    def prepare(self, group: RowGroup, window: int | None) -> BlockAttention | None:
        """Prepare causal attention of a row group over an arena of layers with this window, or of
        full attention. None: the model's own attention computes it.
        """
        return None

    def prepare_decode(
        self, rows: int, width: int, arena: Arena, window: int | None, sizes: tuple[int, ...]
    ) -> PrepareDecodeRows | None:
        """Prepare a decode step that is traced with tables of `width` blocks over such an arena, as
        far as it does not depend on the step's inputs. `sizes`: of the list of work; empty where
        there is none. None: the model's own attention computes it.
        """
        return None

    def list_work(
        self, table: BlockTable, n_blocks: Counts, arena: Arena, window: int | None
    ) -> ListedWork | None:
        """List the work of traced decode steps over an arena as in `prepare`. The list stays right
        while rows grow into `table`, `[rows, blocks]`, of which they have `n_blocks`, `[rows]`, and
        their first blocks stay. None: such steps need no list.
        """
        return None

    def partial_bytes(
        self, shape: LayerShape, query_heads: int, block_size: int, n_tokens: int, longest: int
    ) -> int:
        """The most that partial results take while attention in place computes a layer, in a
        forward of `n_tokens` tokens, padding included, whose rows have at most `longest`.
        """
        return 0

    def covers(self, arena: Arena) -> bool:
        """Whether rows of up to `in_place_tokens` tokens read all of an arena's blocks in place."""
        return False

    def give_up(self, error: Exception) -> None:
        """Attend by `fallback` from now on: it has computed a forward that had failed, or a step of
        the device has failed. Called only where there is one.
        """

    def shares_prefixes(self, table: BlockTable) -> bool:
        """Whether rows with these tables share prefixes that `prepare` attends to once for all, and
        a traced step does not.
        """
        return False


class ShortRowAttention(Attention, ABC):
    """An attention for rows of up to SHORT_TOKENS tokens: `gather` attends to longer ones."""

    def __init__(self, gather: Attention, padding_keys: float) -> None:
        super().__init__(padding_keys)
        self.gather = gather

    def prepare(self, group: RowGroup, window: int | None) -> BlockAttention | None:
        if group.length > SHORT_TOKENS:
            return self.gather.prepare(group, window)
        return self.prepare_short(group, window)

    @abstractmethod
    def prepare_short(self, group: RowGroup, window: int | None) -> BlockAttention | None:
        """Prepare attention of short rows, as `prepare` does of any."""


class RowByRowAttention(Attention):
    """`gather` for CUDA, where MLX's fused attention takes no masks that are arrays, and would have
    scores of every token and key in memory: each row of several tokens gathers its own keys alone,
    all of which its last token sees. Rows of one token are attended together, because their scores
    are few and one kernel for all costs the host less than some for each row.
    """

    def prepare(self, group: RowGroup, window: int | None) -> BlockAttention | None:
        is_ragged = window is None and group.rows > 1 and group.length > 1
        return _RowByRow(group) if is_ragged else None


class _RowByRow(BlockAttention):
    def __init__(self, group: RowGroup) -> None:
        self._group = group

    def attend(
        self,
        queries: mx.array,
        layer: LayerArena,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array | None:
        if window is not None or sinks is not None:
            return None
        group, queries = self._group, queries * scale
        ids, size = group.gather_ids(layer.heads), layer.block_size
        outputs = []
        for row, (start, stop) in enumerate(zip(group.starts_host, group.stops_host, strict=True)):
            n_keys, n_tokens = int(stop), int(stop - start)
            own_ids = [heads[row : row + 1, :, : -(-n_keys // size)] for heads in ids]
            keys, values = layer.read(own_ids)
            own = mx.fast.scaled_dot_product_attention(
                queries[row : row + 1, :, :n_tokens],
                keys[:, :, :n_keys],
                values[:, :, :n_keys],
                scale=1.0,
                mask="causal" if n_tokens > 1 else None,
            )
            padding = group.length - n_tokens
            outputs.append(mx.pad(own, [(0, 0), (0, 0), (0, padding), (0, 0)]) if padding else own)
        return mx.concatenate(outputs)


def gather_of_device(padding_keys: float = math.inf) -> Attention:
    """`gather` for this device."""
    is_cuda = mx.default_device() != mx.cpu and mx.cuda.is_available()
    return RowByRowAttention(padding_keys) if is_cuda else Attention(padding_keys)


def gathered_padding_keys(weight_bytes: int, token_bytes: int) -> float:
    """`padding_keys` of `gather` for a model of such size.

    A forward reads all weights, while a key is read, written and read again. On two cores a padded
    key took the time of 2 to 6 reads of its bytes at the speed at which a forward reads weights.
    """
    return weight_bytes / (KEY_READS * token_bytes) if token_bytes else math.inf


_LOWEST_SCORE = -87.0  # exp of it is the smallest normal float32


@partial(mx.compile, shapeless=True)
def softmax_exp(scores: mx.array) -> mx.array:
    """exp of float32 `scores` that are not positive; scores below -87 count as -87. NaN stays NaN.

    MLX fuses at least two operations, and g++ vectorizes kernels of contiguous arrays
    (`loading/compiler.py`): so exp takes a twentieth of the time that it takes alone.
    """
    return mx.exp(mx.maximum(mx.contiguous(scores), _LOWEST_SCORE))
