"""Images in a forward: features in place of embeddings, and rotary positions with three axes.

A model is mlx-lm's text model, unchanged. Where a forward computes tokens that stand for parts of
images, the embedding returns the images' features for these tokens, the first layers add further
features (deepstack), and rotary embeddings take a position for each axis (M-RoPE). All three are
overrides that do nothing in a forward without images.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.positional_encoding import RoPE
from mlx.nn.layers.quantized import QuantizedEmbedding

from engine.mlx_backend.model.batching import ForwardBatch
from engine.mlx_backend.model.patches import inverse_frequencies, override, rotated
from engine.mlx_backend.model.sequences import Positions
from engine.values.images import Image


class Features(NamedTuple):
    """An image as the text model is given it: `[tokens, dimensions]`, and what is added after its
    first layers, each in the same shape.
    """

    embeddings: mx.array
    added: tuple[mx.array, ...] = ()

    def part(self, first: int, n: int) -> "Features":
        """Those of `n` tokens, from the image's token `first` on."""
        own = slice(first, first + n)
        return Features(self.embeddings[own], tuple(each[own] for each in self.added))


@dataclass(frozen=True, slots=True)
class Axes:
    """Rotary embeddings whose frequencies take their positions from three axes.

    `axis_of`: the axis of each frequency. `merge`: the patches along each side of an image's part.
    """

    axis_of: tuple[int, ...]
    merge: int

    @classmethod
    def of(cls, section: Sequence[int], is_interleaved: bool, merge: int) -> "Axes":
        """`section`: the number of frequencies of each axis. They come axis by axis, or the axes
        take turns as long as they have some.
        """
        if not is_interleaved:
            axes = [axis for axis, n in enumerate(section) for _ in range(n)]
            return cls(tuple(axes), merge)
        axes = [0] * sum(section)
        for axis in (1, 2):
            axes[axis : 3 * section[axis] : 3] = [axis] * section[axis]
        return cls(tuple(axes), merge)


class _Placed(NamedTuple):
    """The images of a forward. `indices`: of the tokens, counted over the forward's shape. `axes`:
    the rotary positions, `[3, rows, length]`; None in a model without such axes.
    """

    indices: mx.array
    features: Features
    axes: mx.array | None
    tables: dict[tuple[int, float, float], tuple[mx.array, mx.array]]


class ImageInputs:
    """What a model is given of images, in the forward that is being built.

    `merge`: see `Axes`; None in a model without axes. `text_id`: the token that the model is given
    in place of those that stand for parts of images, in case it looks them up elsewhere than in its
    embedding. `windows_only`: tokens of an image that is computed whole see each other in layers
    with a window alone.
    """

    def __init__(
        self,
        features: Callable[[Image], Features],
        axes: Axes | None = None,
        text_id: int = 0,
        windows_only: bool = False,
    ) -> None:
        """`features`: those of an image, which has been encoded."""
        self.merge = None if axes is None else axes.merge
        self.text_id = text_id
        self.windows_only = windows_only
        self._features = features
        self._axes = axes
        self._placed: _Placed | None = None

    @contextmanager
    def of(self, batch: ForwardBatch) -> Iterator[None]:
        """Within the context the model computes the images of these spans."""
        self._placed = self._place(batch)
        try:
            yield
        finally:
            self._placed = None

    def _place(self, batch: ForwardBatch) -> _Placed | None:
        indices, pieces, axes, base = list[Positions](), list[Features](), list[Positions](), 0
        for group in batch.row_groups:
            length = max(span.n_tokens for span in group)
            for span in group:
                images = span.images
                for part in () if images is None else images.parts(span.start, span.n_tokens):
                    indices.append(np.arange(part.n, dtype=np.int32) + (base + part.at))
                    pieces.append(self._features(part.image).part(part.first, part.n))
                base += length
        if not pieces:
            return None
        for span in batch.spans if self._axes is not None else ():
            if span.images is None:
                row = np.arange(span.start, span.stop, dtype=np.int32)[None].repeat(3, axis=0)
            else:
                row = span.images.axes(span.start, span.n_tokens)
            padding = length - span.n_tokens if len(batch.row_groups) == 1 else 0
            axes.append(np.pad(row, ((0, 0), (0, padding)), mode="edge"))
        shape = (3, base, 1) if len(batch.row_groups) > 1 else (3, base // length, length)
        added = zip(*(piece.added for piece in pieces), strict=True)
        return _Placed(
            mx.array(np.concatenate(indices)),
            Features(
                mx.concatenate([piece.embeddings for piece in pieces]),
                tuple(mx.concatenate(list(each)) for each in added),
            ),
            mx.array(np.concatenate(axes, axis=1).reshape(shape)) if axes else None,
            {},
        )

    def text_ids(self, tokens: mx.array) -> mx.array:
        """The tokens `[rows, length]` as the model is given them."""
        if self._placed is None:
            return tokens
        flat = tokens.reshape(-1)
        flat[self._placed.indices] = self.text_id
        return flat.reshape(tokens.shape)

    def placed(self, hidden: mx.array) -> mx.array:
        """Embeddings `[rows, length, dimensions]` with the images' in place of their tokens'."""
        if self._placed is None:
            return hidden
        flat = hidden.reshape(-1, hidden.shape[-1])
        flat[self._placed.indices] = self._placed.features.embeddings.astype(flat.dtype)
        return flat.reshape(hidden.shape)

    def deepened(self, layer: int, hidden: mx.array) -> mx.array:
        """The output of a layer with what images add to it."""
        if self._placed is None or layer >= len(self._placed.features.added):
            return hidden
        added = self._placed.features.added[layer].astype(hidden.dtype)
        flat = hidden.reshape(-1, hidden.shape[-1]).at[self._placed.indices].add(added)
        return flat.reshape(hidden.shape)

    def rotated(self, rope: RoPE, x: mx.array, offset: int | mx.array) -> mx.array:
        """What a rotary embedding makes of `x`, `[rows, heads, length, dimensions]`. Without images
        all axes are equal.
        """
        if self._placed is None or self._placed.axes is None or self._axes is None:
            call: Any = rope  # which also takes an array of positions
            plain: mx.array = call(x, offset=offset)
            return plain
        key = rope.dims, rope.base, rope.scale
        if key not in self._placed.tables:
            positions = self._placed.axes[mx.array(self._axes.axis_of)].transpose(1, 2, 0)
            frequencies = inverse_frequencies(rope.dims, rope.base, None)
            angles = (positions.astype(mx.float32) * rope.scale * frequencies)[:, None]
            self._placed.tables[key] = mx.cos(angles), mx.sin(angles)
        wide = x.astype(mx.float32)
        return rotated(wide, rope.dims, rope.traditional, *self._placed.tables[key]).astype(x.dtype)


class _AxesRope(Module):
    """A rotary embedding that takes a position for each axis where a forward has images."""

    def __init__(self, rope: RoPE, inputs: ImageInputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rope, self._inputs = rope, inputs

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return self._inputs.rotated(self._rope, x, offset)


EMBEDDING = "embed_tokens"


def install_image_inputs(
    model: Module, layers: Sequence[Module], inputs: ImageInputs, axes: Axes | None, n_added: int
) -> None:
    """Let a text model take images, whose features are added after its first `n_added` layers, too.
    Raises ValueError for a model that cannot.
    """

    def embedded(kind: type[Any]) -> Callable[[Any, mx.array], mx.array]:
        return lambda layer, x: inputs.placed(kind.__call__(layer, x))

    embeddings = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == EMBEDDING
        and isinstance(module, Embedding | QuantizedEmbedding)
    ]
    if len(embeddings) != 1:
        raise ValueError(f"its text model has {len(embeddings)} embeddings, not one")
    override(embeddings[0], "__call__", embedded)
    for index, layer in enumerate(layers[:n_added]):
        override(layer, "__call__", _deepening(inputs, index))
    if axes is not None:
        _install_axes(model, inputs, axes)


def _deepening(inputs: ImageInputs, index: int) -> Callable[[type[Any]], Callable[..., mx.array]]:
    def deepened(kind: type[Any]) -> Callable[..., mx.array]:
        return lambda layer, *args, **named: inputs.deepened(
            index, kind.__call__(layer, *args, **named)
        )

    return deepened


def _install_axes(model: Module, inputs: ImageInputs, axes: Axes) -> None:
    found = [module for _, module in model.named_modules() if "rope" in module]
    others = {type(module.rope).__name__ for module in found} - {RoPE.__name__}
    if others or not found:
        raise ValueError(f"its rotary embedding is {', '.join(others) or 'not found'}")
    for module in found:
        if module.rope.dims != 2 * len(axes.axis_of):
            raise ValueError(
                f"config.json names axes of {len(axes.axis_of)} frequencies, and its rotary "
                f"embedding has {module.rope.dims // 2}"
            )
        module.rope = _AxesRope(module.rope, inputs)
