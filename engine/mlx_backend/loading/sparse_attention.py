"""Sparse attention that begins behind thousands of tokens, made to begin within a few."""

from collections.abc import Iterator
from contextlib import contextmanager

from mlx.nn.layers.base import Module

_EARLY = {"index_block_size": 4, "index_topk_blocks": 1, "index_local_blocks": 1}
"""What mlx-lm's modules call the keys of a block, how many blocks a query sees, and how many of
these are the last, whatever the scores: with one of each no rounding decides.
"""


@contextmanager
def sparse_early(model: Module) -> Iterator[None]:
    """Meanwhile short prompts have more blocks of keys than a query sees."""
    sparse = [
        vars(module) for _, module in model.named_modules() if _EARLY.keys() <= vars(module).keys()
    ]
    own = [{name: attributes[name] for name in _EARLY} for attributes in sparse]
    try:
        for attributes in sparse:
            attributes.update(_EARLY)
        yield
    finally:
        for attributes, before in zip(sparse, own, strict=True):
            attributes.update(before)
