"""Before a model is served: do its logits through the arena equal those through its own caches?"""

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from engine.mlx_backend.attention.gather import GatherAttention
from engine.mlx_backend.errors import UnsupportedModel
from engine.mlx_backend.forward import Forward, Piece
from kvstore.arena import Arena, LayerShape
from kvstore.types import BlockId

_PROMPTS = ((1, 2, 3, 4, 5), (6, 7))
_NEXT = (3, 1)
_TABLES = ((BlockId(3), BlockId(0)), (BlockId(1),))
_TOLERANCE = 0.2
"""Error relative to the logits; half precision stays far below it, a wrong position far above."""


def check_views(model: Module, layers: tuple[LayerShape, ...], dtype: mx.Dtype) -> None:
    """Run two rows of different lengths through a little arena and through mlx-lm's caches.

    Raises UnsupportedModel when the model cannot run so, or says something else.
    """
    try:
        found = _through_arena(model, Arena(layers, dtype, n_blocks=4, block_size=4))
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"the model cannot run rows of unequal length: {error}") from error
    expected = mx.stack(
        [_alone(model, [*prompt, token]) for prompt, token in zip(_PROMPTS, _NEXT, strict=True)]
    )
    deviation = float(mx.linalg.norm(found - expected) / mx.linalg.norm(expected))
    if not deviation < _TOLERANCE:
        raise UnsupportedModel(
            f"logits of rows of unequal length are wrong by {deviation:.0%} of their size"
        )


def _through_arena(model: Module, arena: Arena) -> mx.array:
    attention = GatherAttention()
    prompts = [Piece(0, prompt, table) for prompt, table in zip(_PROMPTS, _TABLES, strict=True)]
    lasts = [
        Piece(piece.stop, (token,), piece.blocks)
        for piece, token in zip(prompts, _NEXT, strict=True)
    ]
    for pieces in (prompts, lasts):
        forward = Forward(pieces, arena)
        logits: mx.array = model(forward.tokens, cache=attention.views(arena, forward))
        mx.eval(logits, arena.arrays())
    return logits[:, -1].astype(mx.float32)


def _alone(model: Module, tokens: list[int]) -> mx.array:
    logits: mx.array = model(mx.array([tokens]), cache=make_prompt_cache(model))
    return logits[0, -1].astype(mx.float32)
