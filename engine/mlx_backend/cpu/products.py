"""Products of queries with stored keys, and of weights with stored values, block by block on CPUs.

Quantized keys are not decoded number by number. With codes c, scales s and biases b of the groups g
of a key, a query's product with it is `sum_g s[g] (q[g] . c[g]) + b[g] sum(q[g])`: only codes are
widened to float32, and scales and biases meet scores, of which there are far fewer.
"""

from collections.abc import Sequence

import mlx.core as mx

from engine.mlx_backend.kv.formats import Codec

_MOST_QUANTIZED_ROWS = 4
"""Rows of weights for which MLX's product with quantized values takes no longer than decoding them
and multiplying with a BLAS does. Measured on two cores of an AMD EPYC: one or two rows take a third
to three quarters of the time of float32 values, eight twice as long.
"""


def key_products(
    queries: mx.array, query_ids: mx.array, codec: Codec, rows: Sequence[mx.array], ids: mx.array
) -> mx.array:
    """Products of queries with the keys of blocks, float32 `[..., n, block_size]`.

    `queries`: `[heads, n, dim]`. `rows`: each plane's, `[blocks, block_size, width]`. `query_ids`
    and `ids`, both `[...]`: which of the heads meets which of the blocks.
    """
    if not codec.bits:
        keys = codec.decode(rows).swapaxes(-1, -2)
        return mx.gather_mm(queries, keys, query_ids, ids).astype(mx.float32)
    [heads, n, dim], queries = queries.shape, queries.astype(mx.float32)
    groups, size = dim // codec.group, rows[0].shape[1]
    sums = queries.reshape(heads, n, groups, codec.group).sum(axis=-1).swapaxes(1, 2)
    if groups > 1:  # each group of a query apart, zeros in place of the others
        own = mx.repeat(mx.eye(groups), codec.group, axis=1)[:, None]
        queries = (queries[:, None] * own).reshape(heads, groups * n, dim)
    keys = codec.codes(rows[0]).swapaxes(-1, -2)
    products = mx.gather_mm(queries, keys, query_ids, ids)
    products = products.reshape(*ids.shape, groups, n, size)
    scales, biases = (
        of.swapaxes(-1, -2)[ids].astype(mx.float32)[..., None, :] for of in (rows[1], rows[2])
    )
    scores = products * scales + sums[query_ids][..., None] * biases
    return scores.sum(axis=-3) if groups > 1 else scores.squeeze(-3)


def value_products(
    weights: mx.array, weight_ids: mx.array, codec: Codec, rows: Sequence[mx.array], ids: mx.array
) -> mx.array:
    """Products of weights, `[products, n, block_size]`, with the values of blocks: `[..., n, dim]`,
    float32 of quantized values; otherwise as in `key_products`.
    """
    if codec.bits and weights.shape[1] <= _MOST_QUANTIZED_ROWS:
        codes, scales, biases = rows
        return mx.gather_qmm(
            weights.astype(mx.float32),
            codes,
            scales.astype(mx.float32),
            biases.astype(mx.float32),
            weight_ids,
            ids,
            transpose=False,
            group_size=codec.group,
            bits=codec.bits,
        )
    values = codec.decode(rows)
    return mx.gather_mm(weights.astype(values.dtype), values, weight_ids, ids)
