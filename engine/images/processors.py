"""The image processors of the families: they turn an image in RGB into the array that a vision
tower reads.

They are transformers' own for Pillow, which run without torch, or those of `engine.images.pixels`.
For the worker process alone.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from blake3 import blake3
from PIL import Image

from engine.api import one_line
from engine.images.decode import UnreadableImage
from engine.images.layout import CheckpointImages, ImageFamily
from engine.images.pixels import (
    LOW_EDGE,
    Pixels,
    as_float32,
    kimi_pixels,
    lfm2_pixels,
    llama4_pixels,
)
from engine.values.images import Detail

LOW_SOFT_TOKENS = 70
"""Of Gemma 4, which has five sizes."""


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
            ImageFamily.LLAMA4: lambda: partial(llama4_pixels, self._settings, self._patch_size),
            ImageFamily.LFM2: lambda: partial(lfm2_pixels, self._settings, self._patch_size),
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
            return Pixels(as_float32(made["pixel_values"]), tuple(map(int, grid)))

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
            return Pixels(as_float32(made["pixel_values"][0]), (int(rows), int(columns)))

        return process

    def _channels_first(self, values: object) -> Pixels:
        array = as_float32(values)
        _, height, width = array.shape
        return Pixels(array, (height // self._patch_size, width // self._patch_size))
