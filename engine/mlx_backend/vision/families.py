"""The vision towers of model families, each with what projects its output to the text model.

A tower's own layers are mlx-vlm's; a projector is a few layers, and is written here.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import mlx.core as mx
from mlx.nn.layers.activations import gelu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm, RMSNorm

from engine.mlx_backend.model.images import Axes, Features
from engine.mlx_backend.vision.modules import NoVision, vision_modules

Config = Mapping[str, Any]
Grid = tuple[int, ...]


class Tower(Module):
    """A vision tower and its projector. `vision_tower` is mlx-vlm's; the attributes have the names
    that checkpoints have.

    `merge`: the patches along each side of what one token stands for. `axes`: of the text model's
    rotary embedding; None: it has one. `text_id` and `windows_only`: see `ImageInputs`. `n_added`:
    the layers that add features. `text_hidden`: the dimensions of a feature.
    """

    family: ClassVar[str]
    merge: int = 1
    axes: Axes | None = None
    text_id: int = 0
    windows_only: bool = False
    n_added: int = 0

    def __init__(self, config: Config) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        modules = vision_modules(self.family)
        vision = self.vision_fields(config["vision_config"])
        self._config = modules.config.VisionConfig.from_dict(vision)
        self.vision_tower = modules.vision.VisionModel(self._config)
        self.patch = int(vision["patch_size"])
        self.hidden = int(vision.get("embed_dim") or vision["hidden_size"])
        self.text_hidden = int((config.get("text_config") or config)["hidden_size"])
        self.heads = int(vision.get("num_heads") or vision["num_attention_heads"])

    @staticmethod
    def vision_fields(vision: Config) -> dict[str, Any]:
        """The fields of `vision_config` by the names that mlx-vlm has for them."""
        return dict(vision)

    @property
    @abstractmethod
    def blocks(self) -> Sequence[Module]:
        """The layers, each of which is a stage."""

    @abstractmethod
    def __call__(self, pixels: mx.array, grid: Grid) -> Features:
        """The features of one image, from what its processor returns: see `Image`."""

    @abstractmethod
    def example(self) -> tuple[tuple[int, ...], Grid]:
        """The shape of the array and the grid of a small image."""

    def n_patches(self, n_tokens: int) -> int:
        """The patches of an image of so many tokens."""
        return n_tokens * self.merge**2

    def n_scores(self, n_patches: int) -> int:
        """The pairs of patches that attend to each other, among those of an image."""
        return n_patches**2

    def n_parts(self, grid: Grid) -> int:
        """The features of an image with this grid."""
        return math.prod(grid) // self.merge**2

    def renamed(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Weights of `vision_tower`, named without that, as the tower names them."""
        sanitized: dict[str, mx.array] = self.vision_tower.sanitize(dict(weights))
        return sanitized


class _Qwen(Tower):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.merge = int(config["vision_config"].get("spatial_merge_size", 2))
        text = config.get("text_config") or config
        scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
        if not (section := scaling.get("mrope_section")):
            raise NoVision("config.json names no mrope_section")
        self.axes = Axes.of(section, bool(scaling.get("mrope_interleaved")), self.merge)
        self.times = int(config["vision_config"].get("temporal_patch_size", 2))

    @property
    def blocks(self) -> Sequence[Module]:
        return list(self.vision_tower.blocks)

    def __call__(self, pixels: mx.array, grid: Grid) -> Features:
        found = self.vision_tower(pixels, mx.array([grid]))
        if isinstance(found, tuple):
            return Features(found[0], tuple(found[1]))
        return Features(found)

    def example(self) -> tuple[tuple[int, ...], Grid]:
        rows, columns = 2 * self.merge, 3 * self.merge
        return (rows * columns, 3 * self.times * self.patch**2), (1, rows, columns)


class Qwen2VL(_Qwen):
    family = "qwen2_vl"


class Qwen25VL(_Qwen):
    family = "qwen2_5_vl"


class Qwen3VL(_Qwen):
    family = "qwen3_vl"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.n_added = len(config["vision_config"].get("deepstack_visual_indexes") or ())


class LlavaProjector(Module):
    """Two layers."""

    def __init__(self, n_in: int, n_out: int, bias: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear_1 = Linear(n_in, n_out, bias=bias)
        self.linear_2 = Linear(n_out, n_out, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        projected: mx.array = self.linear_2(gelu(self.linear_1(x)))
        return projected


class Pixtral(Tower):
    family = "pixtral"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.multi_modal_projector = self.projector(config)
        layer = config.get("vision_feature_layer", -1)
        if not isinstance(layer, int):
            raise NoVision("it takes the features of several layers")
        self.feature_layer = layer

    def projector(self, config: Config) -> Module:
        bias = bool(config.get("multimodal_projector_bias", True))
        return LlavaProjector(self.hidden, self.text_hidden, bias)

    @property
    def blocks(self) -> Sequence[Module]:
        return list(self.vision_tower.vision_model.transformer.layers)

    def __call__(self, pixels: mx.array, grid: Grid) -> Features:
        _, states = self.vision_tower(pixels[None].transpose(0, 2, 3, 1), output_hidden_states=True)
        return Features(self.project(states[self.feature_layer][0], grid))

    def project(self, hidden: mx.array, grid: Grid) -> mx.array:
        projected: mx.array = self.multi_modal_projector(hidden)
        return projected

    def example(self) -> tuple[tuple[int, ...], Grid]:
        rows, columns = 2 * self.merge, 3 * self.merge
        return (3, rows * self.patch, columns * self.patch), (rows, columns)

    def renamed(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return super().renamed(below_vision_model(weights))


def below_vision_model(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Weights below `vision_model`, where some checkpoints do not have them."""
    return {
        name if name.startswith("vision_model.") else f"vision_model.{name}": array
        for name, array in weights.items()
    }


class PatchMerger(Module):
    """Merges squares of patches."""

    def __init__(self, hidden: int, merge: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.merge = merge
        self.merging_layer = Linear(hidden * merge**2, hidden, bias=False)

    def __call__(self, x: mx.array, grid: Grid) -> mx.array:
        rows, columns = (side // self.merge for side in grid)
        squares = x.reshape(rows, self.merge, columns, self.merge, -1).transpose(0, 2, 4, 1, 3)
        merged: mx.array = self.merging_layer(squares.reshape(rows * columns, -1))
        return merged


class Mistral3Projector(LlavaProjector):
    """Merges squares of patches, and projects them."""

    def __init__(self, n_in: int, n_out: int, bias: bool, merge: int, eps: float) -> None:
        super().__init__(n_in, n_out, bias)
        self.norm = RMSNorm(n_in, eps=eps)
        self.patch_merger = PatchMerger(n_in, merge)


class Mistral3(Pixtral):
    def projector(self, config: Config) -> Module:
        self.merge = int(config.get("spatial_merge_size", 2))
        text = config["text_config"]
        return Mistral3Projector(
            self.hidden,
            text["hidden_size"],
            bool(config.get("multimodal_projector_bias", False)),
            self.merge,
            float(text.get("rms_norm_eps", 1e-6)),
        )

    def project(self, hidden: mx.array, grid: Grid) -> mx.array:
        projector = self.multi_modal_projector
        return super().project(projector.patch_merger(projector.norm(hidden), grid), grid)


class Gemma3Projector(Module):
    """Averages squares of patches, and projects them."""

    def __init__(self, n_in: int, n_out: int, eps: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._eps = eps
        self.mm_input_projection_weight = mx.zeros((n_in, n_out))
        self.mm_soft_emb_norm = RMSNorm(n_in, eps)

    def __call__(self, x: mx.array) -> mx.array:
        normed = mx.fast.rms_norm(x, 1.0 + self.mm_soft_emb_norm.weight, self._eps)
        return normed @ self.mm_input_projection_weight


class Gemma3(Tower):
    family = "gemma3"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        vision, text_hidden = config["vision_config"], config["text_config"]["hidden_size"]
        eps = float(vision.get("layer_norm_eps", 1e-6))
        self.multi_modal_projector = Gemma3Projector(self.hidden, text_hidden, eps)
        self.tokens = int(config.get("mm_tokens_per_image", 256))
        self.side = int(vision["image_size"]) // self.patch
        self.merge = self.side // math.isqrt(self.tokens)
        # By what the text model multiplies its embeddings.
        self.scale = float(mx.array(text_hidden**0.5, mx.bfloat16))

    @property
    def blocks(self) -> Sequence[Module]:
        return list(self.vision_tower.vision_model.encoder.layers)

    def __call__(self, pixels: mx.array, grid: Grid) -> Features:
        hidden, _, _ = self.vision_tower(pixels[None].transpose(0, 2, 3, 1))
        sides = self.side // self.merge, self.merge
        squares = hidden.reshape(*sides, *sides, -1).mean(axis=(1, 3)).reshape(self.tokens, -1)
        return Features(self.multi_modal_projector(squares) / self.scale)

    def example(self) -> tuple[tuple[int, ...], Grid]:
        edge = self.side * self.patch
        return (3, edge, edge), (self.side, self.side)

    def renamed(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        named = below_vision_model(weights)
        named.pop("vision_model.embeddings.position_ids", None)
        return super().renamed(named)


class Gemma4Embedder(Module):
    """Projects normed features."""

    def __init__(self, n_in: int, n_out: int, eps: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._eps = eps
        self.embedding_projection = Linear(n_in, n_out, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        wide = x.astype(mx.float32)
        normed = wide * mx.rsqrt((wide**2).mean(axis=-1, keepdims=True) + self._eps)
        projected: mx.array = self.embedding_projection(normed.astype(x.dtype))
        return projected


class Gemma4(Tower):
    family = "gemma4"
    windows_only = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        vision, text = config["vision_config"], config["text_config"]
        eps = float(vision.get("rms_norm_eps", 1e-6))
        self.embed_vision = Gemma4Embedder(self.hidden, text["hidden_size"], eps)
        self.merge = int(vision.get("pooling_kernel_size", 3))
        self.text_id = int(text.get("pad_token_id") or 0)
        self.scale = text["hidden_size"] ** 0.5

    @property
    def blocks(self) -> Sequence[Module]:
        return list(self.vision_tower.encoder.layers)

    def __call__(self, pixels: mx.array, grid: Grid) -> Features:
        rows, columns = grid
        n = rows * columns  # what follows is padding
        positions = mx.stack([mx.arange(n) % columns, mx.arange(n) // columns], axis=-1)
        hidden = self.vision_tower(pixels[None, :n], positions[None])
        return Features(self.embed_vision(hidden)[0] / self.scale)

    def example(self) -> tuple[tuple[int, ...], Grid]:
        rows, columns = 2 * self.merge, 3 * self.merge
        return (rows * columns, 3 * self.patch**2), (rows, columns)


class KimiProjector(Module):
    """Norms patches, and projects squares of them."""

    def __init__(self, n_in: int, n_merged: int, n_out: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pre_norm = LayerNorm(n_in, eps=1e-5)
        self.linear_1 = Linear(n_merged, n_merged)
        self.linear_2 = Linear(n_merged, n_out)

    def __call__(self, x: mx.array) -> mx.array:
        merged = self.pre_norm(x).reshape(x.shape[0], -1)
        projected: mx.array = self.linear_2(gelu(self.linear_1(merged)))
        return projected


class KimiVL(Tower):
    family = "kimi_vl"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.merge = int(self._config.merge_kernel_size[0])
        merged, text_hidden = self.hidden * self.merge**2, config["text_config"]["hidden_size"]
        self.multi_modal_projector = KimiProjector(self.hidden, merged, text_hidden)

    @staticmethod
    def vision_fields(vision: Config) -> dict[str, Any]:
        names = {
            "hidden_size": "embed_dim",
            "num_hidden_layers": "depth",
            "num_attention_heads": "num_heads",
        }
        return {**vision, **{names[key]: vision[key] for key in names.keys() & vision.keys()}}

    @property
    def blocks(self) -> Sequence[Module]:
        return list(self.vision_tower.blocks)

    def __call__(self, pixels: mx.array, grid: Grid) -> Features:
        [squares] = self.vision_tower(pixels.transpose(0, 2, 3, 1), mx.array([grid]))
        return Features(self.multi_modal_projector(squares))

    def example(self) -> tuple[tuple[int, ...], Grid]:
        rows, columns = 2 * self.merge, 3 * self.merge
        return (rows * columns, 3, self.patch, self.patch), (rows, columns)

    def renamed(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        named = {}
        for name, array in weights.items():
            own = name.removeprefix("encoder.")
            for part in ("wqkv", "wo"):
                own = own.replace(f".{part}.", f".attn.{part}.").replace(".attn.attn.", ".attn.")
            named[own] = array
        return super().renamed(named)
