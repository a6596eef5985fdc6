"""Changes to a loaded mlx-lm model: its output head, adapters, and faster parts for CPUs."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
from blake3 import blake3
from mlx.nn.layers.base import Module
from mlx.nn.layers.distributed import AllToShardedLinear, QuantizedAllToShardedLinear
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear

_DIVIDED = AllToShardedLinear, QuantizedAllToShardedLinear
"""Projections of which each rank has a part of the outputs."""

Project: TypeAlias = Callable[[Any, mx.array], mx.array]
"""A method of a module that projects vectors."""


def override(module: Module, name: str, make: Callable[[type[Any]], Project]) -> None:
    """Override a method of this module alone, with what `make` returns for its class. The override
    looks the class's method up at each call: `TransposedWeights` replaces it for a while.
    """
    kind: type[Any] = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: make(kind)})


@dataclass(slots=True)
class Reading:
    """A forward of which the logits of some `tokens` are read; None: of all. `hidden`: the states
    that have been projected, `[tokens, 1, dimensions]`, or those of all tokens in their shape.
    """

    tokens: mx.array | None
    hidden: mx.array | None = None


class OutputHead:
    """Chooses the tokens that a model's last projection, that to the logits, computes.

    `dimensions`: of the hidden states that are projected; 0 where no projection is known.
    """

    def __init__(self) -> None:
        self._head: Module | None = None  # the projection that makes the logits
        self._latest: tuple[Module, int] | None = None  # with its dimensions
        self._reading: Reading | None = None
        self.dimensions = 0

    @contextmanager
    def reading(self, tokens: mx.array | None) -> Iterator[Reading]:
        """Within the context the model's logits are `[len(tokens), 1, vocabulary]`, of the tokens
        with these indices into its input, `[rows, length]`, counted row by row; None: of all.
        """
        self._reading = Reading(tokens)
        try:
            yield self._reading
        finally:
            self._reading = None

    def find(self, model: Module) -> None:
        """Find the projection that makes the logits: the last that a forward calls.

        Raises whatever the model raises.
        """
        self._latest = None
        model(mx.zeros((1, 2), mx.int32), cache=make_prompt_cache(model))
        if self._latest is not None:
            self._head, self.dimensions = self._latest
        self._latest = None

    def taken(self, projection: Module, hidden: mx.array) -> mx.array:
        """The part of `hidden`, `[rows, length, dim]`, that a projection computes."""
        self._latest = projection, hidden.shape[-1]
        if self._reading is None or projection is not self._head:
            return hidden
        if self._reading.tokens is not None:
            hidden = hidden.reshape(-1, hidden.shape[-1])[self._reading.tokens][:, None]
        self._reading.hidden = hidden
        return hidden

    def rows(self, token_ids: Sequence[int]) -> mx.array:
        """The projection's rows of these tokens, by which hidden states are multiplied: float32
        `[tokens, dimensions]`. Raises ValueError where no projection is known.
        """
        head, ids = self._head, mx.array(list(token_ids))
        if head is None:
            raise ValueError("the model's projection to its logits is not known")
        if isinstance(head, _DIVIDED):
            raise ValueError("the model's projection to its logits is divided among ranks")
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
    """Let the model's projections to the vocabulary, tied or not, compute the tokens that an
    `OutputHead` chooses.

    Outside of `OutputHead.reading` the logits stay as they were. A model that has none of mlx's own
    projections is left as it is. Raises whatever the model raises.
    """
    head = OutputHead()

    def linear(kind: type[Any]) -> Project:
        return lambda layer, x: kind.__call__(layer, head.taken(layer, x))

    def tied(kind: type[Any]) -> Project:
        return lambda layer, x: kind.as_linear(layer, head.taken(layer, x))

    for _, module in model.named_modules():
        if isinstance(module, Linear | QuantizedLinear) and module.weight.shape[0] == vocab_size:
            override(module, "__call__", linear)
        elif (
            isinstance(module, _DIVIDED)
            and module.weight.shape[0] * module.group.size() == vocab_size
        ):
            override(module, "__call__", linear)  # and the model gathers what all ranks project
        elif (
            isinstance(module, Embedding | QuantizedEmbedding)
            and module.weight.shape[0] == vocab_size
        ):
            override(module, "as_linear", tied)
    head.find(model)
    return head


NO_ADAPTER = ""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a projection of the model: `scale` times the product with `a`,
    `[inputs, rank]`, and `b`, `[rank, outputs]`.
    """

    projection: Module
    a: mx.array
    b: mx.array
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter under its name: what it adds, by the paths of the projections in the model."""

    name: str
    fingerprint: str  # changes with its files
    added: Mapping[str, LowRank]


class RowAdapters:
    """The adapters of a model, and the choice of one for each row of a forward."""

    def __init__(self, adapters: Sequence[Adapter] = ()) -> None:
        self.names = tuple(adapter.name for adapter in adapters)
        self._index = {name: index for index, name in enumerate((NO_ADAPTER, *self.names))}
        self._adapters = {adapter.name: adapter for adapter in adapters}
        self._projections = {
            path: low.projection for each in adapters for path, low in each.added.items()
        }
        self._stacked = {
            path: _stacked([each.added.get(path) for each in adapters], adapter_dtype(projection))
            for path, projection in self._projections.items()
        }
        self.indices: mx.array | None = None  # [rows], 0 is none; None: no row has any

    @property
    def weight_bytes(self) -> int:
        """The memory of the adapters' matrices."""
        return sum(matrix.nbytes for pair in self._stacked.values() for matrix in pair)

    @contextmanager
    def of(self, rows: Sequence[str]) -> Iterator[None]:
        """Within the context the rows of the model's input have the adapters of these names.

        Rows that all have the same one are multiplied as one.
        """
        with self.using(self.indices_of(rows if len(set(rows)) > 1 else rows[:1])):
            yield

    def indices_of(self, rows: Sequence[str]) -> mx.array | None:
        """The argument of `using`; None where no row has an adapter."""
        if not any(rows):
            return None
        return mx.array([self._index[name] for name in rows], mx.uint32)

    @contextmanager
    def using(self, indices: mx.array | None) -> Iterator[None]:
        """Within the context the rows have the adapters with these indices, `[rows]`, or `[1]` for
        all rows.
        """
        self.indices = indices
        try:
            yield
        finally:
            self.indices = None

    @contextmanager
    def by_mlx_lm(self, model: Module, name: str) -> Iterator[None]:
        """Within the context the model has mlx-lm's own layers with the adapter of this name, or
        with none. Only before `install`.
        """
        added = self._adapters[name].added if name else {}
        layers = [(path, _lora(low)) for path, low in added.items()]
        model.update_modules(tree_unflatten(layers))
        try:
            yield
        finally:
            plain = [(path, low.projection) for path, low in added.items()]
            model.update_modules(tree_unflatten(plain))

    def install(self) -> None:
        """Let the projections that adapters change add what each row's adapter adds.

        A forward in which no row has an adapter is computed as before, and so are the projections
        that no adapter changes.
        """
        for path, projection in self._projections.items():
            projection.adapters_a, projection.adapters_b = self._stacked[path]
            override(projection, "__call__", self._adapted)
        mx.eval(self._stacked)
        self._adapters = {}

    def _adapted(self, kind: type[Any]) -> Project:
        def call(layer: Any, x: mx.array) -> mx.array:
            projected: mx.array = kind.__call__(layer, x)
            if self.indices is None:
                return projected
            by_row = x.reshape(self.indices.size, -1, x.shape[-1])
            low = mx.gather_mm(by_row, layer.adapters_a, rhs_indices=self.indices)
            added = mx.gather_mm(low, layer.adapters_b, rhs_indices=self.indices)
            return projected + added.reshape(projected.shape).astype(projected.dtype)

        return call


def _lora(added: LowRank) -> Module:
    """mlx-lm's layer of a projection and what an adapter adds to it."""
    layer: Module = LoRALinear.from_base(added.projection, added.a.shape[1], scale=added.scale)
    layer.lora_a, layer.lora_b = added.a, added.b
    return layer


def adapter_dtype(projection: Module) -> mx.Dtype:
    """The dtype of an adapter's matrices: the one that the projection computes in. On a CPU it is
    float32, because MLX has no `gather_mm` of others there.
    """
    if mx.default_device() == mx.cpu:
        return mx.float32
    scales_or_weight: mx.array = projection.get("scales", projection.weight)
    is_float = mx.issubdtype(scales_or_weight.dtype, mx.floating)
    return scales_or_weight.dtype if is_float else mx.float32  # scales may be bytes


def _stacked(of_each: Sequence[LowRank | None], dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """A `[adapters + 1, inputs, rank]` and B `[adapters + 1, rank, outputs]`, of the highest rank.

    The first ones belong to rows without an adapter. They are zeros, as is all padding, and the
    matrices of an adapter that does not change this projection.
    """
    given = [added for added in of_each if added is not None]
    inputs, outputs = given[0].a.shape[0], given[0].b.shape[1]
    rank = max(added.a.shape[1] for added in given)
    all_a, all_b = [mx.zeros((inputs, rank))], [mx.zeros((rank, outputs))]
    for added in of_each:
        if added is None:
            all_a.append(all_a[0])
            all_b.append(all_b[0])
            continue
        missing = rank - added.a.shape[1]
        all_a.append(mx.pad(added.a.astype(mx.float32), [(0, 0), (0, missing)]))
        scaled = added.scale * added.b.astype(mx.float32)
        all_b.append(mx.pad(scaled, [(0, missing), (0, 0)]))
    return mx.stack(all_a).astype(dtype), mx.stack(all_b).astype(dtype)


class TransposedWeights:
    """Views of the weights of a model's linear layers, transposed as they are multiplied:
    `[inputs, outputs]`.
    """

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
        """Within the context `nn.Linear` multiplies `[rows, 1, inputs]` by these views. For one
        thread at a time: the method of the class is replaced.
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
            first = offset
            if isinstance(offset, mx.array) and offset.ndim == 1:
                first = offset[:, None, None]  # over [rows, heads, length]
            positions = mx.arange(a.shape[2], dtype=mx.float32) + first
            angles = (positions * scale)[..., None] * inverse_frequencies(dims, base, freqs)
            # The arguments are kept, so that no other array gets their id.
            tables[key] = (mx.cos(angles), mx.sin(angles)), (offset, freqs)
        return rotated(a, dims, traditional, *tables[key][0])

    mx.fast.rope = rope
    try:
        yield
    finally:
        mx.fast.rope = _mlx_rope


def rope_digest() -> str:
    """16 digits that depend on how `shared_tables` rotates fixed numbers on this device. Keys that
    other code has rotated are not mixed with those of this one.
    """
    numbers = (mx.arange(8 * 64, dtype=mx.float32) / 64).reshape(1, 1, 8, 64)
    with shared_tables():
        rotated = [
            mx.fast.rope(
                numbers, 48, traditional=traditional, base=10_000.0, scale=1.0, offset=12_345
            )
            for traditional in (False, True)
        ]
    return blake3(bytes(mx.concatenate(rotated).reshape(-1).view(mx.uint8))).hexdigest(length=8)


def inverse_frequencies(dims: int, base: float | None, freqs: mx.array | None) -> mx.array:
    if freqs is not None:
        return mx.reciprocal(freqs)
    assert base is not None, "rope has neither a base nor frequencies"
    half = dims // 2
    return mx.exp(mx.arange(half, dtype=mx.float32) * (-math.log(base) / half))


def rotated(
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
