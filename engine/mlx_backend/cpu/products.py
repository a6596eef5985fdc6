"""Products of queries with encoded keys, and of weights with encoded values, block by block.

Quantized vectors are not decoded number by number. With codes c, scales s and biases b of its
groups g, a key's product with a query q is `sum_g s[g] (q[g] . c[g]) + b[g] sum(q[g])`, and values
are summed alike: scales and biases meet scores, of which there are far fewer than codes. Few rows
are multiplied with the codes in place, by MLX's quantized product with scales of 1; for more, codes
are widened to float32, which a BLAS multiplies.
"""

import mlx.core as mx
import numpy as np

from engine.mlx_backend.kv.formats import Codec
from engine.mlx_backend.kv.shape import StoredBlocks

MOST_IN_PLACE = 2
"""Rows for which the product with codes in place takes no longer than a BLAS takes with codes that
are copied and widened. Measured on two cores of an AMD EPYC.
"""

WIDENED = 2**20
"""Codes that are widened at a time, to 4 MiB: they stay in the cache until the product has read
them. Measured on two cores of an AMD EPYC.
"""

_IN_PLACE_GROUPS = (64, 32)
"""Sizes of groups that MLX's product takes; all have the scale 1."""


def key_products(
    queries: mx.array, query_ids: mx.array, codec: Codec, keys: StoredBlocks
) -> mx.array:
    """Products of queries with encoded keys of blocks, float32 `[..., n, block_size]`.

    `queries`: `[heads, n, dim]`. `query_ids`, `[...]`: which of the heads meets each block.
    """
    if not codec.bits:
        decoded, ids = _decoded(codec, keys)
        return mx.gather_mm(queries, decoded.swapaxes(-1, -2), query_ids, ids).astype(mx.float32)
    heads, n, _ = queries.shape
    by_group = queries.astype(mx.float32).reshape(heads, n, codec.groups, codec.group)
    by_group = by_group.swapaxes(1, 2)  # each group of channels is a matrix of its own
    groups = mx.arange(codec.groups, dtype=mx.uint32)
    products = _code_products(
        by_group.reshape(heads * codec.groups, n, codec.group),
        query_ids[..., None] * codec.groups + groups,
        codec,
        keys.rows[0].reshape(len(keys.rows[0]) * codec.groups, codec.group, -1),
        keys.ids[..., None] * codec.groups + groups,
    )
    scales, biases = _scales(codec, keys)
    sums = by_group.sum(axis=-1)[query_ids]  # [..., groups, n]
    scores = products * scales + sums[..., None] * biases
    return scores.sum(axis=-3) if codec.groups > 1 else scores.squeeze(-3)


def value_sums(
    weights: mx.array, weight_ids: mx.array, codec: Codec, values: StoredBlocks
) -> mx.array:
    """Weighted sums of encoded values of blocks, float32 `[groups, 1, kv_heads, n, dim]`.

    `weights`: float32 `[groups, blocks, kv_heads, n, block_size]`. `weight_ids`, `[groups, blocks,
    kv_heads]`: 0, 1, 2, ...
    """
    n_groups, n_blocks, kv_heads, n, size = weights.shape
    if not codec.bits:
        decoded, ids = _decoded(codec, values)
        by_block = weights.astype(decoded.dtype).reshape(-1, n, size)
        weighted = mx.gather_mm(by_block, decoded, weight_ids, ids)
        return weighted.astype(mx.float32).sum(axis=1, keepdims=True)
    scales, biases = _scales(codec, values)
    apart = weights[..., None, :, :]  # of each group of channels
    scaled = (apart * scales).reshape(-1, codec.groups * n, size)
    products = _code_products(scaled, weight_ids, codec, values.rows[0], values.ids)
    products = products.reshape(n_groups, n_blocks, kv_heads, codec.groups * n, codec.dim)
    sums = products.sum(axis=1, keepdims=True)
    sums = sums.reshape(n_groups, 1, kv_heads, codec.groups, n, codec.groups, codec.group)
    sums = mx.stack([sums[..., group, :, group, :] for group in range(codec.groups)], axis=-2)
    offsets = (apart * biases).sum(axis=1, keepdims=True).sum(axis=-1)  # [..., groups, n]
    sums = sums + offsets.swapaxes(-1, -2)[..., None]
    return sums.reshape(n_groups, 1, kv_heads, n, codec.dim)


def _decoded(codec: Codec, blocks: StoredBlocks) -> tuple[mx.array, mx.array]:
    """The vectors of blocks, `[blocks, block_size, dim]`, and the indices of those meant."""
    copies = codec.decode([_copied(rows, blocks.ids) for rows in blocks.rows])
    return copies, mx.arange(blocks.ids.size, dtype=mx.uint32).reshape(blocks.ids.shape)


def _scales(codec: Codec, blocks: StoredBlocks) -> tuple[mx.array, ...]:
    """Scales and biases of quantized blocks, float32 `[..., groups, 1, block_size]`."""
    return tuple(
        of.reshape(*blocks.ids.shape, *of.shape[1:]).swapaxes(-1, -2)[..., None, :]
        for of in codec.scales(_copied(blocks.rows[1], blocks.ids))
    )


def _copied(rows: mx.array, ids: mx.array) -> mx.array:
    """The blocks `ids` of `rows`, `[blocks, lines, width]`, one after another."""
    # In two dimensions each index moves one contiguous run: one memcpy for each block.
    return rows.reshape(len(rows), -1)[ids.reshape(-1)].reshape(-1, *rows.shape[1:])


def _code_products(
    left: mx.array, left_ids: mx.array, codec: Codec, codes: mx.array, ids: mx.array
) -> mx.array:
    """Products of matrices, `[matrices, n, lines]`, with the codes of blocks, `[blocks, lines,
    bytes]`: float32 `[..., n, codes of a line]`.

    `left_ids` and `ids`, `[...]`: pairs of a matrix and a block.
    """
    n_blocks, n_lines, _ = codes.shape
    width = codes.shape[2] * 8 // codec.bits
    group = next((group for group in _IN_PLACE_GROUPS if width % group == 0), None)
    if left.shape[1] <= MOST_IN_PLACE and group is not None:
        shape = n_lines, width // group
        ones, zeros = (
            # Broadcast to all blocks, not repeated: MLX needs the last two dimensions in a row.
            mx.broadcast_to(mx.array(numbers(shape, np.float32)), (n_blocks, *shape))
            for numbers in (np.ones, np.zeros)
        )
        return mx.gather_qmm(
            left,
            codes.view(mx.uint32),
            ones,
            zeros,
            left_ids,
            ids,
            transpose=False,
            group_size=group,
            bits=codec.bits,
        )
    step, found = max(WIDENED // (n_lines * width), 1), list[mx.array]()
    for first in range(0, ids.size, step):
        own_left, own = (of.reshape(-1)[first : first + step] for of in (left_ids, ids))
        if found:  # one after another, or MLX would copy and widen all of them first
            [own] = mx.depends([own], found[-1:])
        widened = codec.widened(_copied(codes, own))
        found.append(mx.gather_mm(left, widened, own_left, mx.arange(len(own), dtype=mx.uint32)))
    whole = found[0] if len(found) == 1 else mx.concatenate(found)
    return whole.reshape(*ids.shape, *whole.shape[1:])
