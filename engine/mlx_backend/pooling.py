"""From hidden states to the vectors of prompts, or to a classifier's scores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.core.step import SequenceId, Vector
from engine.mlx_backend.model.cached_model import Computed
from engine.values.request import Pooling


@dataclass(frozen=True, slots=True)
class PendingVectors:
    """Vectors, `[sequences, width]`, perhaps still to be computed."""

    sequence_ids: Sequence[SequenceId]
    vectors: mx.array

    def read(self) -> Iterator[tuple[SequenceId, Vector]]:
        return zip(self.sequence_ids, np.array(self.vectors), strict=True)


class Pooler:
    """Pools the hidden states that the model projects to its logits. All lazy, in float32."""

    def __init__(self, classifier: mx.array | None = None) -> None:
        """`classifier`: `[labels, dimensions]`; without one the hidden states are the vectors.

        Pooling sums, so a classifier may be applied before.
        """
        self._classifier = classifier

    def rows(
        self, computed: Computed, indices: Sequence[int], ids: Sequence[SequenceId]
    ) -> PendingVectors:
        """A vector for each of some tokens, by their index among those that are read."""
        return PendingVectors(ids, self._projected(_hidden(computed)[mx.array(list(indices))]))

    def chunk(self, computed: Computed, pooling: Pooling | None, id: SequenceId) -> PendingVectors:
        """A chunk's share of its prompt's vector, from the hidden states of all its tokens."""
        hidden = _hidden(computed)
        pooled = hidden[:1] if pooling is Pooling.FIRST else hidden
        return PendingVectors([id], self._projected(pooled).sum(axis=0, keepdims=True))

    def _projected(self, hidden: mx.array) -> mx.array:
        states = hidden.astype(mx.float32)
        return states if self._classifier is None else states @ self._classifier.T


HIDDEN_STATES = Pooler()
"""The hidden states as they are."""


def _hidden(computed: Computed) -> mx.array:
    assert computed.hidden is not None, "a model is pooled whose hidden states cannot be had"
    return computed.hidden
