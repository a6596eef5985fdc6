"""What a layer keeps of each token, and the index arrays that layers of one shape share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from engine.mlx_backend.kv.formats import Codec, codecs, is_rotatable
from engine.mlx_backend.kv.states import ArrayShape
from engine.values.settings import KVFormat


class Heads(NamedTuple):
    """What index arrays depend on: layers of equal heads share them.

    `key_channels`: the size of a key whose codes are stored by channel; 0: they are not. On a CPU
    they are, because MLX's product with columns of codes takes a quarter of the time of that with
    rows.
    """

    kv_heads: int
    share_plane: bool
    key_channels: int
    stride: int = 1


class SlotMapping(NamedTuple):
    """Where vectors are written: int64 `[vectors, 1]`, the row of each; and, where codes of keys
    are stored by channel, `[vectors * key_channels, 1]`, the place of each code in the first plane.
    """

    rows: mx.array
    codes: mx.array | None


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps for each token: `kv_heads` vectors of K and as many of V.

    A dimension of 0 means that nothing is kept. K and V may differ in dtype: where only a norm's
    weights are float32, K is float32 and V is not. `format`: how they are stored, as far as they
    can be; see `formats.codecs`. `stride`: the number of tokens that one vector stands for.
    `is_fixed`: the model's own attention alone reads what is kept, and what is kept has these
    dtypes whatever the format is, and whatever precision the model computes in.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    key_dtype: mx.Dtype
    value_dtype: mx.Dtype
    format: KVFormat = KVFormat.FULL
    stride: int = 1
    is_fixed: bool = False

    def block_slots(self, block_size: int) -> int:
        """The vectors of one head in a block. A vector of several tokens is in the block of the
        last of them; where blocks are shorter, all but one of its blocks have a slot in vain.
        """
        return max(1, block_size // self.stride)

    @property
    def vectors(self) -> tuple[tuple[int, mx.Dtype], ...]:
        """Dimension and dtype of a vector of K, and of a vector of V, as the model writes them."""
        return (self.key_dim, self.key_dtype), (self.value_dim, self.value_dtype)

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        """How vectors of K, and of V, are stored."""
        dims, dtypes = (self.key_dim, self.value_dim), (self.key_dtype, self.value_dtype)
        format = KVFormat.FULL if self.is_fixed else self.format
        return codecs(format, self.kv_heads, dims, dtypes)

    @property
    def parts(self) -> tuple[ArrayShape, ...]:
        """Shape and dtype of a vector's row in each plane of K, and then in each plane of V."""
        keys, values = self.codecs
        return (*keys.planes, *values.planes)

    @property
    def is_rotated(self) -> bool:
        """Whether keys are stored rotated, and meet rotated queries."""
        return self.codecs[0].bits > 0 and is_rotatable(self.key_dim)

    @property
    def heads(self) -> Heads:
        """K and V share planes where their vectors have one size, dtype and codec."""
        keys, values = self.codecs
        key_channels = self.key_dim if keys.bits and mx.default_device() == mx.cpu else 0
        share_plane = self.key_dim > 0 and keys == values
        return Heads(self.kv_heads, share_plane, key_channels, self.stride)

    @property
    def vector_bytes(self) -> int:
        """Bytes of one vector of K and one of V, of all heads, as they are stored."""
        return self.kv_heads * sum(part.bytes for part in self.parts)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V as they are stored, or of its share in a vector's."""
        return -(-self.vector_bytes // self.stride)

    @property
    def read_bytes(self) -> int:
        """Bytes of one token's K and V where attention has gathered them, with those from which
        they were decoded. Codes of 4 bits are unpacked in between, to a byte each.
        """
        decoded = self.kv_heads * sum(dim * dtype.size for dim, dtype in self.vectors)
        decoded = -(-decoded // self.stride)
        if all(codec.is_plain for codec in self.codecs):
            return decoded
        unpacked = self.kv_heads * sum(codec.dim for codec in self.codecs if codec.bits == 4)
        return decoded + self.token_bytes + unpacked


def token_bytes(layers: Iterable[LayerShape]) -> int:
    """Bytes of one token's K and V in all layers together, as they are stored."""
    return sum(layer.token_bytes for layer in layers)


def block_bytes(layers: Iterable[LayerShape], block_size: int) -> int:
    """Bytes of one block of `block_size` tokens in all layers together."""
    return sum(layer.block_slots(block_size) * layer.vector_bytes for layer in layers)


class StoredBlocks(NamedTuple):
    """Blocks of K or of V of one head each, in place, as they are stored.

    `planes`: the rows of all blocks, `[blocks * block_size, width]`. `ids`: which blocks are meant.
    """

    planes: Sequence[mx.array]
    block_size: int
    ids: mx.array

    def rows(self, plane: int) -> mx.array:
        """All blocks of a plane, `[blocks, block_size, width]`."""
        return self.planes[plane].reshape(-1, self.block_size, self.planes[plane].shape[1])

    def codes_by_channel(self, group: int) -> mx.array:
        """Codes of K that are stored by channel, split into groups of `group` channels: `[blocks *
        groups, group, block_size]`.
        """
        return self.planes[0].reshape(-1, group, self.block_size)

    def copied(self, plane: int) -> mx.array:
        """The rows of a plane in the blocks that are meant, `[..., block_size * width]`."""
        # In two dimensions each index moves one contiguous run: one memcpy for each block.
        of = self.planes[plane]
        return of.reshape(-1, self.block_size * of.shape[1])[self.ids]
