"""Loads the vision tower of a checkpoint, and encodes images by stages."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from engine.core.step import Encode
from engine.mlx_backend.kv.states import are_computable
from engine.mlx_backend.model.images import Features
from engine.mlx_backend.model.patches import override
from engine.mlx_backend.vision.families import (
    Gemma3,
    Gemma4,
    Grid,
    KimiVL,
    Mistral3,
    Pixtral,
    Qwen2VL,
    Qwen3VL,
    Qwen25VL,
    Tower,
)
from engine.mlx_backend.vision.modules import NoVision
from engine.mlx_backend.vision.tiled import Lfm2VL, Llama4
from engine.values.images import Image

TOWERS: Mapping[str, type[Tower]] = {
    "qwen2_vl": Qwen2VL,
    "qwen2_5_vl": Qwen25VL,
    "qwen3_vl": Qwen3VL,
    "qwen3_vl_moe": Qwen3VL,
    "qwen3_5": Qwen3VL,
    "qwen3_5_moe": Qwen3VL,
    "pixtral": Pixtral,
    "llava": Pixtral,  # as transformers names Pixtral
    "mistral3": Mistral3,
    "gemma3": Gemma3,
    "gemma4": Gemma4,
    "kimi_vl": KimiVL,
    "llama4": Llama4,
    "lfm2-vl": Lfm2VL,
    "lfm2_vl": Lfm2VL,
}
"""By the `model_type` in config.json."""

_UNSUPPORTED = {
    "gemma3n": "mlx-vlm's tower returns the parts of an image in another order than transformers'"
}
"""Why a tower that mlx-vlm has is not used, where that is known."""

_PARTS = ("vision_tower.", "multi_modal_projector.", "embed_vision.")
_OLD_NAMES = {"visual.": "vision_tower.", "vision_model.": "vision_tower.vision_model."}


def open_tower(files: Iterable[Path], config: Mapping[str, Any]) -> Tower | None:
    """The tower of a checkpoint with these weight files, whose weights stay to be read; None where
    the checkpoint has none. Raises NoVision where it has one that cannot be used.
    """
    if not config.get("vision_config"):
        return None
    kind = TOWERS.get(str(config["model_type"]))
    if kind is None:
        name = str(config["model_type"])
        why = f": {_UNSUPPORTED[name]}" if name in _UNSUPPORTED else ""
        raise NoVision(f"the vision tower of {name} is not supported{why}")
    vision_type = config["vision_config"].get("model_type")
    if config["model_type"] == "llava" and vision_type != "pixtral":
        raise NoVision(f"the vision tower {vision_type} is not supported")
    try:
        tower = kind(config)
        weights = _weights(files, tower)
        if not weights:
            raise NoVision("its files have no weights of a vision tower")
        _quantize(tower, weights, config)
        tower.load_weights(list(weights.items()))
    except NoVision:
        raise
    except Exception as error:  # mlx-vlm's modules may raise anything
        words = str(error).partition("\n")[0] or type(error).__name__
        raise NoVision(f"its vision tower cannot be loaded: {words}") from error
    return tower


def _weights(files: Iterable[Path], tower: Tower) -> dict[str, mx.array]:
    """The weights of the tower and its projector, by the names of the modules."""
    found = dict[str, mx.array]()
    for file in files:
        tensors = mx.load(str(file))  # lazily
        assert isinstance(tensors, dict), "safetensors are named"
        for name, array in tensors.items():
            own = name.removeprefix("model.")
            for old, new in _OLD_NAMES.items():
                if own.startswith(old):
                    own = new + own.removeprefix(old)
            if own.startswith(_PARTS):
                found[own] = array
    prefix = _PARTS[0]
    of_tower = {
        name.removeprefix(prefix): found.pop(name)
        for name in list(found)
        if name.startswith(prefix)
    }
    named = tower.renamed(of_tower) if of_tower else {}
    return {**found, **{prefix + name: array for name, array in named.items()}}


def _quantize(tower: Tower, weights: Mapping[str, mx.array], config: Mapping[str, Any]) -> None:
    """Quantize the layers whose weights are quantized."""
    quantization = config.get("quantization") or {}

    def settings(path: str, module: Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        own = quantization.get(path)
        return own if isinstance(own, dict) else True

    if any(name.endswith(".scales") for name in weights):
        keys = {"group_size", "bits", "mode"} & quantization.keys()
        shared = {key: quantization[key] for key in keys}
        quantize(tower, **shared, class_predicate=settings)


class _Encoding:
    """An image between the first and the last stage of its tower."""

    def __init__(self, outputs: list[list[mx.array]], features: Features) -> None:
        """`outputs`: of each stage but the last, not computed yet."""
        self._outputs = [*outputs, [features.embeddings, *features.added]]
        self.features = features
        self.n_done = 0

    @property
    def is_done(self) -> bool:
        return self.n_done == len(self._outputs)

    def advance(self, n_done: int) -> list[mx.array]:
        """The outputs of the stages up to `n_done` that are not computed yet, in order."""
        first, self.n_done = self.n_done, max(n_done, self.n_done)
        return [array for stage in self._outputs[first : self.n_done] for array in stage]

    def arrays(self) -> list[mx.array]:
        """What should have been computed."""
        return [array for stage in self._outputs[: self.n_done] for array in stage]

    def is_finite(self) -> mx.array:
        """Whether all of the features are numbers."""
        parts = [mx.isfinite(array).all() for array in self._outputs[-1]]
        return mx.stack(parts).all()

    def drop_outputs(self) -> None:
        """Release what only earlier stages needed."""
        for stage in self._outputs[: self.n_done - 1]:
            stage.clear()


class ImageEncoder:
    """Encodes images by stages, and keeps their features by digest.

    MLX is lazy: the whole tower is built at the first stage, and each stage evaluates the output of
    one layer. So the result is that of the tower at once, bit for bit.
    """

    def __init__(self, tower: Tower) -> None:
        self.tower = tower
        self._kept = dict[bytes, _Encoding]()
        self._recorded: list[mx.array] | None = None
        for block in tower.blocks:
            override(block, "__call__", self._recording)
        self.dtype = _dtype(tower)

    @property
    def n_stages(self) -> int:
        """The stages of each image: one for each layer of the tower."""
        return len(self.tower.blocks)

    def encode(self, work: Encode) -> list[mx.array]:
        """The arrays to evaluate for these stages. Stages that are lacking before them are added,
        those that have been computed are not computed again.
        """
        encoding = self._kept.get(work.image.digest)
        if encoding is None:
            pixels = mx.array(np.load(work.image.file, allow_pickle=False))
            encoding = self._kept[work.image.digest] = self._begin(pixels, work.image.grid)
        encoding.drop_outputs()
        return encoding.advance(work.first_stage + work.n_stages)

    def is_finite(self, image: Image) -> mx.array | None:
        """Whether all features of an image are numbers; None before its last stage."""
        encoding = self._kept[image.digest]
        return encoding.is_finite() if encoding.is_done else None

    def features(self, image: Image) -> Features:
        """Those of an image that has been encoded. Zeros where that failed: then nobody takes the
        results of the rows that read it.
        """
        encoding = self._kept.get(image.digest)
        if encoding is None or not encoding.is_done:
            blank = mx.zeros((image.n_tokens, self.tower.text_hidden), self.dtype)
            return Features(blank, (blank,) * self.tower.n_added)
        encoding.drop_outputs()
        return encoding.features

    def at_once(self, pixels: mx.array, grid: Grid) -> Features:
        """The features of an image, computed in one go."""
        return self._begin(pixels, grid).features

    def forget(self, digests: Iterable[bytes]) -> None:
        """Release the features of these images."""
        for digest in digests:
            self._kept.pop(digest, None)

    def forget_all(self) -> None:
        """Release all features."""
        self._kept.clear()

    def settle(self) -> list[bytes]:
        """After a step has failed: release what cannot be computed. Returns the images' digests."""
        failed = [
            digest
            for digest, encoding in self._kept.items()
            if not are_computable(encoding.arrays())
        ]
        self.forget(failed)
        return failed

    def _begin(self, pixels: mx.array, grid: Grid) -> _Encoding:
        self._recorded = []
        try:
            features = self.tower(pixels.astype(self.dtype), grid)
            return _Encoding([[array] for array in self._recorded[:-1]], features)
        finally:
            self._recorded = None

    def _recording(self, kind: type[Any]) -> Callable[..., mx.array]:
        def call(block: Any, *args: Any, **named: Any) -> mx.array:
            output: mx.array = kind.__call__(block, *args, **named)
            if self._recorded is not None:
                self._recorded.append(output)
            return output

        return call


def _dtype(tower: Tower) -> mx.Dtype:
    """The type that the tower computes in."""
    module: Any = tower
    arrays: dict[str, mx.array] = dict(tree_flatten(module.parameters()))
    types = [array.dtype for array in arrays.values()]
    return max((of for of in types if mx.issubdtype(of, mx.floating)), key=types.count)
