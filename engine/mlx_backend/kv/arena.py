"""The arena: every block's K and V in every layer, as MLX arrays allocated once.

Layout per layer, K and V each: `[blocks, kv_heads, block_size, dim]`. One block of one layer is one
contiguous run of memory, so a copy is a single memcpy and the pool viewed as
`[blocks * kv_heads, block_size, dim]` can be read block by block without moving it. It is kept as
the vectors that a slot mapping indexes, `[blocks * kv_heads * block_size, dim]`. The layout is
this file's secret and was chosen by measurement (`load_tests/bench/arena.py`).

MLX writes into an array in place only while nobody else refers to it. Every operation below
therefore rebinds its array at once and hands out no second reference that outlives a step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvstore.ops import CopyBlock
from kvstore.types import BlockId


class ArenaError(ValueError):
    """Arrays of the wrong shape or dtype, or a block id outside the arena."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps for each token: `kv_heads` vectors of K and as many of V.

    Either dimension may be 0: then there is nothing of it. K and V come each in a dtype of its own:
    where a norm's weights are float32 and the others are not, K is float32 and V is not.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    key_dtype: mx.Dtype
    value_dtype: mx.Dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V."""
        key_bytes = self.key_dim * self.key_dtype.size
        return self.kv_heads * (key_bytes + self.value_dim * self.value_dtype.size)


def token_bytes(layers: Iterable[LayerShape]) -> int:
    """Bytes that one token's K and V take in all layers together."""
    return sum(layer.token_bytes for layer in layers)


def block_bytes(layers: Iterable[LayerShape], block_size: int) -> int:
    """Bytes of one block of `block_size` tokens in all layers together."""
    return block_size * token_bytes(layers)


class LayerArena:
    """K and V of one layer."""

    __slots__ = ("_keys", "_values", "block_size", "shape")

    def __init__(self, shape: LayerShape, allocated_blocks: int, block_size: int) -> None:
        self.shape = shape
        self.block_size = block_size
        vectors = allocated_blocks * shape.kv_heads * block_size
        self._keys = mx.zeros((vectors, shape.key_dim), shape.key_dtype)
        self._values = mx.zeros((vectors, shape.value_dim), shape.value_dtype)

    def write(self, slot_mapping: mx.array, keys: mx.array, values: mx.array) -> None:
        """Write new tokens' K and V to the slots of `slot_mapping`.

        `slot_mapping`: `Arena.slot_mapping` for this layer's kv_heads, `[rows * length * kv_heads,
        1]`. `keys`: `[rows, kv_heads, length, key_dim]`, `values` the same with value_dim, each in
        its dtype.

        Raises ArenaError on any other shape or dtype.
        """
        self._check(keys, self._keys, slot_mapping.size)
        self._check(values, self._values, slot_mapping.size)
        self._keys = _put(self._keys, slot_mapping, _vectors(keys))
        self._values = _put(self._values, slot_mapping, _vectors(values))

    def read(self, heads: mx.array) -> tuple[mx.array, mx.array]:
        """K and V of a padded block table, gathered into contiguous arrays.

        `heads`: `head_ids` of the table, `[rows, kv_heads, blocks]`. Returns `[rows, kv_heads,
        blocks * block_size, dim]` for K and for V.
        """
        return self._gather(self._keys, heads), self._gather(self._values, heads)

    def key_blocks(self) -> mx.array:
        """K as `[blocks * kv_heads, block_size, key_dim]`, to be read within this step."""
        return self._keys.reshape(-1, self.block_size, self.shape.key_dim)

    def value_blocks(self) -> mx.array:
        """V as `[blocks * kv_heads, block_size, value_dim]`, likewise."""
        return self._values.reshape(-1, self.block_size, self.shape.value_dim)

    def blocks(self, ids: mx.array) -> tuple[mx.array, mx.array]:
        """Copies of whole blocks, K and V, `[ids, kv_heads, block_size, dim]`."""
        return self._by_block(self._keys)[ids], self._by_block(self._values)[ids]

    def clear(self, slot_mapping: mx.array) -> None:
        """Zero K and V in the slots of a mapping that `Arena.slot_mapping` made."""
        self._keys = _put(self._keys, slot_mapping, mx.zeros((1, 1), self._keys.dtype))
        self._values = _put(self._values, slot_mapping, mx.zeros((1, 1), self._values.dtype))

    def put_blocks(self, first: int, keys: mx.array, values: mx.array) -> None:
        """Overwrite whole blocks, as many as there are in what `blocks` returned, from `first` on.

        A slice is moved by memcpy; a scatter to any blocks goes from number to number.
        """
        vectors = self.shape.kv_heads * self.block_size
        put = slice(first * vectors, (first + len(keys)) * vectors)
        if keys.size:
            self._keys[put] = keys.reshape(-1, self.shape.key_dim)
        if values.size:
            self._values[put] = values.reshape(-1, self.shape.value_dim)

    def arrays(self) -> tuple[mx.array, mx.array]:
        return self._keys, self._values

    def put_arrays(self, arrays: Sequence[mx.array]) -> None:
        """Hold these in place of what `arrays` gives."""
        self._keys, self._values = arrays

    def fences(self) -> list[mx.array]:
        """One number of each pool. Evaluating them completes all writes made so far.

        Unlike the pools they may be evaluated, and kept, while steps are in flight: MLX copies a
        pool at its next write when it has been evaluated itself and is still being computed.
        """
        # The sum is a new array: without it MLX would keep a view, and with it the pool.
        return [pool[:1, :1] + 0 for pool in (self._keys, self._values) if pool.size]

    def _check(self, new: mx.array, pool: mx.array, n_slots: int) -> None:
        kv_heads, dim = self.shape.kv_heads, pool.shape[1]
        if new.ndim != 4 or new.shape[1] != kv_heads or new.shape[3] != dim:
            raise ArenaError(
                f"this layer holds [rows, {kv_heads}, length, {dim}], got {list(new.shape)}"
            )
        if new.dtype != pool.dtype:
            raise ArenaError(f"this layer holds {pool.dtype}, got {new.dtype}")
        if new.size != n_slots * dim:
            raise ArenaError(f"{n_slots} slots for K or V of shape {list(new.shape)}")

    def _gather(self, pool: mx.array, heads: mx.array) -> mx.array:
        rows, kv_heads, blocks = heads.shape
        dim = pool.shape[1]
        if dim == 0:
            return mx.zeros((rows, kv_heads, blocks * self.block_size, 0), pool.dtype)
        # In two dimensions each index moves one contiguous run: one memcpy per block and head.
        runs = pool.reshape(-1, self.block_size * dim)[heads]
        return runs.reshape(rows, kv_heads, blocks * self.block_size, dim)

    def _by_block(self, pool: mx.array) -> mx.array:
        n_blocks = pool.shape[0] // (self.shape.kv_heads * self.block_size)
        return pool.reshape(n_blocks, self.shape.kv_heads, self.block_size, pool.shape[1])


def _vectors(new: mx.array) -> mx.array:
    """`[rows, kv_heads, length, dim]` in the order of `Arena.slot_mapping`, `[slots, dim]`."""
    rows, kv_heads, length, dim = new.shape
    if length == 1:
        return new.reshape(rows * kv_heads, dim)
    return new.transpose(0, 2, 1, 3).reshape(rows * length * kv_heads, dim)


def _put(pool: mx.array, slot_mapping: mx.array, vectors: mx.array) -> mx.array:
    """The pool with `vectors` in the slots of a mapping, in place once the caller rebinds it."""
    if pool.size == 0:
        return pool
    # Twice as fast on the CPU as an assignment by block and slot.
    return mx.put_along_axis(pool, slot_mapping, vectors, axis=0)


def _where(keep: mx.array, array: mx.array) -> mx.array:
    return mx.where(keep, array, mx.zeros_like(array))


class Arena:
    """K and V of all layers for `n_blocks` blocks, and two that belong to no sequence.

    What ragged batches pad is written to `scratch`, which nobody reads, and read from `blank`,
    which nobody writes. A masked slot must hold a number: its weight is 0, and 0 x NaN is NaN.
    """

    def __init__(self, layers: Sequence[LayerShape], n_blocks: int, block_size: int) -> None:
        if n_blocks < 1 or block_size < 1:
            raise ArenaError(f"an arena of {n_blocks} blocks of {block_size} tokens holds nothing")
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.scratch = BlockId(n_blocks)
        self.blank = BlockId(n_blocks + 1)
        self.layers = tuple(LayerArena(shape, n_blocks + 2, block_size) for shape in layers)
        mx.eval(self.arrays())  # memory is taken now, not when the first request comes

    @property
    def bytes(self) -> int:
        """Bytes of the blocks that sequences can use (without the other two)."""
        shapes = [layer.shape for layer in self.layers]
        return self.n_blocks * block_bytes(shapes, self.block_size)

    def copy(self, ops: Iterable[CopyBlock]) -> None:
        """Execute the ops as if one after another.

        Raises ArenaError, before anything is copied, when an op names an unknown block.
        """
        batches = independent_copies(ops)
        for op in (op for batch in batches for op in batch):
            self.check(op.source)
            self.check(op.target)
        for batch in batches:
            self._copy_together(batch)

    def clear(self, blocks: mx.array) -> None:
        """Zero whole blocks, `[blocks]`."""
        slots = mx.arange(self.block_size, dtype=blocks.dtype)
        every = mx.repeat(blocks, self.block_size), mx.tile(slots, [len(blocks)])
        mappings = dict[int, mx.array]()
        for layer in self.layers:
            heads = layer.shape.kv_heads
            if heads not in mappings:
                mappings[heads] = self.slot_mapping(*every, heads)
            layer.clear(mappings[heads])

    def contents(
        self, blocks: list[BlockId], n_tokens: list[int]
    ) -> list[tuple[mx.array, mx.array]]:
        """Copies of the first tokens of blocks, zeros behind them: K and V of each layer in turn.

        Both are `[blocks, kv_heads, block_size, dim]`. They refer to the arena's arrays until they
        have been evaluated. Raises ArenaError for an unknown block.
        """
        for block in blocks:
            self.check(block)
        ids = mx.array(blocks, mx.uint32)
        found = [layer.blocks(ids) for layer in self.layers]
        if min(n_tokens, default=self.block_size) == self.block_size:
            return found
        keep = (mx.array(n_tokens)[:, None] > mx.arange(self.block_size))[:, None, :, None]
        # What lies behind is another's, and may be NaN.
        return [(_where(keep, keys), _where(keep, values)) for keys, values in found]

    def arrays(self) -> list[mx.array]:
        """The arrays as they are now, to be evaluated at once and not kept."""
        return [array for layer in self.layers for array in layer.arrays()]

    def head_ids(self, table: mx.array, kv_heads: int) -> mx.array:
        """Where the heads of the blocks of a table lie.

        `table`: `[rows, blocks]`. Returns `[rows, kv_heads, blocks]`, indices into
        `LayerArena.key_blocks`; one array serves all layers with that many heads.
        """
        return table[:, None, :] * kv_heads + mx.arange(kv_heads, dtype=table.dtype)[None, :, None]

    def slot_mapping(self, blocks: mx.array, slots: mx.array, kv_heads: int) -> mx.array:
        """The slot of each head of token `i`, which is written to `slots[i]` of `blocks[i]`.

        `blocks` and `slots`: `[tokens]`. Returns int64 `[tokens * kv_heads, 1]` for
        `LayerArena.write`; one array serves K and V of all layers with that many heads.
        """
        heads = blocks[:, None] * kv_heads + mx.arange(kv_heads, dtype=blocks.dtype)
        mapping = (heads * self.block_size + slots[:, None]).reshape(-1, 1)
        return mapping.astype(mx.int64)  # Metal's kernel multiplies it by the dimension in its type

    def _copy_together(self, ops: Sequence[CopyBlock]) -> None:
        contents = self.contents([op.source for op in ops], [op.n_tokens for op in ops])
        # A read that is still under way holds the pool, and the write would copy all of it.
        mx.eval(contents)
        for layer, (keys, values) in zip(self.layers, contents, strict=True):
            for index, op in enumerate(ops):
                own = slice(index, index + 1)
                layer.put_blocks(op.target, keys[own], values[own])

    def check(self, block: BlockId) -> None:
        """Raises ArenaError for a block that the arena has not."""
        if not 0 <= block < self.n_blocks:
            raise ArenaError(f"block {block} is not one of the arena's {self.n_blocks}")


def independent_copies(ops: Iterable[CopyBlock]) -> list[list[CopyBlock]]:
    """Split ops into runs that may each read all sources before writing any target.

    A run ends where an op reads or writes a block that the run has already written.
    """
    batches: list[list[CopyBlock]] = []
    written: set[BlockId] = set()
    for op in ops:
        if not batches or op.source in written or op.target in written:
            batches.append([])
            written = set()
        batches[-1].append(op)
        written.add(op.target)
    return batches
