"""A model over the storage of all groups: computes spans of sequences through cache views, and
pools the hidden states of prompts that are embedded or scored.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from engine.core.step import SequenceId, Vector
from engine.mlx_backend.kv.layout import Layout
from engine.mlx_backend.kv.storage import Storage
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.model.batching import (
    FORWARD_TOKENS,
    Batching,
    ForwardBatch,
    ForwardCost,
    StepForwards,
)
from engine.mlx_backend.model.images import ImageInputs
from engine.mlx_backend.model.patches import OutputHead, RowAdapters, shared_tables
from engine.mlx_backend.model.rows import TokenSpan
from engine.mlx_backend.model.views import state_slots, views_of
from engine.values.request import Pooling


@dataclass(frozen=True, slots=True)
class Execution:
    """How a model runs over shared storage, as the check at load has found out.

    `images`: what it is given of images; None: it takes none, and `images_refused` says why if its
    checkpoint has a vision tower. `deviation`: the largest error of its
    logits there, relative to their size. `rejected`: the executions tried before, each with the
    reason against it.
    """

    batching: Batching
    attention: Attention
    head: OutputHead
    adapters: RowAdapters = field(default_factory=RowAdapters)
    images: ImageInputs | None = None
    images_refused: str = ""
    deviation: float = 0.0
    rejected: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Computed:
    """A forward that has been built and not evaluated.

    `logits`: `[tokens, vocabulary]`, of the tokens that are read, span after span; of all tokens
    where none are. `hidden`: `[tokens, dimensions]`, the states from which the logits were
    projected, where they are known. Evaluating `fences` completes all that the forward writes to
    the storage; unlike the storage's own arrays they may be evaluated while another forward is in
    flight. `first_layer`: the fences of the first layer that writes K and V; all fences where there
    is no such layer.
    """

    logits: mx.array
    hidden: mx.array | None
    fences: list[mx.array]
    first_layer: list[mx.array]


class CachedModel:
    """Builds forwards over `storage`, one after another.

    `most_keys`: the most that one forward of several rows may read. `context_tokens`: the number of
    positions that the model has. `rotary`: the context in which the model is called. Belongs to the
    thread that made it, as all MLX arrays do.
    """

    def __init__(
        self,
        model: Module,
        layout: Layout,
        storage: Storage,
        execution: Execution,
        most_keys: float = math.inf,
        context_tokens: float = math.inf,
    ) -> None:
        self.storage = storage
        self.model = model
        self.layout = layout
        self.execution = execution
        self.most_keys = most_keys
        self.context_tokens = context_tokens
        # A GPU has one kernel for rotary embeddings, which makes no tables.
        self.rotary = shared_tables if mx.default_device() == mx.cpu else nullcontext

    @property
    def n_groups(self) -> int:
        """The number of the store's groups; a span has a table of each."""
        return len(self.layout.windows) + bool(self.layout.states)

    @property
    def in_place_tokens(self) -> int:
        """Rows of up to this many tokens read blocks in place in all layers."""
        attention, storage = self.execution.attention, self.storage
        if not attention.in_place_tokens:
            return 0
        arenas = (arena for arena in (storage.full, *storage.windows) if arena.layers)
        return attention.in_place_tokens if all(map(attention.covers, arenas)) else 0

    def arrange(
        self, spans: Sequence[TokenSpan], forward_tokens: int = FORWARD_TOKENS
    ) -> StepForwards:
        """The forwards that compute these spans; `forward_tokens` as in `ForwardCost`."""
        cost = ForwardCost(
            forward_tokens,
            self.execution.attention.padding_keys,
            self.most_keys,
            len(self.layout.specs),
            self.context_tokens,
            self.in_place_tokens,
        )
        return self.execution.batching.arrange(spans, cost)

    def forward(self, batch: ForwardBatch, token_ids: mx.array) -> Computed:
        """Build one forward. `token_ids`: those of the step, which the batch's spans index.

        Raises whatever the model raises; the spans' blocks and states are undefined then.
        """
        attention = self.execution.attention
        try:
            return self._forward(batch, token_ids, attention)
        except Exception as error:
            if attention.fallback is None:
                raise
            # K and V that were written are written again, with the same numbers.
            try:
                computed = self._forward(batch, token_ids, attention.fallback)
            except Exception:
                raise error from None  # so it was not the attention's
            attention.give_up(error)
            return computed

    def _forward(self, batch: ForwardBatch, token_ids: mx.array, attention: Attention) -> Computed:
        execution, states = self.execution, self.storage.states
        images = execution.images
        views = views_of(self.storage, self.layout, attention, execution.batching, batch, images)
        tokens, read = token_ids[mx.array(batch.token_indices())], batch.read_indices()
        is_partial = read.size not in (0, tokens.size)
        with (
            nullcontext() if images is None else images.of(batch),
            self.rotary(),
            execution.adapters.of(batch.row_adapters()),
            execution.head.reading(mx.array(read) if is_partial else None) as reading,
        ):
            ids = tokens if images is None else images.text_ids(tokens)
            logits: mx.array = self.model(ids, cache=views.trees)
        if is_partial and logits.shape[:2] != (read.size, 1):
            raise ValueError("its logits cannot be computed for some tokens alone")
        if self.layout.states:
            states.write(state_slots(batch.row_groups[0]), views.states())
        first_fences = views.kv_layers[0].fences() if views.kv_layers else []
        last_fences = views.kv_layers[-1].fences() if views.kv_layers else []
        fences = first_fences + last_fences + states.unevaluated()
        hidden = reading.hidden
        return Computed(
            logits.reshape(-1, logits.shape[-1]),
            None if hidden is None else hidden.reshape(-1, hidden.shape[-1]),
            fences,
            first_fences or fences,
        )


@dataclass(frozen=True, slots=True)
class PendingVectors:
    """Vectors, `[sequences, width]`, perhaps still to be computed."""

    sequence_ids: Sequence[SequenceId]
    vectors: mx.array

    def read(self) -> Iterator[tuple[SequenceId, Vector]]:
        return zip(self.sequence_ids, np.array(self.vectors), strict=True)


class Pooler:
    """Pools the hidden states that the model projects to its logits: lazy arrays, in float32."""

    def __init__(self, classifier: mx.array | None = None) -> None:
        """`classifier`: `[labels, dimensions]`; without one the hidden states are the vectors.

        Pooling sums, so the classifier may be applied first.
        """
        self._classifier = classifier

    def rows(
        self, computed: Computed, indices: Sequence[int], ids: Sequence[SequenceId]
    ) -> PendingVectors:
        """A vector for each token of these `indices` among the tokens that are read."""
        return PendingVectors(ids, self._vectors(computed, mx.array(list(indices))))

    def chunk(self, computed: Computed, pooling: Pooling | None, id: SequenceId) -> PendingVectors:
        """A chunk's share of its prompt's vector, from the hidden states of all its tokens."""
        pooled = slice(1) if pooling is Pooling.FIRST else slice(None)
        return PendingVectors([id], self._vectors(computed, pooled).sum(axis=0, keepdims=True))

    def _vectors(self, computed: Computed, tokens: mx.array | slice) -> mx.array:
        assert computed.hidden is not None, "the model's hidden states are not known"
        states = computed.hidden[tokens].astype(mx.float32)
        return states if self._classifier is None else states @ self._classifier.T


HIDDEN_STATES = Pooler()
"""The hidden states as they are."""
