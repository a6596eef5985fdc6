"""A model's arrays by name."""

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten


def named_weights(model: Module) -> dict[str, mx.array]:
    """Every parameter, by its dotted path."""
    return dict(tree_flatten(model.parameters()))


def weight_bytes(model: Module) -> int:
    return sum(array.nbytes for array in named_weights(model).values())
