"""The executor of work lists that others are measured by: numpy, one item after the other."""

import numpy as np
import numpy.typing as npt

from engine.mlx_backend.model.rows import BlockTable, WorkList

Floats = npt.NDArray[np.floating]


def attention(
    queries: Floats, keys: Floats, values: Floats, table: BlockTable, work: WorkList
) -> npt.NDArray[np.float64]:
    """Attention of scaled `queries`, `[rows, kv_heads, n, key_dim]`, with n heads of each KV head.

    `keys` and `values`: `[blocks, kv_heads, block_size, dim]`. Returns `[rows, kv_heads, n,
    value_dim]`.
    """
    rows, kv_heads, n, _ = queries.shape
    scores: list[list[Floats]] = [[] for _ in range(rows)]
    seen: list[list[Floats]] = [[] for _ in range(rows)]
    for item in work:
        blocks = table[item["row"], item["block"] : item["block"] + item["blocks"]]
        item_keys, item_values = (
            pool[blocks].swapaxes(0, 1).reshape(kv_heads, -1, pool.shape[-1])[:, : item["keys"]]
            for pool in (keys, values)
        )
        for row in range(item["row"], item["row"] + item["rows"]):
            scores[row].append(queries[row].astype(np.float64) @ item_keys.swapaxes(1, 2))
            seen[row].append(item_values)
    output = np.empty((rows, kv_heads, n, values.shape[-1]))
    for row in range(rows):
        together = np.concatenate(scores[row], axis=-1)
        weights = np.exp(together - together.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        output[row] = weights @ np.concatenate(seen[row], axis=1)
    return output
