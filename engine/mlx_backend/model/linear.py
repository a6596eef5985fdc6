"""Linear layers that do not transpose their weights anew in each forward."""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear


class TransposedWeights:
    """The weights of a model's linear layers as they are multiplied, `[inputs, outputs]`: views."""

    def __init__(self, model: Module) -> None:
        self._for_rows = {
            id(module): module.weight.T
            for _, module in model.named_modules()
            if isinstance(module, Linear)
        }
        # For [1, 1, inputs]: MLX would make that two-dimensional before the product, and after it
        # three-dimensional again.
        self._for_one = {name: weights[None] for name, weights in self._for_rows.items()}
        mx.eval(self._for_rows, self._for_one)

    @contextmanager
    def used(self, rows: int) -> Iterator[None]:
        """Meanwhile `nn.Linear` multiplies `[rows, 1, inputs]` by these. For one thread at a time:
        the method of the class is replaced.
        """
        original, by_layer = Linear.__call__, self._for_rows if rows > 1 else self._for_one

        def call(layer: Linear, x: mx.array) -> mx.array:
            weights = by_layer.get(id(layer))
            if weights is None or x.ndim != 3:
                return original(layer, x)
            if "bias" in layer:
                return mx.addmm(layer["bias"], x, weights)
            return x @ weights

        Linear.__call__ = call  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Linear.__call__ = original  # type: ignore[method-assign]
