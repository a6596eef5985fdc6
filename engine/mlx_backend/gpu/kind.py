"""Kinds of layers, as far as the paged kernel is compiled for each of them."""

import math
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from hashlib import blake2b

import mlx.core as mx

from engine.mlx_backend.gpu.source import source_text
from engine.mlx_backend.kv.formats import Codec, dtype_name
from engine.mlx_backend.kv.shape import LayerShape

WARP = 32
"""Threads that compute in step: a warp of CUDA, a SIMD group of Metal."""

MOST_LOADED_WORDS = 4
"""Words of 32 bits that a thread loads at a time: both devices load at most 16 bytes."""

MOST_TILE = 4
"""Queries of a SIMD group: each takes registers for its own sums."""

MOST_DIM = 256
"""Numbers of a vector: with more, the sums of a thread's queries do not fit into its registers."""

MERGE_THREADS = 128


class Stored(IntEnum):
    """How the numbers of a vector are stored. Codes are integers that groups of numbers scale."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    CODES8 = 3
    CODES4 = 4

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return (32, 16, 16, 8, 4)[self]


_NUMBERS = {
    mx.float32: Stored.FLOAT32,
    mx.float16: Stored.FLOAT16,
    mx.bfloat16: Stored.BFLOAT16,
}


class Uncovered(Exception):
    """Why the kernel does not compute the attention of a layer, in a few words."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What the kernel is compiled for. All layers of a kind, and all steps, share one kernel.

    `group`: the query heads of a KV head. `scale_groups`: the numbers of K, and of V, that share a
    scale, 0 where they have none. `window`: a token sees itself and the `window - 1` before it; 0:
    all before it. `has_sinks`: each head has a score that adds to the sum of its weights.

    The last four are how the work is shared out, with the same results: `lanes` threads read a key
    together; a SIMD group has `tile` queries, and reads `batch` keys with each of its lanes before
    it uses them; a thread group has `simds` SIMD groups.
    """

    block_size: int
    kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    queries: Stored
    keys: Stored
    values: Stored
    scale_groups: tuple[int, int]
    scale: float
    window: int = 0
    has_sinks: bool = False
    lanes: int = 16
    tile: int = 1
    batch: int = 4
    simds: int = 4
    most_entries: int = 64

    @property
    def name(self) -> str:
        """The name of the kernels: it differs wherever their text does. MLX keeps compiled CUDA
        kernels by name alone, in memory and on disk.
        """
        own = repr([asdict(self), self.defines(), source_text()])
        return "paged_" + blake2b(own.encode(), digest_size=10).hexdigest()

    @property
    def tile_queries(self) -> int:
        """Queries of a KV head that a thread group takes at most."""
        return self.tile * self.simds

    def loaded_words(self, of: Stored, dim: int, scale_group: int) -> int:
        """Words that a lane loads at a time from a vector: the most that divide its part of the
        vector and lie within a group that shares a scale.
        """
        words = math.gcd(dim * of.bits // 32 // self.lanes, MOST_LOADED_WORDS)
        while scale_group and scale_group % (words * 32 // of.bits):
            words //= 2
        return words

    def defines(self) -> dict[str, object]:
        """The constants that the text is compiled with, by name."""
        of_keys, of_values = self.scale_groups
        return {
            "BLOCK": self.block_size,
            "KV_HEADS": self.kv_heads,
            "GROUP": self.group,
            "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim,
            "QUERY_TYPE": int(self.queries),
            "KEY_TYPE": int(self.keys),
            "VALUE_TYPE": int(self.values),
            "KEY_SCALE_GROUP": of_keys or self.key_dim,
            "VALUE_SCALE_GROUP": of_values or self.value_dim,
            "SCALE": f"{self.scale!r}f",
            "WINDOW": self.window,
            "SINKS": int(self.has_sinks),
            "LANES": self.lanes,
            "TILE": self.tile,
            "BATCH": self.batch,
            "SIMDS": self.simds,
            "MOST_ENTRIES": self.most_entries,
            "KEY_WORDS": self.loaded_words(self.keys, self.key_dim, of_keys),
            "VALUE_WORDS": self.loaded_words(self.values, self.value_dim, of_values),
            "EXCHANGED": max(self.simds // 2, 1) * self.tile,
            "MERGE_THREADS": MERGE_THREADS,
        }


def kind_of(
    shape: LayerShape,
    block_size: int,
    heads: int,
    dtype: mx.Dtype,
    scale: float,
    window: int | None,
    has_sinks: bool,
    width: int,
) -> Kind:
    """The kind of a layer whose queries, `width` tokens of each row, have `heads` heads of `dtype`.

    Kinds of other widths differ in `tile` alone. Raises Uncovered, which says why, for a layer that
    the kernel does not cover.
    """
    keys, values = shape.codecs
    of_keys, of_values = _stored(keys), _stored(values)
    if dtype not in _NUMBERS:
        raise Uncovered(f"its queries are {dtype_name(dtype)}")
    for dim in (shape.key_dim, shape.value_dim):
        if not 0 < dim <= MOST_DIM:
            raise Uncovered(f"vectors of {dim} numbers")
    if not shape.kv_heads or heads % shape.kv_heads:
        raise Uncovered(f"{heads} query heads for {shape.kv_heads} KV heads")
    group = heads // shape.kv_heads
    return Kind(
        block_size,
        shape.kv_heads,
        group,
        shape.key_dim,
        shape.value_dim,
        _NUMBERS[dtype],
        of_keys,
        of_values,
        (keys.group, values.group),
        scale,
        window or 0,
        has_sinks,
        _lanes((shape.key_dim, of_keys), (shape.value_dim, of_values)),
        min(1 << (group * width - 1).bit_length(), MOST_TILE),
    )


def variants(kind: Kind) -> list[Kind]:
    """At most four kinds with the same results, of which one or another is the fastest on a device:
    the kind itself, and others that hold more queries or fewer keys in registers.
    """
    others = [
        replace(kind, lanes=max(kind.lanes // 2, 4)),
        replace(kind, tile=2 * kind.tile if kind.tile < MOST_TILE else kind.tile // 2),
        replace(kind, batch=2),
    ]
    return list(dict.fromkeys([kind, *others]))


def _stored(codec: Codec) -> Stored:
    if codec.bits:
        return Stored.CODES8 if codec.bits == 8 else Stored.CODES4
    if codec.stored not in _NUMBERS:
        raise Uncovered(f"K or V is {dtype_name(codec.stored)}")
    return _NUMBERS[codec.stored]


def _lanes(*vectors: tuple[int, Stored]) -> int:
    """The threads that read a key together, each about 8 numbers of it, in whole words."""
    largest = max(dim for dim, _ in vectors)
    wanted = 8 if largest <= 64 else 16 if largest <= 128 else 32
    for lanes in (wanted, 16, 8, 4):
        if lanes <= wanted and all(dim * of.bits % (32 * lanes) == 0 for dim, of in vectors):
            return lanes
    raise Uncovered(f"vectors of {largest} numbers do not divide among threads")
