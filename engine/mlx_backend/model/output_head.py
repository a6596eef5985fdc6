"""The model's projection to its vocabulary, computed for those tokens alone whose logits are read.

A model of mlx-lm projects every token that it is given: for a prompt, all but the last in vain.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models.cache import make_prompt_cache


class OutputHead:
    """Says which tokens a model's last projection, that to the logits, takes."""

    def __init__(self) -> None:
        self._head: Module | None = None  # the one that makes the logits
        self._latest: Module | None = None
        self._tokens: mx.array | None = None

    @contextmanager
    def only(self, tokens: mx.array) -> Iterator[None]:
        """Meanwhile the model's logits are `[len(tokens), 1, vocabulary]`, of the tokens with these
        indices into what it is given, `[rows, length]`, counted row by row.
        """
        self._tokens = tokens
        try:
            yield
        finally:
            self._tokens = None

    def find(self, model: Module) -> None:
        """Which of the projections makes the logits: the last that a forward comes to.

        Raises whatever the model raises.
        """
        self._latest = None
        model(mx.zeros((1, 2), mx.int32), cache=make_prompt_cache(model))
        self._head, self._latest = self._latest, None

    def taken(self, projection: Module, hidden: mx.array) -> mx.array:
        """The part of `hidden`, `[rows, length, dim]`, that a projection takes."""
        self._latest = projection
        if self._tokens is None or projection is not self._head:
            return hidden
        return hidden.reshape(-1, hidden.shape[-1])[self._tokens][:, None]


def install(model: Module, vocab_size: int) -> OutputHead:
    """Let the model's projections to the vocabulary ask an `OutputHead` which tokens they take.

    Its logits are those that they were, but within `OutputHead.only`. A model that has none of
    mlx's own projections is left as it is. Raises whatever the model raises.
    """
    head = OutputHead()
    for _, module in model.named_modules():
        if isinstance(module, Linear | QuantizedLinear):
            kind = _asking_linear(type(module), head)
        elif isinstance(module, Embedding | QuantizedEmbedding):
            kind = _asking_embedding(type(module), head)
        else:
            continue
        if module.weight.shape[0] == vocab_size:
            module.__class__ = kind
    head.find(model)
    return head


def _asking_linear(kind: type[Any], head: OutputHead) -> type[Any]:
    """The same class, whose instances ask."""

    class Asking(kind):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            projected: mx.array = super().__call__(head.taken(self, x))
            return projected

    return Asking


def _asking_embedding(kind: type[Any], head: OutputHead) -> type[Any]:
    """The same class, whose instances ask when they are a tied output projection."""

    class Asking(kind):  # type: ignore[misc]
        def as_linear(self, x: mx.array) -> mx.array:
            projected: mx.array = super().as_linear(head.taken(self, x))
            return projected

    return Asking
