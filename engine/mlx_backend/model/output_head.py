"""The model's projection to its vocabulary, computed for those tokens alone whose logits are read.

A model of mlx-lm projects every token that it is given: for a prompt, all but the last in vain.
What it projects are its hidden states behind the last norm, which are pooled for embeddings.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models.cache import make_prompt_cache


@dataclass(slots=True)
class Reading:
    """A forward whose logits are read for some `tokens`; None: for all. `hidden`: what has been
    projected, `[tokens, 1, dimensions]`, or of all tokens in their shape.
    """

    tokens: mx.array | None
    hidden: mx.array | None = None


class OutputHead:
    """Says which tokens a model's last projection, that to the logits, takes.

    `dimensions`: of the hidden states that are projected; 0 where no projection is known.
    """

    def __init__(self) -> None:
        self._head: Module | None = None  # the one that makes the logits
        self._latest: tuple[Module, int] | None = None  # with its dimensions
        self._reading: Reading | None = None
        self.dimensions = 0

    @contextmanager
    def reading(self, tokens: mx.array | None) -> Iterator[Reading]:
        """Meanwhile the model's logits are `[len(tokens), 1, vocabulary]`, of the tokens with these
        indices into what it is given, `[rows, length]`, counted row by row; None: of all.
        """
        self._reading = Reading(tokens)
        try:
            yield self._reading
        finally:
            self._reading = None

    def find(self, model: Module) -> None:
        """Which of the projections makes the logits: the last that a forward comes to.

        Raises whatever the model raises.
        """
        self._latest = None
        model(mx.zeros((1, 2), mx.int32), cache=make_prompt_cache(model))
        if self._latest is not None:
            self._head, self.dimensions = self._latest
        self._latest = None

    def taken(self, projection: Module, hidden: mx.array) -> mx.array:
        """The part of `hidden`, `[rows, length, dim]`, that a projection takes."""
        self._latest = projection, hidden.shape[-1]
        if self._reading is None or projection is not self._head:
            return hidden
        if self._reading.tokens is not None:
            hidden = hidden.reshape(-1, hidden.shape[-1])[self._reading.tokens][:, None]
        self._reading.hidden = hidden
        return hidden

    def rows(self, token_ids: Sequence[int]) -> mx.array:
        """What the projection multiplies hidden states by for these tokens, float32 `[tokens,
        dimensions]`. Raises ValueError where no projection is known.
        """
        head, ids = self._head, mx.array(list(token_ids))
        if head is None:
            raise ValueError("the model's projection to its logits is not known")
        rows = head.weight[ids]
        if isinstance(head, QuantizedLinear | QuantizedEmbedding):
            biases = head.get("biases")
            rows = mx.dequantize(
                rows,
                head.scales[ids],
                None if biases is None else biases[ids],
                group_size=head.group_size,
                bits=head.bits,
                mode=head.mode,
            )
        wide: mx.array = rows.astype(mx.float32)
        return wide


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
