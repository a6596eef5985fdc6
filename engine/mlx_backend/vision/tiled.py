"""The vision towers of families that show an image in tiles of one size, and as a whole: Llama 4
and LFM2-VL.

The grid of an image has the rows and columns of tiles, then the rows and columns of patches of the
image as a whole. A single tile is that of the whole image.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import GELU, gelu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from engine.mlx_backend.model.images import Features
from engine.mlx_backend.vision.families import Config, Grid, Tower
from engine.mlx_backend.vision.modules import NoVision


class Llama4Projector(Module):
    """One layer."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear_1 = Linear(n_in, n_out, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        projected: mx.array = self.linear_1(x)
        return projected


class Llama4(Tower):
    """All tiles are computed at once, and attend to themselves alone."""

    family = "llama4"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.merge = round(1 / self._config.pixel_shuffle_ratio)
        self.side = int(self._config.image_size) // self.patch
        n_in = self._config.vision_output_dim
        self.multi_modal_projector = Llama4Projector(n_in, self.text_hidden)
        # mlx-vlm approximates GELU, and makes patches of single pixels.
        for module in (*self.blocks, self.vision_tower.vision_adapter):
            module.mlp.activation_fn = GELU()
        self.vision_tower.patch_embedding.unfold = self._unfold

    @staticmethod
    def vision_fields(vision: Config) -> dict[str, Any]:
        rope = vision.get("rope_parameters") or {}
        return {**_LLAMA4_UNUSED, "rope_theta": rope.get("rope_theta", 10000.0), **vision}

    @property
    def blocks(self) -> Sequence[Module]:
        return list(self.vision_tower.model.layers)

    def __call__(self, pixels: mx.array, grid: Grid) -> Features:
        found = self.multi_modal_projector(self.vision_tower(pixels))
        return Features(found.reshape(-1, found.shape[-1]))

    def example(self) -> tuple[tuple[int, ...], Grid]:
        edge = self.side * self.patch
        return (1, 3, edge, edge), (1, 1, self.side, self.side)

    def n_scores(self, n_patches: int) -> int:
        return n_patches * (self.side**2 + 1)

    def renamed(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return super().renamed(_above_vision_model(weights))

    def _unfold(self, pixels: mx.array) -> mx.array:
        """Tiles `[tiles, 3, height, width]` as patches `[tiles, values, patches]`."""
        sides = self.side, self.patch
        squares = pixels.reshape(*pixels.shape[:2], *sides, *sides).transpose(0, 1, 3, 5, 2, 4)
        return squares.reshape(pixels.shape[0], -1, self.side**2)


_LLAMA4_UNUSED = {
    "initializer_range": 0.02,
    "norm_eps": 1e-5,
    "num_channels": 3,
    "projector_dropout": 0.0,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}
"""Fields that mlx-vlm demands, and whose values it does not use."""


class Lfm2Projector(Module):
    """Norms squares of patches, and projects them."""

    def __init__(self, n_in: int, n_between: int, n_out: int, *, bias: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer_norm: Module = LayerNorm(n_in)
        self.linear_1 = Linear(n_in, n_between, bias=bias)
        self.linear_2 = Linear(n_between, n_out, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        normed = self.layer_norm(x) if "layer_norm" in self else x
        projected: mx.array = self.linear_2(gelu(self.linear_1(normed)))
        return projected


class Lfm2VL(Tower):
    """All views are computed at once, the smaller ones padded, and attend to themselves alone."""

    family = "lfm2_vl"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.get("vision_feature_layer", -1) != -1:
            raise NoVision("it takes the features of a layer before the last")
        self.merge = int(config.get("downsample_factor", 2))
        n_in, n_between = (
            self.hidden * self.merge**2,
            int(config.get("projector_hidden_size", 2560)),
        )
        bias = bool(config.get("projector_bias", True))
        projector = Lfm2Projector(n_in, n_between, self.text_hidden, bias=bias)
        if not config.get("projector_use_layernorm", True):
            del projector.layer_norm
        self.multi_modal_projector = projector
        self.side = int(config.get("tile_size", 512)) // self.patch

    @property
    def blocks(self) -> Sequence[Module]:
        return list(self.vision_tower.encoder.layers)

    def __call__(self, pixels: mx.array, grid: Grid) -> Features:
        tiles, whole = grid[:2], grid[2:]
        n_tiles = math.prod(tiles) if math.prod(tiles) > 1 else 0
        side = math.isqrt((pixels.shape[0] - math.prod(whole)) // max(n_tiles, 1))
        shapes = [(side, side)] * n_tiles + [whole]
        sizes = [math.prod(shape) for shape in shapes]
        views, start = list[mx.array](), 0
        for size in sizes:
            padding = [(0, max(sizes) - size), (0, 0)]
            views.append(mx.pad(pixels[start : start + size], padding))
            start += size
        is_padded = len(set(sizes)) > 1
        present = mx.arange(max(sizes)) < mx.array(sizes)[:, None]
        _, _, hidden = self.vision_tower(
            mx.stack(views),
            spatial_shapes=mx.array(shapes),
            pixel_attention_mask=present if is_padded else None,
        )
        squares = [
            self._squares(own[:size], shape)
            for own, size, shape in zip(hidden, sizes, shapes, strict=True)
        ]
        return Features(self.multi_modal_projector(mx.concatenate(squares)))

    def _squares(self, hidden: mx.array, shape: Grid) -> mx.array:
        """Squares of patches, row by row."""
        rows, columns = (side // self.merge for side in shape)
        squares = hidden.reshape(rows, self.merge, columns, self.merge, -1).transpose(0, 2, 1, 3, 4)
        return squares.reshape(rows * columns, -1)

    def example(self) -> tuple[tuple[int, ...], Grid]:
        rows, columns = 2 * self.merge, 3 * self.merge
        return (rows * columns, 3 * self.patch**2), (1, 1, rows, columns)

    def n_scores(self, n_patches: int) -> int:
        return n_patches * max(self.side**2, 1)

    def renamed(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return super().renamed(_above_vision_model(weights))


def _above_vision_model(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Weights outside of `vision_model`, where some checkpoints have them."""
    return {name.removeprefix("vision_model."): array for name, array in weights.items()}
