"""How the images of a checkpoint stand in a prompt: the tokens around them, and how many.

Reads the checkpoint's files alone, and imports neither MLX, Pillow nor transformers.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine.api import ModelError, one_line
from engine.values.images import Image, PreparedImage

MAX_ASPECT_RATIO = 200
"""Qwen's processor refuses images that are longer."""

MAX_KIMI_PATCHES = 511
"""Of a side, which Kimi-VL's processor takes."""

Settings = Mapping[str, Any]
"""The settings of an image processor, by the names that transformers gives them."""


class ImageFamily(Enum):
    """Checkpoints whose images are prepared in the same way."""

    QWEN = "qwen"  # Qwen2-VL, 2.5-VL, 3-VL and 3.5: patches of any number
    PIXTRAL = "pixtral"  # Pixtral and Mistral 3: rows of patches that end with a token of their own
    GEMMA3 = "gemma3"  # one size, 256 tokens
    GEMMA4 = "gemma4"  # patches of a number that is near one of five
    KIMI = "kimi"  # Kimi-VL: patches of any number


_FAMILIES = {
    "qwen2_vl": ImageFamily.QWEN,
    "qwen2_5_vl": ImageFamily.QWEN,
    "qwen3_vl": ImageFamily.QWEN,
    "qwen3_vl_moe": ImageFamily.QWEN,
    "qwen3_5": ImageFamily.QWEN,
    "qwen3_5_moe": ImageFamily.QWEN,
    "pixtral": ImageFamily.PIXTRAL,
    "mistral3": ImageFamily.PIXTRAL,
    "gemma3": ImageFamily.GEMMA3,
    "gemma4": ImageFamily.GEMMA4,
    "kimi_vl": ImageFamily.KIMI,
}


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The tokens of a checkpoint's images.

    In place of a `placeholder`, which the chat template writes once for each image, a prompt has
    the tokens `before`, a token `part` for each square of `merge` x `merge` patches, row by row,
    and the tokens `after`. A token `row_end` stands between two rows.
    """

    placeholder: int
    part: int
    merge: int
    max_tokens: int  # of the largest image, those around it included
    before: tuple[int, ...] = ()
    row_end: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    is_whole: bool = False  # the parts see each other

    def prepared(self, digest: bytes, grid: tuple[int, ...], file: str) -> PreparedImage:
        """The image whose array is in `file`, with its tokens. Its `grid` ends with the rows and
        the columns of patches. Raises ValueError for a grid that no image of the checkpoint has.
        """
        *times, patch_rows, patch_columns = grid
        rows, columns = math.prod(times) * (patch_rows // self.merge), patch_columns // self.merge
        n_around = len(self.before) + len(self.after) + len(self.row_end) * (rows - 1)
        if min(grid) < 1 or not 0 < rows * columns <= self.max_tokens - n_around:
            raise ValueError(f"no image has a grid of {grid} patches")
        row = (self.part,) * columns
        tokens = (*self.before, *(row + self.row_end) * (rows - 1), *row, *self.after)
        runs: tuple[tuple[int, int], ...] = ((len(self.before), rows * columns),)
        if self.row_end:
            step = columns + len(self.row_end)
            runs = tuple((len(self.before) + at * step, columns) for at in range(rows))
        return PreparedImage(Image(digest, runs, grid, file, self.is_whole), tokens)


def image_layout(checkpoint: Path) -> ImageLayout | None:
    """How the images of a checkpoint stand in a prompt; None if it has no vision tower. Raises
    ModelError, with the reason, where they cannot be served by what its files state.
    """
    config = read_object(checkpoint / "config.json")
    return CheckpointImages(checkpoint).layout() if config.get("vision_config") else None


class CheckpointImages:
    """What a checkpoint's files state about its images. Raises ModelError, with the reason, where
    they cannot be served by what the files state.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self.config = read_object(checkpoint / "config.json")
        self._processor = read_object(checkpoint / "processor_config.json")
        model_type = self.config.get("model_type")
        if str(model_type) == "llava" and self._vision.get("model_type") == "pixtral":
            model_type = "pixtral"
        if str(model_type) not in _FAMILIES:
            raise ModelError(f"images are not served for the model type {model_type}")
        self.family = _FAMILIES[str(model_type)]

    @property
    def settings(self) -> Settings:
        """The settings of the image processor: those of transformers' class where that is another's
        default.
        """
        own = self._processor.get("image_processor")
        settings = (
            own
            if isinstance(own, dict)
            else read_object(self._checkpoint / "preprocessor_config.json")
        )
        if not settings:
            raise ModelError("the checkpoint has no preprocessor_config.json, which sizes images")
        settings = {name: value for name, value in settings.items() if value is not None}
        if self.family is ImageFamily.PIXTRAL:
            settings["patch_size"] = self._pixtral_patch * self._pixtral_merge
        if self.family is ImageFamily.GEMMA3:
            settings["do_pan_and_scan"] = False  # as Gemma3Processor has it
        return settings

    @property
    def patch_size(self) -> int:
        """The pixels of a patch's side, as the tower divides an image."""
        if self.family is ImageFamily.PIXTRAL:
            return self._pixtral_patch
        if self.family is ImageFamily.GEMMA3:
            return int(self._vision["patch_size"])
        return int(self.settings.get("patch_size", 16 if self.family is ImageFamily.GEMMA4 else 14))

    def layout(self) -> ImageLayout:
        """How images stand in a prompt."""
        make: Mapping[ImageFamily, Callable[[], ImageLayout]] = {
            ImageFamily.QWEN: self._qwen,
            ImageFamily.PIXTRAL: self._pixtral,
            ImageFamily.GEMMA3: self._gemma3,
            ImageFamily.GEMMA4: self._gemma4,
            ImageFamily.KIMI: self._kimi,
        }
        try:
            return make[self.family]()
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ModelError(
                f"the checkpoint's files do not say how images are prepared: {one_line(error)}"
            ) from error

    def _qwen(self) -> ImageLayout:
        settings = self.settings
        merge = int(settings.get("merge_size", 2))
        size = settings.get("size") or {}
        least = settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56
        most = settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
        side = self.patch_size * merge
        grown = least / side**2  # of an image that was too small, before its sides are rounded up
        n_tokens = (
            most // side**2,
            math.isqrt(MAX_ASPECT_RATIO * most) // side,  # one row
            math.floor(grown + math.sqrt(grown / MAX_ASPECT_RATIO) * (MAX_ASPECT_RATIO + 1) + 1),
        )
        token = int(self.config["image_token_id"])
        return ImageLayout(token, token, merge, max(n_tokens))

    def _pixtral(self) -> ImageLayout:
        side = self._pixtral_patch * self._pixtral_merge
        size = self.settings.get("size") or {"longest_edge": 1024}
        edges: tuple[Any, ...] = (size.get("height"), size.get("width"))
        if longest := size if isinstance(size, int) else size.get("longest_edge"):
            edges = (longest, longest)
        rows, columns = (math.ceil(int(edge) / side) for edge in edges)
        token = int(_first(self.config, "image_token_index", "image_token_id"))
        return ImageLayout(
            token,
            token,
            self._pixtral_merge,
            rows * (columns + 1),
            row_end=(self._token_of(self._processor.get("image_break_token", "[IMG_BREAK]")),),
            after=(self._token_of(self._processor.get("image_end_token", "[IMG_END]")),),
        )

    def _gemma3(self) -> ImageLayout:
        settings = self.settings
        n_parts = int(self.config.get("mm_tokens_per_image", 256))
        size = settings.get("size") or {"height": 224, "width": 224}
        merge = int(size["height"]) // self.patch_size // math.isqrt(n_parts)
        # Around the image as Google's own code inserts them. transformers writes them into the text
        # before it is tokenized, where newlines may become one token with others next to them.
        newlines = self._encoded("\n\n")
        before = (*newlines, int(self.config.get("boi_token_index", 255999)))
        after = (int(self.config.get("eoi_token_index", 256000)), *newlines)
        part = int(_first(self.config, "image_token_index", "image_token_id"))
        n_tokens = n_parts + len(before) + len(after)
        return ImageLayout(
            before[-1], part, merge, n_tokens, before=before, after=after, is_whole=True
        )

    def _gemma4(self) -> ImageLayout:
        settings = self.settings
        before = (int(self.config["boi_token_id"]),)
        after = (int(_first(self.config, "eoi_token_id", "eoi_token_index")),)
        token = int(self.config["image_token_id"])
        text = self.config.get("text_config") or {}
        return ImageLayout(
            token,
            token,
            int(settings.get("pooling_kernel_size", 3)),
            int(settings.get("max_soft_tokens", 280)) + 2,
            before=before,
            after=after,
            is_whole=text.get("use_bidirectional_attention") == "vision",
        )

    def _kimi(self) -> ImageLayout:
        merge = int((self.settings.get("merge_kernel_size") or [2])[0])
        limit = int(self.settings.get("in_token_limit", 4096))
        # Of an image within the limit, which counts whole patches; then its sides are rounded up.
        longest = MAX_KIMI_PATCHES // merge
        n_tokens = max(
            min(rows // merge + 1, longest) * min(limit // max(rows, 1) // merge + 1, longest)
            for rows in range(MAX_KIMI_PATCHES + 1)
        )
        token = int(_first(self.config, "media_placeholder_token_id", "image_token_index"))
        return ImageLayout(token, token, merge, n_tokens)

    @property
    def _vision(self) -> Settings:
        found = self.config.get("vision_config")
        return found if isinstance(found, dict) else {}

    @property
    def _pixtral_patch(self) -> int:
        stated = self._processor.get("patch_size") or self._vision.get("patch_size")
        return int(stated or 16)

    @property
    def _pixtral_merge(self) -> int:
        stated = self._processor.get("spatial_merge_size") or self.config.get("spatial_merge_size")
        return int(stated or 1)

    def _token_of(self, text: str) -> int:
        """The id of a token. Raises ValueError if the tokenizer has none such."""
        token: int | None = self._tokenizer.token_to_id(text)
        if token is None:
            raise ValueError(f"the tokenizer has no token {text}")
        return token

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        file = self._checkpoint / "tokenizer.json"
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more specific
            raise ModelError(f"{file} cannot be read: {one_line(error)}") from error


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no file. Raises ModelError."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {one_line(error)}") from error
    return content if isinstance(content, dict) else {}


def _first(config: Settings, *names: str) -> Any:
    """The first of these fields that is stated. Raises LookupError."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise LookupError(" or ".join(names))
