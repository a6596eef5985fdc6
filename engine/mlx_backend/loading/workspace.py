"""The memory that attention takes while a forward is computed."""

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx

from engine.mlx_backend.host import FusedAttention
from engine.mlx_backend.kv.layout import Layout
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.model.batching import FORWARD_TOKENS
from engine.values.settings import EngineConfig
from kvstore.window import lease_slots

LEAST_GATHERED_BYTES, GATHERED_BYTES = 128 << 20, 1 << 30
"""Bounds of the K and V that a forward of several rows gathers in one layer; one row may need more.

Within them it is as much as the weights have. A forward that needs more is split, which reads the
weights once more: little against the gathers, which read, write and read so much in every layer.
The lower bound is for models so small that a forward's own cost counts, a few milliseconds.
"""

_SCORE_BYTES, _MASK_BYTES = 4, 1
_SHORT_TOKENS, _VECTOR_QUERIES = 8, 32
_METAL_DIMS, _METAL_VECTOR_DIMS = frozenset({64, 72, 80, 96, 128}), frozenset({64, 96, 128})
_CUDNN_DIMS = frozenset(range(8, 129, 8))


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """The arrays that attention makes while a forward is computed, in the layer that needs most.

    A key is K and V of a token. A pair is a new token and a key of its row.
    """

    rows: int  # of a forward
    tokens: int  # of a forward, padding included
    key_bytes: int  # decoded, and as stored if that is otherwise
    gathered_bytes: int  # that the keys of several rows may have in one forward
    copies: int  # of all keys of a forward
    pair_bytes: int  # of any pair
    short_bytes: int = 0  # in addition, of a pair in a row of at most `short_tokens` tokens
    short_tokens: int = _SHORT_TOKENS
    masked_bytes: int = 0  # in addition, of a pair whose mask is an array, in a window
    window_keys: int = 0  # of one row in the layers with the longest window
    selected_bytes: int = 0  # that sparse attention copies for each new token
    # Partial results of attention in place, by the tokens of a forward and of its longest row.
    partial_bytes: Callable[[int, int], int] = field(default=lambda *of: 0, compare=False)
    in_place_tokens: int = 0  # of a forward whose rows read their blocks in place, padding included

    def forward_keys(self, longest: int) -> int:
        """The most keys that a forward reads: its rows times the keys of its longest row.

        `longest`: tokens of the longest sequence that there can be.
        """
        affordable = self.gathered_bytes // max(self.key_bytes, 1)
        return min(self.rows * longest, max(longest, affordable))

    def bytes(self, longest: int) -> int:
        """The most that one forward takes: the K and V that it gathers, scores and masks; or the
        partial results of attention in place, if they are more.

        Scores count once, because softmax and mask write where they read. Tiles do not reduce them,
        because MLX computes the scores of many tiles before it attends to the first.
        """
        keys, pairs = self.forward_keys(longest), self.tokens * longest
        in_windows = self.tokens * min(longest, self.window_keys) * self.masked_bytes
        gathered = (
            self.copies * keys * self.key_bytes
            + pairs * self.pair_bytes
            + min(self.short_tokens * keys, pairs) * self.short_bytes
            + in_windows
            + self.tokens * self.selected_bytes
        )
        return max(gathered, self.partial_bytes(self.in_place_tokens, longest))


def attention_workspace(
    config: EngineConfig,
    layout: Layout,
    weight_bytes: int,
    query_heads: int,
    attention: Attention,
    fused: FusedAttention,
) -> AttentionWorkspace:
    """The workspace of a model whose layers have at most `query_heads` query heads.

    Whether MLX keeps scores in memory is decided by `use_fallback` in
    `scaled_dot_product_attention.cpp` of `mlx/backend/metal/` and `mlx/backend/cuda/`. On Metal the
    full kernel takes rows of more than 8 tokens with heads of 64, 72, 80, 96 or 128, and the vector
    kernel takes shorter rows with heads of 64, 96 or 128 and at most 32 queries for each KV head.
    On CUDA cuDNN takes half precision and heads of up to 128 in steps of 8. There `mlx/fast.cpp`
    turns a boolean mask into an additive one for each head, from two arrays of that size. Windows
    have such a mask; rows of full attention do not, except rows of one token, whose scores MLX then
    keeps, too: see `RowByRowAttention`.
    """
    layers, scores_bytes = layout.kv_layers, query_heads * _SCORE_BYTES
    dims = {*(shape.key_dim for shape in layers), *(shape.value_dim for shape in layers)}
    has_equal_dims = all(shape.key_dim == shape.value_dim for shape in layers)
    queries = [_SHORT_TOKENS * -(-query_heads // shape.kv_heads) for shape in layers]
    pair_bytes, short_bytes, masked_bytes = _MASK_BYTES + scores_bytes, 0, 0
    short_tokens = _SHORT_TOKENS
    if fused is FusedAttention.METAL and has_equal_dims and dims <= _METAL_DIMS:
        is_vector = dims <= _METAL_VECTOR_DIMS and max(queries, default=0) <= _VECTOR_QUERIES
        pair_bytes, short_bytes = _MASK_BYTES, 0 if is_vector else scores_bytes
    elif (
        fused is FusedAttention.CUDA
        and has_equal_dims
        and dims <= _CUDNN_DIMS
        and {*layout.dtypes} <= {mx.float16, mx.bfloat16}
    ):
        # Of a mask there are two arrays in half precision.
        pair_bytes, short_bytes, masked_bytes = _MASK_BYTES, scores_bytes, scores_bytes
        short_tokens = 1

    def partial_bytes(n_tokens: int, longest: int) -> int:
        of = config.block_size, n_tokens, longest
        shapes = dict.fromkeys(layers)
        return max((attention.partial_bytes(each, query_heads, *of) for each in shapes), default=0)

    window_slots = (
        lease_slots(window, config.block_size, config.step_tokens) for window in layout.windows
    )
    return AttentionWorkspace(
        rows=config.max_running,
        tokens=config.step_tokens + FORWARD_TOKENS * config.max_running if layers else 0,
        key_bytes=max((shape.read_bytes for shape in layers), default=0),
        gathered_bytes=min(max(weight_bytes, LEAST_GATHERED_BYTES), GATHERED_BYTES),
        copies=attention.gathered_copies,
        pair_bytes=pair_bytes,
        short_bytes=short_bytes,
        short_tokens=short_tokens,
        masked_bytes=masked_bytes,
        window_keys=config.block_size * max(window_slots, default=0),
        selected_bytes=layout.selected_bytes,
        partial_bytes=partial_bytes,
        # Rows are padded by no more tokens than cost as much as another forward.
        in_place_tokens=min(
            attention.in_place_tokens * config.max_running, config.step_tokens + FORWARD_TOKENS
        ),
    )
