"""The arena: K and V of every block in every layer, as MLX arrays that are allocated once.

A layer's K, and its V, is one plane of numbers, or several if it is quantized (`formats.py`). A
plane has the layout `[blocks, kv_heads, block_size, width]`, chosen by measurement (`rootstock
doctor --measure` compares it with another). One head of a block is one contiguous run of memory: a
copy is a memcpy, and attention can read it block by block as `[blocks * kv_heads, block_size,
width]` without moving it. The array itself is kept as `[blocks * kv_heads * block_size, width]`,
one vector a slot; codes of K by channel are each block's channels, one after another. Only this
module and `StoredBlocks` know this layout.

MLX writes into an array in place only while nobody else refers to it. So every operation here
rebinds its array at once, and returns no second reference that outlives a step.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import mlx.core as mx

from engine.mlx_backend.kv.formats import Codec
from engine.mlx_backend.kv.shape import Heads, LayerShape, SlotMapping, StoredBlocks, block_bytes
from kvstore.ops import CopyBlock
from kvstore.types import BlockId

Place = TypeVar("Place", int, mx.array)


class ArenaError(ValueError):
    """Arrays of the wrong shape or dtype, or a block id outside the arena."""


class LayerArena:
    """K and V of one layer.

    `planes` are the arrays that hold them, as vectors that a slot mapping indexes: those of K, and
    then those of V. Where K and V are alike they share their planes, all of K before all of V: one
    operation then writes or reads both. `codecs`: how K, and V, is stored; None: as the model
    computes it. `query_heads`: of the queries that attended to it last; 0: none have yet.
    `block_size`: the vectors of one head in a block.
    """

    __slots__ = (
        "_is_checked",
        "_is_rotated",
        "_n_planes",
        "block_size",
        "codecs",
        "heads",
        "n_heads",
        "planes",
        "query_heads",
        "shape",
    )

    def __init__(self, shape: LayerShape, allocated_blocks: int, block_size: int) -> None:
        self.shape = shape
        self.heads = shape.heads
        self.block_size = block_size
        self.n_heads = allocated_blocks * shape.kv_heads  # of all blocks together
        self.codecs = [None if codec.is_plain else codec for codec in shape.codecs]
        self._n_planes = [len(codec.planes) for codec in shape.codecs]  # of K and of V
        self._is_rotated = shape.is_rotated
        self.query_heads = 0
        self._is_checked = False  # whether the model has written arrays of the right shape
        self.planes: tuple[mx.array, ...] = ()
        self.allocate()

    def allocate(self) -> None:
        """Make planes of zeros in place of those that there are."""
        n_slots, parts = self.n_heads * self.block_size, self.shape.parts
        if self.heads.share_plane:
            n_slots, parts = 2 * n_slots, self.shape.codecs[0].planes
        self.planes = tuple(mx.zeros((n_slots, *part.shape), part.dtype) for part in parts)

    @property
    def values_at(self) -> int:
        """The number of heads of K that precede those of V in V's planes."""
        return self.n_heads if self.heads.share_plane else 0

    def write(self, slots: SlotMapping, keys: mx.array, values: mx.array) -> None:
        """Encode new tokens' K and V, and write them to `slots`.

        `slots`: `Arena.slot_mapping` for a layer of this shape. `keys`: `[rows, kv_heads,
        length, key_dim]`, `values` the same with value_dim, each in its dtype.

        Raises ArenaError on any other shape or dtype, until the first that is right.
        """
        if not self._is_checked:
            self._check(slots, keys, values)
        new_keys, new_values = self.rotated(_by_slot(keys)), _by_slot(values)
        of_keys, of_values = self.codecs
        if self.heads.share_plane:
            rows = _encoded(of_keys, mx.concatenate([new_keys, new_values]))
        else:
            rows = [*_encoded(of_keys, new_keys), *_encoded(of_values, new_values)]
        self._put(slots, rows)

    def read(self, heads: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        """K and V of a padded block table, gathered into contiguous arrays and decoded.

        `heads`: `Arena.gather_ids` for a layer of this shape. Returns `[rows, kv_heads, blocks *
        block_size, dim]` for K and for V. K is as stored: see `rotated`.
        """
        (of_keys, of_values), (keys, values) = self.codecs, heads
        key_rows = [self._gather(plane, keys) for plane in self.key_planes]
        if channels := self.heads.key_channels:
            by_channel = key_rows[0].reshape(*keys.shape, channels, self.block_size)
            key_rows[0] = by_channel.swapaxes(-1, -2).reshape(key_rows[0].shape)
        return (
            _decoded(of_keys, key_rows),
            _decoded(of_values, [self._gather(plane, values) for plane in self.value_planes]),
        )

    def rotated(self, vectors: mx.array) -> mx.array:
        """Queries, `[..., key_dim]`, as they meet stored keys, and keys as they are stored. Twice
        rotated they are as before.
        """
        return mx.hadamard_transform(vectors) if self._is_rotated else vectors

    def key_blocks(self, heads: mx.array) -> StoredBlocks:
        """Blocks of K of one head each, to be read within this step.

        `heads`: indices that `Arena.head_ids` made, of any shape.
        """
        return StoredBlocks(self.key_planes, self.block_size, heads)

    def value_blocks(self, heads: mx.array) -> StoredBlocks:
        """Blocks of V, as `key_blocks` returns those of K; `heads`: from `Arena.value_heads`."""
        return StoredBlocks(self.value_planes, self.block_size, heads)

    def blocks(self, ids: mx.array, kept: mx.array | None = None) -> list[mx.array]:
        """Copies of whole blocks as they are stored, `[ids, kv_heads, block_size, width]` of each
        plane of K, and then of each plane of V.

        `kept`: boolean `[ids, block_size]`, the slots whose contents are wanted; the others are
        zero in the copies. None: all.
        """
        kv_heads, size = self.shape.kv_heads, self.block_size
        sizes = self.n_heads // kv_heads, kv_heads, size
        found = [self._parts(plane, *sizes)[:, ids] for plane in self.planes]
        copies = [parts[of] for of in range(1 + self.heads.share_plane) for parts in found]
        if kept is None:
            return copies
        channels = self.heads.key_channels
        return [
            _kept(copy.reshape(*copy.shape[:2], channels, size), kept[:, None, None]).reshape(
                copy.shape
            )
            if channels and not index
            else _kept(copy, kept[:, None, :, None])
            for index, copy in enumerate(copies)
        ]

    def clear(self, slots: SlotMapping) -> None:
        """Zero K and V in slots that `Arena.slot_mapping` made."""
        self._put(slots, [mx.zeros((1, 1), plane.dtype) for plane in self.planes])

    def put_blocks(self, first: int, *contents: mx.array) -> None:
        """Overwrite consecutive blocks, from the place `first` on, with what `blocks` returned.

        Consecutive blocks are a slice, which MLX moves by memcpy. A scatter to scattered blocks
        goes number by number.
        """
        start = first * self.shape.kv_heads * self.block_size
        value_start = start + self.values_at * self.block_size
        places = [(plane, start) for plane in self.key_planes]
        places += [(plane, value_start) for plane in self.value_planes]
        for (plane, at), new in zip(places, contents, strict=True):
            if new.size:
                rows = new.reshape(-1, new.shape[-1])
                plane[at : at + len(rows)] = rows

    def fences(self) -> list[mx.array]:
        """One number of each plane. Evaluating them completes all writes made so far.

        Unlike the planes they may be evaluated, and kept, while steps are in flight: MLX copies a
        plane at its next write when it has been evaluated itself and is still being computed.
        """
        # The sum is a new array: without it MLX would keep a view, and with it the plane.
        return [plane[:1, :1] + 0 for plane in self.planes if plane.size]

    def resize(self, allocated_blocks: int) -> None:
        """Let the planes hold `allocated_blocks` blocks. Those that stay keep their contents."""
        n_heads = allocated_blocks * self.shape.kv_heads
        old_slots, n_slots = self.n_heads * self.block_size, n_heads * self.block_size
        added = [(0, 0), (0, max(n_slots - old_slots, 0)), (0, 0)]
        kept = (self._parts(plane, old_slots)[:, :n_slots] for plane in self.planes)
        sized = (mx.contiguous(mx.pad(parts, added)) for parts in kept)
        self.planes = tuple(parts.reshape(len(parts) * n_slots, parts.shape[2]) for parts in sized)
        mx.eval(self.planes)
        self.n_heads = n_heads

    def runs(self, first: int, n_blocks: int) -> Iterator[tuple[mx.array, int, int]]:
        """Where the planes have blocks, from the place `first` on: plane, first row, and rows."""
        per_block = self.shape.kv_heads * self.block_size
        for plane in self.planes:
            for at in {0, self.values_at * self.block_size}:
                yield plane, first * per_block + at, n_blocks * per_block

    @property
    def key_planes(self) -> tuple[mx.array, ...]:
        """The planes of K as they are now, to be read within this step."""
        return self.planes[: self._n_planes[0]]

    @property
    def value_planes(self) -> tuple[mx.array, ...]:
        """The planes of V, as `key_planes` are those of K."""
        return self.planes[-self._n_planes[1] :]

    def _put(self, slots: SlotMapping, rows: Sequence[mx.array]) -> None:
        """Write each plane's rows to their slots."""
        planes = zip(self.planes, rows, strict=True)
        self.planes = tuple(
            _put(plane, slots.rows, new)
            if index or slots.codes is None
            else _put(plane.reshape(-1, 1), slots.codes, new.reshape(-1, 1)).reshape(plane.shape)
            for index, (plane, new) in enumerate(planes)
        )

    def _check(self, slots: SlotMapping, keys: mx.array, values: mx.array) -> None:
        kv_heads = self.shape.kv_heads
        n_tokens = len(slots.rows) // (kv_heads * (1 + self.heads.share_plane))
        for new, (dim, dtype) in zip((keys, values), self.shape.vectors, strict=True):
            shape = new.shape
            is_right = len(shape) == 4 and (shape[1], shape[3], new.dtype) == (kv_heads, dim, dtype)
            if not is_right or shape[0] * shape[2] != n_tokens:
                raise ArenaError(
                    f"this layer holds {dtype} [rows, {kv_heads}, length, {dim}], here of "
                    f"{n_tokens} tokens, and the model writes {new.dtype} {list(shape)}"
                )
        self._is_checked = True

    def _gather(self, plane: mx.array, heads: mx.array) -> mx.array:
        rows, kv_heads, blocks = heads.shape
        width = plane.shape[1]
        if width == 0:
            return mx.zeros((rows, kv_heads, blocks * self.block_size, 0), plane.dtype)
        # In two dimensions each index moves one contiguous run: one memcpy per block and head.
        runs = plane.reshape(-1, self.block_size * width)[heads]
        return runs.reshape(rows, kv_heads, blocks * self.block_size, width)

    def _parts(self, plane: mx.array, *sizes: int) -> mx.array:
        """The plane as `[parts, *sizes, width]`: K and V where both are in it, else one part."""
        return plane.reshape(1 + self.heads.share_plane, *sizes, plane.shape[1])


def _encoded(codec: Codec | None, vectors: mx.array) -> list[mx.array]:
    """The rows of vectors in each plane."""
    return [vectors] if codec is None else codec.encode(vectors)


def _decoded(codec: Codec | None, rows: list[mx.array]) -> mx.array:
    """The vectors with these rows in each plane."""
    return rows[0] if codec is None else codec.decode(rows)


def _kept(copies: mx.array, kept: mx.array) -> mx.array:
    # What is not kept is another sequence's, and may be NaN.
    return mx.where(kept, copies, mx.zeros_like(copies))


def _by_slot(new: mx.array) -> mx.array:
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


class Arena:
    """K and V of all layers for `n_blocks` blocks, and for two that belong to no sequence.

    The padding of ragged batches is written to `scratch`, which nobody reads, and read from
    `blank`, which nobody writes. A masked slot must hold a number: its weight is 0, and 0 x NaN is
    NaN.

    An arena may begin with memory for fewer blocks, `n_allocated`, and grow.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        n_blocks: int,
        block_size: int,
        first_blocks: int | None = None,
    ) -> None:
        """`first_blocks`: the number of blocks whose memory is taken at once; None: all.

        Raises ArenaError where vectors of several tokens do not end with blocks.
        """
        if n_blocks < 1 or block_size < 1:
            raise ArenaError(f"an arena of {n_blocks} blocks of {block_size} tokens holds nothing")
        for stride in {shape.stride for shape in layers}:
            if block_size % stride and stride % block_size:
                raise ArenaError(
                    f"blocks of {block_size} tokens and vectors of {stride} do not fit"
                )
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.scratch = BlockId(n_blocks)
        self.blank = BlockId(n_blocks + 1)
        self.n_allocated = n_blocks if first_blocks is None else min(first_blocks, n_blocks)
        self._shift = 0 if self.n_allocated == n_blocks else 2
        self.layers = tuple(
            LayerArena(shape, self.n_allocated + 2, shape.block_slots(block_size))
            for shape in layers
        )
        mx.eval(self.planes())  # memory is taken now, not when the first request comes

    @property
    def grows(self) -> bool:
        """Whether it began with memory for fewer blocks than it is for."""
        return self._shift > 0

    @property
    def is_attended(self) -> bool:
        """Whether an `Attention` reads any of the layers."""
        return any(not layer.shape.is_fixed for layer in self.layers)

    @property
    def bytes(self) -> int:
        """Bytes of the blocks that sequences can use, without `scratch` and `blank`."""
        return self.n_blocks * block_bytes((layer.shape for layer in self.layers), self.block_size)

    def grow(self, n_blocks: int) -> None:
        """Take memory for at least `n_blocks` blocks, and for at least half as many again as there
        are, because each growth copies all of them. The layers grow one after another, so that
        memory is held twice for one layer alone. No step may be in flight.
        """
        wanted = min(max(n_blocks, self.n_allocated * 3 // 2), self.n_blocks)
        for layer in self.layers:
            layer.resize(wanted + 2)
        self.n_allocated = wanted

    def shrink(self, n_blocks: int) -> None:
        """Keep the first `n_blocks` blocks alone, of an arena that grows, as `grow` copies them."""
        for layer in self.layers:
            layer.resize(n_blocks + 2)
        self.n_allocated = n_blocks

    def release(self) -> None:
        """Release all planes, which cannot be computed any more. `allocate` must follow."""
        for layer in self.layers:
            layer.planes = ()

    def allocate(self) -> None:
        """Make all planes anew, of as many blocks as before. They hold zeros."""
        for layer in self.layers:
            layer.allocate()
        mx.eval(self.planes())

    def place(self, block: Place) -> Place:
        """The position of blocks in the planes: their id. In an arena that grows it is two more,
        because `scratch` and `blank`, whose ids are the last, come first there.
        """
        return (block + self._shift) % (self.n_blocks + 2) if self._shift else block

    def check(self, block: BlockId) -> None:
        """Raises ArenaError for a block that the arena does not have."""
        if not 0 <= block < self.n_blocks:
            raise ArenaError(f"block {block} is not one of the arena's {self.n_blocks}")

    def copy(self, ops: Iterable[CopyBlock]) -> list[list[mx.array]]:
        """Build the ops, to be computed as if one after another.

        Returns what must have been computed, one list after another, before the planes are: a read
        under way holds a plane, and the write that follows would copy all of it. Raises ArenaError,
        before anything is built, when an op names an unknown block.
        """
        batches = independent_copies(ops)
        for op in (op for batch in batches for op in batch):
            self.check(op.source)
            self.check(op.target)
        read = list[list[mx.array]]()
        for batch in batches:
            contents = self.contents([op.source for op in batch], [op.n_tokens for op in batch])
            read.append([array for arrays in contents for array in arrays])
            for layer, arrays in zip(self.layers, contents, strict=True):
                for index, op in enumerate(batch):
                    own = [array[index : index + 1] for array in arrays]
                    layer.put_blocks(self.place(op.target), *own)
        return read

    def clear(self, blocks: mx.array) -> None:
        """Zero whole blocks, `[blocks]`."""
        mappings = dict[Heads, SlotMapping]()
        for layer in self.layers:
            if layer.heads not in mappings:
                slots = mx.tile(mx.arange(layer.block_size, dtype=blocks.dtype), [len(blocks)])
                every = mx.repeat(blocks, layer.block_size)
                mappings[layer.heads] = self.slot_mapping(every, slots, layer.heads)
            layer.clear(mappings[layer.heads])

    def contents(self, blocks: list[BlockId], n_tokens: list[int]) -> list[list[mx.array]]:
        """Copies of the first tokens of blocks, followed by zeros: what `LayerArena.blocks` returns
        of each layer in turn.

        All are `[blocks, kv_heads, slots, width]`; of a vector of several tokens, whose last is not
        among them, nothing is copied. They refer to the arena's arrays until they
        have been evaluated. Raises ArenaError for an unknown block.
        """
        for block in blocks:
            self.check(block)
        ids = mx.array([self.place(block) for block in blocks], mx.uint32)
        kept = dict[int, mx.array]()
        if min(n_tokens, default=self.block_size) < self.block_size:
            tokens = mx.array(n_tokens)[:, None]
            for layer in self.layers:
                per_slot = self.block_size // layer.block_size
                kept[layer.shape.stride] = tokens // per_slot > mx.arange(layer.block_size)
        return [layer.blocks(ids, kept.get(layer.shape.stride)) for layer in self.layers]

    def planes(self) -> list[mx.array]:
        """The layers' planes as they are now, to be evaluated at once and not kept."""
        return [plane for layer in self.layers for plane in layer.planes]

    def head_ids(self, table: mx.array, kv_heads: int) -> mx.array:
        """The heads of K of the blocks of a table, in layers of `kv_heads`.

        `table`: `[rows, blocks]`. Returns `[rows, kv_heads, blocks]`, indices for
        `LayerArena.key_blocks`.
        """
        own = mx.arange(kv_heads, dtype=table.dtype)[None, :, None]
        return self.place(table)[:, None, :] * kv_heads + own

    def value_heads(self, key_heads: mx.array, heads: Heads) -> mx.array:
        """The heads of V that belong to some heads of K, for layers of these heads: indices into
        `LayerArena.value_blocks`.
        """
        if not heads.share_plane:
            return key_heads
        return key_heads + _plain_number(self._n_heads(heads), key_heads.dtype)

    def gather_ids(self, table: mx.array, heads: Heads) -> tuple[mx.array, mx.array]:
        """What `LayerArena.read` takes for a table, `[rows, blocks]`, in layers of these heads: the
        heads of K and those of V, each `[rows, kv_heads, blocks]`.
        """
        keys = self.head_ids(table, heads.kv_heads)
        return keys, self.value_heads(keys, heads)

    def slot_mapping(self, blocks: mx.array, slots: mx.array, heads: Heads) -> SlotMapping:
        """Where the vectors of tokens are written, of which token `i` belongs to `slots[i]` of
        `blocks[i]`, in layers of these heads. There are as many slots as vectors in a block.

        `blocks` and `slots`: `[tokens]`. The vectors are those of each token's heads; where K and V
        share a plane, there are twice as many, those of V last.
        """
        own = mx.arange(heads.kv_heads, dtype=blocks.dtype)
        by_head = (self.place(blocks)[:, None] * heads.kv_heads + own).astype(mx.int64)
        size = max(1, self.block_size // heads.stride)
        rows = by_head * size + slots[:, None].astype(mx.int64)
        rows = rows.reshape(-1, 1)  # int64: Metal multiplies it by the dimension in its type
        if heads.share_plane:
            offset = _plain_number(self._n_heads(heads) * size, mx.int64)
            rows = mx.concatenate([rows, rows + offset])
        if not heads.key_channels:
            return SlotMapping(rows, None)
        channels = mx.arange(heads.key_channels)
        of_keys = (by_head[..., None] * heads.key_channels + channels) * size
        of_keys = of_keys + slots[:, None, None].astype(mx.int64)
        of_values = rows[by_head.size :] * heads.key_channels + channels  # where they share a plane
        codes = mx.concatenate([of_keys.reshape(-1, 1), of_values.reshape(-1, 1)])
        return SlotMapping(rows, codes)

    def _n_heads(self, heads: Heads) -> int:
        return (self.n_allocated + 2) * heads.kv_heads


def _plain_number(value: int, dtype: mx.Dtype) -> mx.array:
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
