"""What attention takes beside the arena while a step is computed. Pure functions."""

from dataclasses import dataclass

from engine.mlx_backend.model.batching import FORWARD_TOKENS
from engine.mlx_backend.model.layout import Layout
from engine.mlx_backend.model.views import Attention
from engine.values.settings import EngineConfig

GATHERED_BYTES = 1 << 30
"""K and V that one forward may gather in one layer, unless a single row needs more.

A forward with more is split, which reads the weights once more. That is little beside the gather,
which reads, writes and reads again so much: a layer of 8 G parameters in 32 layers has half of it.
"""

_SCORE_BYTES = 4
_MASK_BYTES = 1

FUSED_DIMS = (64, 80, 128)
"""Dimensions of heads for which Metal's attention keeps no scores (MLX,
`backend/metal/scaled_dot_product_attention.cpp`)."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """What the size of the workspace depends on. A key is a token's K and V in one layer."""

    rows: int  # in one forward
    tokens: int  # in one forward, padding included
    key_bytes: int  # of one key in the layer where it takes most
    copies: int  # of all keys of a forward
    heads: int  # whose scores are kept for all tokens and keys at once; 0 where they are fused
    held_steps: int = 1  # see `allocator.held_steps`

    def forward_keys(self, longest: int) -> int:
        """The most keys that a forward reads, rows x those of its longest row.

        `longest`: tokens of the longest sequence that there can be.
        """
        affordable = GATHERED_BYTES // max(self.key_bytes, 1)
        return min(self.rows * longest, max(longest, affordable))

    def bytes(self, longest: int) -> int:
        """K and V gathered for a forward, and the mask and scores of its tokens, at most; this for
        each of the `held_steps`.

        Scores count once: softmax and mask write where they read. Tiles do not make it less,
        because MLX computes the scores of many before it attends to the first.
        """
        gathered = self.copies * self.forward_keys(longest) * self.key_bytes
        scores = self.tokens * longest * (self.heads * _SCORE_BYTES + _MASK_BYTES)
        return self.held_steps * (gathered + scores)


def find_workspace(
    config: EngineConfig, layout: Layout, query_heads: int, attention: Attention, *, is_metal: bool
) -> Workspace:
    """Of a model whose layers have at most so many heads of queries."""
    layers = layout.kv_layers
    is_fused = is_metal and all(
        shape.key_dim == shape.value_dim and shape.key_dim in FUSED_DIMS for shape in layers
    )
    return Workspace(
        rows=config.max_running,
        tokens=config.step_tokens + FORWARD_TOKENS * config.max_running if layers else 0,
        key_bytes=max((shape.token_bytes for shape in layers), default=0),
        copies=attention.gathered_copies,
        heads=0 if is_fused else query_heads,
    )
