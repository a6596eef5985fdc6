"""The arena: every block's K and V in every layer, as MLX arrays allocated once.

Layout per layer, K and V each: `[blocks, kv_heads, block_size, dim]`. One block of one layer is one
contiguous run of memory, so a copy is a single memcpy and the plane viewed as `[blocks * kv_heads,
block_size, dim]` can be read block by block without moving it. It is kept as the vectors that a
slot mapping indexes, `[blocks * kv_heads * block_size, dim]`, V's after K's where both are of one
size. The layout is this file's secret and was chosen by measurement (`load_tests/bench/arena.py`).

MLX writes into an array in place only while nobody else refers to it. Every operation below
therefore rebinds its array at once and hands out no second reference that outlives a step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

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
    def heads(self) -> "Heads":
        """K and V share a plane where they are vectors of one size and dtype."""
        keys, values = (self.key_dim, self.key_dtype), (self.value_dim, self.value_dtype)
        return Heads(self.kv_heads, self.key_dim > 0 and keys == values)

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


Place = TypeVar("Place", int, mx.array)


class Heads(NamedTuple):
    """What index arrays depend on: layers of equal heads share them."""

    kv_heads: int
    share_plane: bool


class LayerArena:
    """K and V of one layer.

    `planes` are the arrays that hold them, as the vectors that a slot mapping indexes. Where K and
    V are alike they share one plane, K's vectors before V's: one operation then writes both, and
    another reads both. Else each has its own.
    """

    __slots__ = ("_is_checked", "block_size", "heads", "n_heads", "planes", "shape")

    def __init__(self, shape: LayerShape, allocated_blocks: int, block_size: int) -> None:
        self.shape = shape
        self.heads = shape.heads
        self.block_size = block_size
        self.n_heads = allocated_blocks * shape.kv_heads  # of all blocks together
        self._is_checked = False  # what the model writes: it is of one shape
        vectors = self.n_heads * block_size
        self.planes: tuple[mx.array, ...] = (
            (mx.zeros((2 * vectors, shape.key_dim), shape.key_dtype),)
            if self.heads.share_plane
            else (
                mx.zeros((vectors, shape.key_dim), shape.key_dtype),
                mx.zeros((vectors, shape.value_dim), shape.value_dtype),
            )
        )

    @property
    def values_at(self) -> int:
        """How many heads of K lie before those of V, in the plane of V."""
        return self.n_heads if self.heads.share_plane else 0

    def write(self, slot_mapping: mx.array, keys: mx.array, values: mx.array) -> None:
        """Write new tokens' K and V to the slots of `slot_mapping`.

        `slot_mapping`: `Arena.slot_mapping` for a layer of this shape. `keys`: `[rows, kv_heads,
        length, key_dim]`, `values` the same with value_dim, each in its dtype.

        Raises ArenaError on any other shape or dtype, until the first that is right.
        """
        if not self._is_checked:
            self._check_shapes(slot_mapping, keys, values)
        vectors = _vectors(keys), _vectors(values)
        if self.heads.share_plane:
            self.planes = (_put(self.planes[0], slot_mapping, mx.concatenate(list(vectors))),)
        else:
            self.planes = tuple(map(_put, self.planes, (slot_mapping, slot_mapping), vectors))

    def read(self, heads: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        """K and V of a padded block table, gathered into contiguous arrays.

        `heads`: `Arena.gather_ids` for a layer of this shape. Returns `[rows, kv_heads, blocks *
        block_size, dim]` for K and for V.
        """
        keys, values = heads
        return self._gather(self.planes[0], keys), self._gather(self.planes[-1], values)

    def key_blocks(self) -> mx.array:
        """Blocks of one head each, `[heads, block_size, key_dim]`, to be read within this step."""
        return self.planes[0].reshape(-1, self.block_size, self.shape.key_dim)

    def value_blocks(self) -> mx.array:
        """As `key_blocks`; those of V begin at `values_at`."""
        return self.planes[-1].reshape(-1, self.block_size, self.shape.value_dim)

    def blocks(self, ids: mx.array) -> tuple[mx.array, mx.array]:
        """Copies of whole blocks, K and V, `[ids, kv_heads, block_size, dim]`."""
        if self.heads.share_plane:
            both = self._by_block(self.planes[0], 2)[:, ids]
            return both[0], both[1]
        keys, values = (self._by_block(plane, 1)[0, ids] for plane in self.planes)
        return keys, values

    def clear(self, slot_mapping: mx.array) -> None:
        """Zero K and V in the slots of a mapping that `Arena.slot_mapping` made."""
        self.planes = tuple(
            _put(plane, slot_mapping, mx.zeros((1, 1), plane.dtype)) for plane in self.planes
        )

    def put_blocks(self, first: int, keys: mx.array, values: mx.array) -> None:
        """Overwrite whole blocks, as many as there are in what `blocks` returned, from `first` on.

        A slice is moved by memcpy; a scatter to any blocks goes from number to number.
        """
        start = first * self.shape.kv_heads * self.block_size
        value_start = start + self.values_at * self.block_size
        for plane, at, new in (
            (self.planes[0], start, keys),
            (self.planes[-1], value_start, values),
        ):
            if new.size:
                vectors = new.reshape(-1, new.shape[-1])
                plane[at : at + len(vectors)] = vectors

    def fences(self) -> list[mx.array]:
        """One number of each plane. Evaluating them completes all writes made so far.

        Unlike the planes they may be evaluated, and kept, while steps are in flight: MLX copies a
        plane at its next write when it has been evaluated itself and is still being computed.
        """
        # The sum is a new array: without it MLX would keep a view, and with it the plane.
        return [plane[:1, :1] + 0 for plane in self.planes if plane.size]

    def grow(self, allocated_blocks: int) -> None:
        """Let the planes hold `allocated_blocks` blocks. What they hold keeps its place."""
        n_heads = allocated_blocks * self.shape.kv_heads
        added = (n_heads - self.n_heads) * self.block_size
        parts = 2 if self.heads.share_plane else 1
        self.planes = tuple(
            mx.pad(plane.reshape(parts, -1, dim), [(0, 0), (0, added), (0, 0)]).reshape(-1, dim)
            if (dim := plane.shape[1])
            else mx.zeros((n_heads * self.block_size, 0), plane.dtype)
            for plane in self.planes
        )
        mx.eval(self.planes)
        self.n_heads = n_heads

    def _check_shapes(self, slot_mapping: mx.array, keys: mx.array, values: mx.array) -> None:
        shape = self.shape
        tokens = len(slot_mapping) // (shape.kv_heads * (1 + self.heads.share_plane))
        _check_shape(keys, shape.kv_heads, shape.key_dim, shape.key_dtype, tokens)
        _check_shape(values, shape.kv_heads, shape.value_dim, shape.value_dtype, tokens)
        self._is_checked = True

    def _gather(self, plane: mx.array, heads: mx.array) -> mx.array:
        rows, kv_heads, blocks = heads.shape
        dim = plane.shape[1]
        if dim == 0:
            return mx.zeros((rows, kv_heads, blocks * self.block_size, 0), plane.dtype)
        # In two dimensions each index moves one contiguous run: one memcpy per block and head.
        runs = plane.reshape(-1, self.block_size * dim)[heads]
        return runs.reshape(rows, kv_heads, blocks * self.block_size, dim)

    def _by_block(self, plane: mx.array, parts: int) -> mx.array:
        kv_heads, dim = self.shape.kv_heads, plane.shape[1]
        return plane.reshape(parts, self.n_heads // kv_heads, kv_heads, self.block_size, dim)


def _check_shape(new: mx.array, kv_heads: int, dim: int, dtype: mx.Dtype, tokens: int) -> None:
    shape = new.shape
    if new.ndim != 4 or shape[1] != kv_heads or shape[3] != dim:
        raise ArenaError(f"this layer holds [rows, {kv_heads}, length, {dim}], got {list(shape)}")
    if new.dtype != dtype:
        raise ArenaError(f"this layer holds {dtype}, got {new.dtype}")
    if shape[0] * shape[2] != tokens:
        raise ArenaError(f"{tokens} slots for K or V of shape {list(shape)}")


def _vectors(new: mx.array) -> mx.array:
    """`[rows, kv_heads, length, dim]` in the order of `Arena.slot_mapping`, `[slots, dim]`."""
    rows, kv_heads, length, dim = new.shape
    if length == 1:
        return new.reshape(rows * kv_heads, dim)
    return new.transpose(0, 2, 1, 3).reshape(rows * length * kv_heads, dim)


def _put(plane: mx.array, slot_mapping: mx.array, vectors: mx.array) -> mx.array:
    """The plane with `vectors` in the slots of a mapping, in place once the caller rebinds it."""
    if plane.size == 0:
        return plane
    # Twice as fast on the CPU as an assignment by block and slot.
    return mx.put_along_axis(plane, slot_mapping, vectors, axis=0)


def _where(keep: mx.array, array: mx.array) -> mx.array:
    return mx.where(keep, array, mx.zeros_like(array))


class Arena:
    """K and V of all layers for `n_blocks` blocks, and two that belong to no sequence.

    What ragged batches pad is written to `scratch`, which nobody reads, and read from `blank`,
    which nobody writes. A masked slot must hold a number: its weight is 0, and 0 x NaN is NaN.

    An arena may begin with memory for fewer blocks, `n_allocated`, and grow.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        n_blocks: int,
        block_size: int,
        first_blocks: int | None = None,
    ) -> None:
        """`first_blocks`: for how many blocks memory is taken at once; None: for all."""
        if n_blocks < 1 or block_size < 1:
            raise ArenaError(f"an arena of {n_blocks} blocks of {block_size} tokens holds nothing")
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.scratch = BlockId(n_blocks)
        self.blank = BlockId(n_blocks + 1)
        self.n_allocated = n_blocks if first_blocks is None else min(first_blocks, n_blocks)
        self._shift = 0 if self.n_allocated == n_blocks else 2
        self.layers = tuple(LayerArena(shape, self.n_allocated + 2, block_size) for shape in layers)
        mx.eval(self.planes())  # memory is taken now, not when the first request comes

    @property
    def bytes(self) -> int:
        """Bytes of the blocks that sequences can use (without the other two)."""
        shapes = [layer.shape for layer in self.layers]
        return self.n_blocks * block_bytes(shapes, self.block_size)

    def grow(self, n_blocks: int) -> None:
        """Take memory for at least `n_blocks` blocks, and for at least half as many again as there
        are, because each growth copies all of them. The layers grow one after another, so that
        memory is held twice for one layer alone. No step may be in flight.
        """
        wanted = min(max(n_blocks, self.n_allocated * 3 // 2), self.n_blocks)
        for layer in self.layers:
            layer.grow(wanted + 2)
        self.n_allocated = wanted

    def place(self, block: Place) -> Place:
        """Where blocks lie in the planes: at their ids, or in an arena that grows two later, after
        `scratch` and `blank`, whose ids are the last.
        """
        return (block + self._shift) % (self.n_blocks + 2) if self._shift else block

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
        mappings = dict[Heads, mx.array]()
        for layer in self.layers:
            heads = layer.heads
            if heads not in mappings:
                mappings[heads] = self.slot_mapping(*every, heads)
            layer.clear(mappings[heads])

    def contents(
        self, blocks: list[BlockId], n_tokens: list[int]
    ) -> list[tuple[mx.array, mx.array]]:
        """Copies of the first tokens of blocks, followed by zeros: K and V of each layer in turn.

        Both are `[blocks, kv_heads, block_size, dim]`. They refer to the arena's arrays until they
        have been evaluated. Raises ArenaError for an unknown block.
        """
        for block in blocks:
            self.check(block)
        ids = mx.array([self.place(block) for block in blocks], mx.uint32)
        found = [layer.blocks(ids) for layer in self.layers]
        if min(n_tokens, default=self.block_size) == self.block_size:
            return found
        keep = (mx.array(n_tokens)[:, None] > mx.arange(self.block_size))[:, None, :, None]
        # The remaining slots hold another sequence's numbers, which may be NaN.
        return [(_where(keep, keys), _where(keep, values)) for keys, values in found]

    def planes(self) -> list[mx.array]:
        """The layers' planes as they are now, to be evaluated at once and not kept."""
        return [plane for layer in self.layers for plane in layer.planes]

    def head_ids(self, table: mx.array, kv_heads: int) -> mx.array:
        """Where the heads of K of the blocks of a table lie, in layers of `kv_heads`.

        `table`: `[rows, blocks]`. Returns `[rows, kv_heads, blocks]`, indices into
        `LayerArena.key_blocks`.
        """
        own = mx.arange(kv_heads, dtype=table.dtype)[None, :, None]
        return self.place(table)[:, None, :] * kv_heads + own

    def gather_ids(self, table: mx.array, heads: Heads) -> tuple[mx.array, mx.array]:
        """What `LayerArena.read` takes for layers of these heads: where the heads of K lie, as
        `head_ids`, and those of V.
        """
        keys = self.head_ids(table, heads.kv_heads)
        if not heads.share_plane:
            return keys, keys
        return keys, keys + plain_number(self._n_heads(heads), keys.dtype)

    def slot_mapping(self, blocks: mx.array, slots: mx.array, heads: Heads) -> mx.array:
        """The slot of each head of token `i`, which is written to `slots[i]` of `blocks[i]`, for
        layers of these heads.

        `blocks` and `slots`: `[tokens]`. Returns int64 `[tokens * kv_heads, 1]` for
        `LayerArena.write`; where K and V share a plane, twice as many, those of V last.
        """
        own = mx.arange(heads.kv_heads, dtype=blocks.dtype)
        by_head = self.place(blocks)[:, None] * heads.kv_heads + own
        mapping = (by_head * self.block_size + slots[:, None]).reshape(-1, 1)
        mapping = mapping.astype(mx.int64)  # Metal multiplies it by the dimension in its type
        if not heads.share_plane:
            return mapping
        offset = plain_number(self._n_heads(heads) * self.block_size, mx.int64)
        return mx.concatenate([mapping, mapping + offset])

    def _n_heads(self, heads: Heads) -> int:
        return (self.n_allocated + 2) * heads.kv_heads

    def _copy_together(self, ops: Sequence[CopyBlock]) -> None:
        contents = self.contents([op.source for op in ops], [op.n_tokens for op in ops])
        # A read that is still under way holds the pool, and the write would copy all of it.
        mx.eval(contents)
        for layer, (keys, values) in zip(self.layers, contents, strict=True):
            for index, op in enumerate(ops):
                own = slice(index, index + 1)
                layer.put_blocks(self.place(op.target), keys[own], values[own])

    def check(self, block: BlockId) -> None:
        """Raises ArenaError for a block that the arena has not."""
        if not 0 <= block < self.n_blocks:
            raise ArenaError(f"block {block} is not one of the arena's {self.n_blocks}")


def plain_number(value: int, dtype: mx.Dtype) -> mx.array:
    """A number, `[1]`, that MLX does not take for a constant of a kernel: it would build another
    kernel for each size of an arena.
    """
    return mx.array([0, value], dtype)[1:]


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
