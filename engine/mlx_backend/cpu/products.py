"""Products of queries with encoded keys, and of weights with encoded values, block by block.

Quantized vectors are not decoded number by number. With the integers c and scales s of its groups
g, a key's product with a query q is `sum_g s[g] (q[g] . c[g])`, and values are summed alike: scales
meet scores, of which there are far fewer than codes. Few rows are multiplied with the codes in
place, by MLX's quantized product with scales of 1; for more, codes are widened to float32, which a
BLAS multiplies.
"""

from functools import cache

import mlx.core as mx

from engine.mlx_backend.kv.formats import Codec
from engine.mlx_backend.kv.shape import StoredBlocks

MOST_IN_PLACE = 4
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
    """Products of queries with encoded keys of blocks, float32 `[rows, blocks, kv_heads, n,
    block_size]`.

    `queries`: `[heads, n, dim]`. `query_ids`, `[rows, blocks, kv_heads]`: which of them meet each
    block; the rows may be some of those that have queries.
    """
    if not codec.bits:
        decoded, ids = _decoded(codec, keys)
        return mx.gather_mm(queries, decoded.swapaxes(-1, -2), query_ids, ids).astype(mx.float32)
    queries = queries.astype(mx.float32)
    codes = keys.codes_by_channel(codec.group)
    scores = list[mx.array]()
    for group, scales in enumerate(_scales(codec, keys)):
        own = queries[..., group * codec.group : (group + 1) * codec.group]
        ids = keys.ids if codec.groups == 1 else keys.ids * codec.groups + group
        products = _code_products(own, query_ids, codec, codes, ids, slice(0, keys.block_size))
        scores.append(products * scales)
    return sum(scores[1:], scores[0])


def value_sums(
    weights: mx.array, weight_ids: mx.array, codec: Codec, values: StoredBlocks
) -> mx.array:
    """Weighted sums of encoded values of blocks, float32 `[rows, 1, kv_heads, n, dim]`.

    `weights`: float32 `[rows, blocks, kv_heads, n, block_size]`. `weight_ids`, `[rows, blocks,
    kv_heads]`: 0, 1, 2, ...
    """
    n, size = weights.shape[3:]
    if not codec.bits:
        decoded, ids = _decoded(codec, values)
        by_block = weights.astype(decoded.dtype).reshape(-1, n, size)
        weighted = mx.gather_mm(by_block, decoded, weight_ids, ids)
        return weighted.astype(mx.float32).sum(axis=1, keepdims=True)
    if codec.groups > 1 and n <= MOST_IN_PLACE:
        return _sums_in_place(weights, weight_ids, codec, values)
    codes, sums = values.rows(0), list[mx.array]()
    for group, scales in enumerate(_scales(codec, values)):
        own = (weights * scales).reshape(-1, n, size)
        columns = slice(group * codec.group, (group + 1) * codec.group)
        products = _code_products(own, weight_ids, codec, codes, values.ids, columns)
        sums.append(products.sum(axis=1, keepdims=True))
    return mx.concatenate(sums, axis=-1)


def _sums_in_place(
    weights: mx.array, weight_ids: mx.array, codec: Codec, values: StoredBlocks
) -> mx.array:
    """`value_sums` for few rows and vectors of several groups. Scales are read in place, too, so
    that one product serves all groups. Codes count from 0 there: what those of zero add is
    subtracted.
    """
    n, size = weights.shape[3:]
    codes, scales = values.rows(0), values.rows(1)
    _, biases = _unscaled(0, *scales.shape)
    products = mx.gather_qmm(
        weights.reshape(-1, n, size),
        codes.view(mx.uint32),
        scales,
        biases,
        weight_ids,
        values.ids,
        transpose=False,
        group_size=codec.group,
        bits=codec.bits,
    )
    offsets = [
        (weights * own).sum(axis=1, keepdims=True).sum(axis=-1, keepdims=True)
        for own in _scales(codec, values)
    ]
    of_zeros = codec.zero * mx.repeat(mx.concatenate(offsets, axis=-1), codec.group, axis=-1)
    return products.sum(axis=1, keepdims=True) - of_zeros


def _decoded(codec: Codec, blocks: StoredBlocks) -> tuple[mx.array, mx.array]:
    """The vectors of blocks, `[blocks, block_size, dim]`, and the indices of those meant."""
    copies = codec.decode([blocks.copied(0)]).reshape(-1, blocks.block_size, codec.dim)
    return copies, mx.arange(blocks.ids.size, dtype=mx.uint32).reshape(blocks.ids.shape)


def _scales(codec: Codec, blocks: StoredBlocks) -> list[mx.array]:
    """The scales of each group of quantized blocks, `[..., 1, block_size]`."""
    scales = blocks.copied(1).reshape(*blocks.ids.shape, 1, -1)
    return [scales[..., group :: codec.groups] for group in range(codec.groups)]


@cache
def _unscaled(zero: int, n_blocks: int, *shape: int) -> tuple[mx.array, mx.array]:
    """Scales and biases with which MLX's codes stand for the integers that ours do, `[blocks,
    lines, groups]`, in the memory of one block's.

    `broadcast_to` would give a last dimension of size 1 the stride 0, and MLX's product copies
    what does not have its last two dimensions in a row: those of the whole arena.
    """
    strides = 0, shape[1], 1
    found = [
        mx.as_strided(mx.full(shape, float(number)), (n_blocks, *shape), strides)
        for number in (1, -zero)
    ]
    mx.eval(found)
    return found[0], found[1]


def _code_products(
    left: mx.array,
    left_ids: mx.array,
    codec: Codec,
    codes: mx.array,
    ids: mx.array,
    columns: slice,
) -> mx.array:
    """Products of matrices, `[matrices, n, lines]`, with the codes of blocks, `[blocks, lines,
    bytes]`: float32 `[..., n, columns]`.

    `left_ids` and `ids`, `[...]`: pairs of a matrix and a block. `columns`: the codes of a line
    that are wanted; all of them, where a matrix has no more than MOST_IN_PLACE rows.
    """
    n_blocks, n_lines, n_bytes = codes.shape
    width = n_bytes * 8 // codec.bits
    n_columns = columns.stop - columns.start
    group = next((group for group in _IN_PLACE_GROUPS if width % group == 0), None)
    if group is not None and left.shape[1] <= MOST_IN_PLACE:
        scales, biases = _unscaled(codec.zero, n_blocks, n_lines, width // group)
        return mx.gather_qmm(
            left,
            codes.view(mx.uint32),
            scales,
            biases,
            left_ids,
            ids,
            transpose=False,
            group_size=group,
            bits=codec.bits,
        )
    wanted_bytes = slice(columns.start * codec.bits // 8, columns.stop * codec.bits // 8)
    step, found = max(WIDENED // (n_lines * n_columns), 1), list[mx.array]()
    for start in range(0, ids.size, step):
        own_left, own = (of.reshape(-1)[start : start + step] for of in (left_ids, ids))
        if found:  # one after another, or MLX would copy and widen all of them first
            [own] = mx.depends([own], found[-1:])
        copied = codes.reshape(n_blocks, -1)[own].reshape(-1, n_lines, n_bytes)
        widened = codec.integers(copied[..., wanted_bytes])
        found.append(mx.gather_mm(left, widened, own_left, mx.arange(len(own), dtype=mx.uint32)))
    products = mx.concatenate(found)
    return products.reshape(*ids.shape, *products.shape[1:])
