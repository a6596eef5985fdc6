"""The vision tower of a checkpoint: how it is loaded, checked, and described to the engine.

A model whose images cannot be served is served without them, and its card says why.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from engine.api import ModelError, one_line
from engine.core.images import whole_images_problem
from engine.core.step import Encode
from engine.images.layout import ImageLayout, image_layout
from engine.mlx_backend.kv.layout import RUN_ERRORS, Layout
from engine.mlx_backend.loading.checkpoint import WEIGHTS, Checkpoint
from engine.mlx_backend.loading.selfcheck import (
    Chunk,
    Row,
    deviation,
    logits_through_storage,
    tolerance,
)
from engine.mlx_backend.loading.weights import named_weights, to_float32
from engine.mlx_backend.model.batching import ForwardBatch
from engine.mlx_backend.model.cached_model import Execution
from engine.mlx_backend.model.images import ImageInputs, install_image_inputs
from engine.mlx_backend.model.patches import NO_ADAPTER
from engine.mlx_backend.model.rows import TokenSpan
from engine.mlx_backend.model.sequences import SequenceImages, SequenceTables
from engine.mlx_backend.vision.modules import NoVision
from engine.mlx_backend.vision.tower import ImageEncoder, open_tower
from engine.values.images import Image, ImageInput
from engine.values.settings import KVFormat

_IMAGE_SHARE, _FEATURE_SHARE = 8, 32
"""The tower may take an eighth of the memory to encode an image, and features a 32nd to be kept.
Images that would take more are refused, where images have any size.
"""

_LEAST_TOKENS = 64  # of the largest image, however little memory there is
_LEAST_FEATURE_BYTES, _MOST_FEATURE_BYTES = 16 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Vision:
    """A checkpoint's vision tower, and how its images stand in a prompt."""

    encoder: ImageEncoder
    layout: ImageLayout

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in named_weights(self.encoder.tower).values())

    def inputs(self) -> ImageInputs:
        """What the text model is given of images."""
        tower = self.encoder.tower
        return ImageInputs(self.encoder.features, tower.axes, tower.text_id, tower.windows_only)


def open_vision(checkpoint: Path, step_tokens: int, *, has_states: bool) -> Vision | None:
    """The vision tower of a checkpoint, whose weights stay to be read; None where there is none. On
    a CPU it is in float32. Raises NoVision where it has one that cannot be used, with steps of
    `step_tokens`, in a model that `has_states` or not.
    """
    try:
        tower = open_tower(sorted(checkpoint.glob(WEIGHTS)), Checkpoint(checkpoint).config)
        layout = None if tower is None else image_layout(checkpoint)
    except ModelError as error:
        raise NoVision(str(error)) from error
    if tower is None or layout is None:
        return None
    if layout.is_whole and (
        problem := whole_images_problem(layout.max_tokens, step_tokens, has_states=has_states)
    ):
        raise NoVision(problem)
    if mx.default_device() == mx.cpu:
        to_float32(tower)
    return Vision(ImageEncoder(tower), layout)


def read_vision(vision: Vision) -> None:
    """Read the tower's weights."""
    mx.eval(named_weights(vision.encoder.tower))


def with_images(
    model: Module, layers: Sequence[Module], layout: Layout, execution: Execution, vision: Vision
) -> Execution:
    """The execution of a model that takes images. Raises NoVision where its logits with images are
    others through shared storage than alone.
    """
    inputs, tower = vision.inputs(), vision.encoder.tower
    in_full = layout.stored_as(KVFormat.FULL)
    try:
        install_image_inputs(model, layers, inputs, tower.axes, tower.n_added)
        taking = replace(execution, images=inputs)
        error = _check(model, in_full, taking, vision)
    except (*RUN_ERRORS, OSError) as failure:
        raise NoVision(f"it does not run with images: {one_line(failure)}") from failure
    finally:
        vision.encoder.forget_all()
    if not error < tolerance(in_full):
        raise NoVision(f"its logits after an image are wrong by {error:.1%} of their size")
    return taking


def _check(model: Module, layout: Layout, execution: Execution, vision: Vision) -> float:
    """How far the logits through shared storage are from those of one forward, with two images in a
    row's text and next to a row without any.
    """
    assert execution.images is not None
    encoder, tower = vision.encoder, vision.encoder.tower
    shape, grid = tower.example()
    n_parts = tower.n_parts(grid)
    with tempfile.TemporaryDirectory() as folder:
        images = list[Image]()
        for number, start in enumerate((9, 15 + n_parts)):
            file = str(Path(folder) / f"{number}.npy")
            np.save(file, np.random.default_rng(number).random(shape, np.float32))
            runs = ((start, n_parts),)
            whole = vision.layout.is_whole
            images.append(Image(bytes([number]) * 32, runs, grid, file, whole))
            for stage in range(encoder.n_stages):
                mx.eval(encoder.encode(Encode(images[-1], stage, 1)))
    n_tokens = images[-1].stop + 12
    tokens = [(37 * i + 5) % min(layout.vocab_size, 1000) for i in range(n_tokens)]
    for image in images:
        tokens[image.start : image.stop] = [vision.layout.part] * n_parts
    placed = SequenceImages(images, execution.images.merge)
    rows = [Row(tokens, NO_ADAPTER, placed), Row(tokens[-11:], NO_ADAPTER)]
    first, second = images
    cut = -1 if vision.layout.is_whole else n_parts // 2  # the last token is computed apart
    stops = [first.stop - cut, second.start, second.stop - cut, n_tokens - 2, n_tokens - 1]
    chunks = [list(_chunks(0, [*stops, n_tokens])), list(_chunks(1, [5, 8, 9, 10, 11]))]
    steps = [[*own] for own in zip(*(part[:5] for part in chunks), strict=True)] + [chunks[0][5:]]
    expected = [
        _whole_logits(model, execution.images, row)[mx.array([chunk.stop - 1])]
        for step in steps
        for chunk in step
        for row in [rows[chunk.row]]
    ]
    found = logits_through_storage(model, layout, execution, rows, steps)
    return deviation(found, mx.concatenate(expected))


def _chunks(row: int, stops: Sequence[int]) -> Iterator[Chunk]:
    starts = [0, *stops[:-1]]
    return (Chunk(row, start, stop, 1) for start, stop in zip(starts, stops, strict=True))


def _whole_logits(model: Module, inputs: ImageInputs, row: Row) -> mx.array:
    """The logits of a row in one forward through the model's own caches, `[tokens, vocabulary]`."""
    n_tokens, tables = len(row.tokens), SequenceTables(0, images=row.images)
    span = TokenSpan.of(tables, 0, n_tokens, 0, 0, 0)
    cache = make_prompt_cache(model)
    for each in cache if span.wholes else ():
        if isinstance(each, KVCache | RotatingKVCache):
            is_causal = inputs.windows_only and not isinstance(each, RotatingKVCache)
            see_each_other = () if is_causal else span.wholes
            each.make_mask = _WholeMask(see_each_other, getattr(each, "max_size", None))
    with inputs.of(ForwardBatch(((span,),))):
        ids = inputs.text_ids(mx.array([list(row.tokens)]))
        logits: mx.array = model(ids, cache=cache)
    return logits[0].astype(mx.float32)


class _WholeMask:
    """Makes the masks of one forward in which the tokens of some images see each other."""

    def __init__(self, wholes: Sequence[tuple[int, int]], window: int | None) -> None:
        self._wholes, self._window = wholes, window

    def __call__(self, length: int, window_size: int | None = None, **_: Any) -> mx.array:
        at = np.arange(length)
        seen = at[None] <= at[:, None]
        for first, last in self._wholes:
            seen[first:last, first:last] = True
        if window := window_size or self._window:
            seen &= at[None] > at[:, None] - window
        return mx.array(seen)


def image_input(vision: Vision, memory_bytes: int, context_tokens: int) -> ImageInput:
    """What the model takes of images on a machine with so much memory."""
    encoder = vision.encoder
    embedding_bytes = encoder.dtype.size * encoder.tower.text_hidden
    token_bytes = embedding_bytes * (1 + encoder.tower.n_added)
    most_bytes = memory_bytes // _IMAGE_SHARE

    def fits(n_tokens: int) -> bool:
        return n_tokens * token_bytes + workspace_bytes(vision, n_tokens) <= most_bytes

    max_tokens = min(vision.layout.max_tokens, context_tokens)
    while not (vision.layout.is_whole or fits(max_tokens)) and max_tokens > _LEAST_TOKENS:
        max_tokens = max(max_tokens * 3 // 4, _LEAST_TOKENS)
    kept = min(max(memory_bytes // _FEATURE_SHARE, _LEAST_FEATURE_BYTES), _MOST_FEATURE_BYTES)
    return ImageInput(
        placeholder=vision.layout.placeholder,
        part=vision.layout.part,
        max_tokens=max_tokens,
        n_stages=encoder.n_stages,
        bytes_per_token=token_bytes,
        feature_bytes=max(kept, max_tokens * token_bytes),
    )


def image_bytes(vision: Vision, images: ImageInput) -> int:
    """What kept features and the encoding of the largest image take."""
    return images.feature_bytes + workspace_bytes(vision, images.max_tokens)


_HIDDEN_ARRAYS, _SCORE_ARRAYS, _SCORE_BYTES = 24, 2, 4
"""Arrays of a layer's width, and of its scores, that a tower has at once at most."""


def workspace_bytes(vision: Vision, n_tokens: int) -> int:
    """What the tower takes while it encodes an image of so many tokens: every patch attends to all,
    and scores are in memory unless MLX's attention is fused.
    """
    tower = vision.encoder.tower
    patches = tower.n_patches(n_tokens)
    hidden = patches * tower.hidden * _SCORE_BYTES * _HIDDEN_ARRAYS
    scores = tower.n_scores(patches) * tower.heads * _SCORE_BYTES * _SCORE_ARRAYS
    return int(hidden + scores)
