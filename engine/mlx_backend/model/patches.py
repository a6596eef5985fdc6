"""What is put into a loaded model of mlx-lm: its output head, adapters, faster parts on a CPU."""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

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


def install_output_head(model: Module, vocab_size: int) -> OutputHead:
    """Let the model's projections to the vocabulary ask an `OutputHead` which tokens they take.

    Its logits are those that they were, but within `OutputHead.reading`. A model that has none of
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


NO_ADAPTER = ""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one projection: `a`, `[inputs, rank]`, and `b`, `[rank, outputs]`."""

    a: mx.array
    b: mx.array


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter under its name: what it adds, by the paths of the projections in the model."""

    name: str
    fingerprint: str  # changes with its files
    added: Mapping[str, LowRank]


class RowAdapters:
    """Says which adapter each row of a forward takes. `names` are those that there are."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self._index = {name: index for index, name in enumerate((NO_ADAPTER, *names))}
        self.indices: mx.array | None = None  # [rows], 0 is none; None: no row takes any

    @contextmanager
    def of(self, rows: Sequence[str]) -> Iterator[None]:
        """Meanwhile the rows of what the model is given take the adapters of these names.

        Rows that all take the same one are multiplied as one.
        """
        with self.using(self.indices_of(rows if len(set(rows)) > 1 else rows[:1])):
            yield

    def indices_of(self, rows: Sequence[str]) -> mx.array | None:
        """For `using`; None where no row takes any."""
        if not any(rows):
            return None
        return mx.array([self._index[name] for name in rows], mx.uint32)

    @contextmanager
    def using(self, indices: mx.array | None) -> Iterator[None]:
        """Meanwhile the rows take the adapters with these indices, `[rows]`, or `[1]` for all."""
        self.indices = indices
        try:
            yield
        finally:
            self.indices = None


def install_adapters(model: Module, adapters: Sequence[Adapter]) -> RowAdapters:
    """Let the projections that adapters change ask which of them each row takes.

    Where no row takes any, and for what no adapter changes, the model computes what it did before.
    """
    rows = RowAdapters([adapter.name for adapter in adapters])
    modules = dict(model.named_modules())
    for path in {path: None for adapter in adapters for path in adapter.added}:
        projection = modules[path]
        of_each = [adapter.added.get(path) for adapter in adapters]
        dtype = adapter_dtype(projection, mx.default_device())
        projection.adapters_a, projection.adapters_b = _stacked(of_each, dtype)
        projection.__class__ = _adapted(type(projection), rows)
    return rows


def adapter_dtype(projection: Module, device: mx.Device) -> mx.Dtype:
    """What the matrices of an adapter come in: the dtype that a projection computes in; on a CPU
    float32, for MLX has no `gather_mm` of others there.
    """
    if device == mx.cpu:
        return mx.float32
    scales_or_weight: mx.array = projection.get("scales", projection.weight)
    is_float = mx.issubdtype(scales_or_weight.dtype, mx.floating)
    return scales_or_weight.dtype if is_float else mx.float32  # scales may be bytes


def _stacked(of_each: Sequence[LowRank | None], dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """A `[adapters + 1, inputs, rank]` and B `[adapters + 1, rank, outputs]`, of the highest rank.

    The first is that of rows which take none: zeros, as all that is padded, and what an adapter
    does not change.
    """
    given = [added for added in of_each if added is not None]
    inputs, outputs = given[0].a.shape[0], given[0].b.shape[1]
    rank = max(added.a.shape[1] for added in given)
    nothing = LowRank(mx.zeros((inputs, rank)), mx.zeros((rank, outputs)))
    all_of = [nothing, *(nothing if added is None else _padded(added, rank) for added in of_each)]
    a, b = mx.stack([added.a for added in all_of]), mx.stack([added.b for added in all_of])
    return a.astype(dtype), b.astype(dtype)


def _padded(added: LowRank, rank: int) -> LowRank:
    missing = rank - added.a.shape[1]
    a, b = added.a.astype(mx.float32), added.b.astype(mx.float32)
    return LowRank(mx.pad(a, [(0, 0), (0, missing)]), mx.pad(b, [(0, missing), (0, 0)]))


def _adapted(kind: type[Any], rows: RowAdapters) -> type[Any]:
    """The same class, whose instances add what the adapters of their rows do."""

    class Adapted(kind):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            projected: mx.array = super().__call__(x)
            if rows.indices is None:
                return projected
            by_row = x.reshape(rows.indices.size, -1, x.shape[-1])
            low = mx.gather_mm(by_row, self.adapters_a, rhs_indices=rows.indices)
            added = mx.gather_mm(low, self.adapters_b, rhs_indices=rows.indices)
            return projected + added.reshape(projected.shape).astype(projected.dtype)

    return Adapted


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


Tables: TypeAlias = tuple[mx.array, mx.array]
"""Cosines and sines, to be broadcast over `[rows, heads, length, dims / 2]`."""

_mlx_rope = mx.fast.rope


@contextmanager
def shared_tables() -> Iterator[None]:
    """Within the context `mx.fast.rope` computes the tables of equal arguments once.

    Positions are equal where they are the same array, or the same number. For one thread at a time:
    MLX's function is replaced for the process.
    """
    tables = dict[Hashable, tuple[Tables, object]]()

    def rope(
        a: mx.array,
        dims: int,
        *,
        traditional: bool,
        base: float | None = None,
        scale: float = 1.0,
        offset: int | mx.array = 0,
        freqs: mx.array | None = None,
        stream: Any = None,
    ) -> mx.array:
        if a.dtype != mx.float32 or a.ndim != 4:
            return _mlx_rope(
                a, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs
            )
        at = id(offset) if isinstance(offset, mx.array) else offset
        key = at, a.shape[2], dims, base, scale, None if freqs is None else id(freqs)
        if key not in tables:
            positions = mx.arange(a.shape[2], dtype=mx.float32) + _column(offset)
            angles = (positions * scale)[..., None] * _inverse_frequencies(dims, base, freqs)
            tables[key] = (mx.cos(angles), mx.sin(angles)), (offset, freqs)  # they keep their ids
        return _rotated(a, dims, traditional, *tables[key][0])

    mx.fast.rope = rope
    try:
        yield
    finally:
        mx.fast.rope = _mlx_rope


def _column(offset: int | mx.array) -> mx.array | int:
    """Offsets `[rows]` to be broadcast over `[rows, heads, length]`."""
    if isinstance(offset, mx.array) and offset.ndim == 1:
        return offset[:, None, None]
    return offset


def _inverse_frequencies(dims: int, base: float | None, freqs: mx.array | None) -> mx.array:
    if freqs is not None:
        return mx.reciprocal(freqs)
    assert base is not None, "rope has neither a base nor frequencies"
    half = dims // 2
    return mx.exp(mx.arange(half, dtype=mx.float32) * (-math.log(base) / half))


def _rotated(
    a: mx.array, dims: int, traditional: bool, cosines: mx.array, sines: mx.array
) -> mx.array:
    """The first `dims` dimensions rotated: in pairs of neighbours, or of both halves."""
    half = dims // 2
    if traditional:
        first, second = a[..., 0:dims:2], a[..., 1:dims:2]
    else:
        first, second = a[..., :half], a[..., half:dims]
    turned = [first * cosines - second * sines, first * sines + second * cosines]
    if traditional:
        turned = [mx.stack(turned, axis=-1).reshape(*a.shape[:-1], dims)]
    if dims < a.shape[-1]:
        turned.append(a[..., dims:])
    return turned[0] if len(turned) == 1 else mx.concatenate(turned, axis=-1)
