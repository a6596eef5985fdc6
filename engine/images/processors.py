"""The image processors of the families: they turn an image in RGB into the array that a vision
tower reads.

They are transformers' own for Pillow, which run without torch. For the worker process alone.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from PIL import Image

from engine.api import one_line
from engine.images.decode import UnreadableImage
from engine.images.layout import MAX_KIMI_PATCHES, CheckpointImages, ImageFamily, Settings
from engine.values.images import Detail

LOW_EDGE = 512
"""The pixels of the longest side for `Detail.LOW`, where a processor has no least size."""

LOW_SOFT_TOKENS = 70
"""Of Gemma 4, which has five sizes."""

Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image as a vision tower reads it, with its grid of patches."""

    array: Array
    grid: tuple[int, ...]


class Processor:
    """The image processor of a checkpoint. Raises ModelError where its files do not say enough."""

    def __init__(self, checkpoint: Path) -> None:
        images = CheckpointImages(checkpoint)
        self._settings, self._patch_size = images.settings, images.patch_size
        self._family = images.family
        makers: Mapping[ImageFamily, Callable[[], Callable[[Image.Image, Detail], Pixels]]] = {
            ImageFamily.QWEN: self._qwen,
            ImageFamily.PIXTRAL: self._pixtral,
            ImageFamily.GEMMA3: self._gemma3,
            ImageFamily.GEMMA4: self._gemma4,
            ImageFamily.KIMI: lambda: partial(kimi_pixels, self._settings),
        }
        self._process = makers[self._family]()

    def pixels(self, image: Image.Image, detail: Detail) -> Pixels:
        """Raises UnreadableImage for an image that the processor does not take, and MemoryError."""
        try:
            return self._process(image, detail)
        except ValueError as error:
            width, height = image.size
            raise UnreadableImage(
                f"an image of {width:,} x {height:,} pixels cannot be prepared for this model: "
                f"{one_line(error)}"
            ) from error

    def digest(self, pixels: Pixels) -> bytes:
        """32 bytes that no other pixels, grid or settings of a checkpoint have."""
        settings = {**self._settings, "family": self._family.value, "shape": pixels.array.shape}
        digest = blake3()
        for part in (
            json.dumps(settings, sort_keys=True).encode(),
            json.dumps(pixels.grid).encode(),
            pixels.array.data.cast("B"),
        ):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()

    def _qwen(self) -> Callable[[Image.Image, Detail], Pixels]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (  # noqa: PLC0415
            Qwen2VLImageProcessorPil,
        )

        processor = Qwen2VLImageProcessorPil.from_dict(self._settings)
        least = processor.size["shortest_edge"]
        low = {"size": {"shortest_edge": least, "longest_edge": least}}

        def process(image: Image.Image, detail: Detail) -> Pixels:
            made = processor.preprocess(image, **(low if detail is Detail.LOW else {}))
            (grid,) = made["image_grid_thw"]
            return Pixels(_float32(made["pixel_values"]), tuple(map(int, grid)))

        return process

    def _pixtral(self) -> Callable[[Image.Image, Detail], Pixels]:
        from transformers.models.pixtral.image_processing_pil_pixtral import (  # noqa: PLC0415
            PixtralImageProcessorPil,
        )

        processor = PixtralImageProcessorPil.from_dict(self._settings)
        longest = max(value for value in dict(processor.size).values() if value)
        low = {"size": {"longest_edge": min(longest, LOW_EDGE)}}

        def process(image: Image.Image, detail: Detail) -> Pixels:
            made = processor.preprocess(image, **(low if detail is Detail.LOW else {}))
            return self._channels_first(made["pixel_values"][0])

        return process

    def _gemma3(self) -> Callable[[Image.Image, Detail], Pixels]:
        from transformers.models.gemma3.image_processing_pil_gemma3 import (  # noqa: PLC0415
            Gemma3ImageProcessorPil,
        )

        processor = Gemma3ImageProcessorPil.from_dict(self._settings)
        return lambda image, _: self._channels_first(processor.preprocess(image)["pixel_values"][0])

    def _gemma4(self) -> Callable[[Image.Image, Detail], Pixels]:
        from transformers.models.gemma4.image_processing_pil_gemma4 import (  # noqa: PLC0415
            Gemma4ImageProcessorPil,
        )

        processor = Gemma4ImageProcessorPil.from_dict(self._settings)
        low = {"max_soft_tokens": LOW_SOFT_TOKENS}

        def process(image: Image.Image, detail: Detail) -> Pixels:
            made = processor.preprocess(image, **(low if detail is Detail.LOW else {}))
            columns, rows = made["image_position_ids"][0].max(axis=0) + 1
            return Pixels(_float32(made["pixel_values"][0]), (int(rows), int(columns)))

        return process

    def _channels_first(self, values: object) -> Pixels:
        array = _float32(values)
        _, height, width = array.shape
        return Pixels(array, (height // self._patch_size, width // self._patch_size))


def kimi_pixels(settings: Settings, image: Image.Image, detail: Detail) -> Pixels:
    """Kimi-VL's processor, whose class comes with its checkpoints as code and needs torch:
    `image_processing_kimi_vl.py` of moonshotai/Kimi-VL-A3B-Instruct.

    Raises ValueError.
    """
    side = int(settings.get("patch_size", 14))
    merge = int((settings.get("merge_kernel_size") or [2])[0]) * side
    limit = int(settings.get("in_token_limit", 4096))
    if detail is Detail.LOW:
        limit = min(limit, (LOW_EDGE // side) ** 2)
    width, height = image.size
    n_patches = (width // side) * (height // side)
    if n_patches > limit:
        scale = math.sqrt(limit / n_patches)
        size = int(width * scale), int(height * scale)
        image = image.resize(size, Image.Resampling.BICUBIC)
    width, height = image.size
    if settings.get("pad_input", False):
        padded = Image.new("RGB", (width + -width % merge, height + -height % merge))
        padded.paste(image)
        image = padded
    else:
        left, top = width % merge // 2, height % merge // 2
        size = width - width % merge, height - height % merge
        image = image.crop((left, top, left + size[0], top + size[1]))
    columns, rows = image.size[0] // side, image.size[1] // side
    if not columns or not rows:
        raise ValueError(f"each side needs {merge} pixels")
    if max(columns, rows) > MAX_KIMI_PATCHES:
        raise ValueError(f"a side may have {MAX_KIMI_PATCHES * side:,} pixels")
    mean = np.array(settings.get("image_mean", _CLIP_MEAN), np.float32).reshape(3, 1, 1)
    std = np.array(settings.get("image_std", _CLIP_STD), np.float32).reshape(3, 1, 1)
    array = np.asarray(image).astype(np.float32) / np.float32(255.0)
    array = (array.transpose(2, 0, 1) - mean) / std
    patches = array.reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4)
    return Pixels(_float32(patches.reshape(-1, 3, side, side)), (rows, columns))


_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def _float32(values: object) -> Array:
    return np.ascontiguousarray(values, dtype=np.float32)
