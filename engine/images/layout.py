"""How the images of a checkpoint stand in a prompt: the tokens around them, and how many.

Reads the checkpoint's files alone, and imports neither MLX, Pillow nor transformers.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine.api import ModelError, one_line
from engine.values.images import Image, PreparedImage

MAX_ASPECT_RATIO = 200
"""Qwen's processor refuses images that are longer; LFM2-VL's gives them ever more tokens."""

MAX_KIMI_PATCHES = 511
"""Of a side, which Kimi-VL's processor takes."""

LFM2_TOKENS = {"min": 64, "max": 256}
LFM2_TILE, LFM2_TILES = 512, {"min": 2, "max": 10}
"""What LFM2-VL's processor has by default: the tokens of an image, the pixels of a tile's side, and
the tiles of an image.
"""

Settings = Mapping[str, Any]
"""The settings of an image processor, by the names that transformers gives them."""


class ImageFamily(Enum):
    """Checkpoints whose images are prepared in the same way."""

    QWEN = "qwen"  # Qwen2-VL, 2.5-VL, 3-VL and 3.5: patches of any number
    PIXTRAL = "pixtral"  # Pixtral and Mistral 3: rows of patches that end with a token of their own
    GEMMA3 = "gemma3"  # one size, 256 tokens
    GEMMA4 = "gemma4"  # patches of a number that is near one of five
    KIMI = "kimi"  # Kimi-VL: patches of any number
    LLAMA4 = "llama4"  # tiles of one size, and the whole image in one
    LFM2 = "lfm2"  # LFM2-VL: tiles of one size where it is large, and the whole image, any number


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
    "llama4": ImageFamily.LLAMA4,
    "lfm2-vl": ImageFamily.LFM2,
    "lfm2_vl": ImageFamily.LFM2,
}


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tokens of an image that is shown in tiles, row by row, and then as a whole.

    Each tile has `n_parts` tokens that stand for its parts, and one of `marks` before them, by its
    row and column; `{}`: none. A token `column_end` stands between two tiles of a row, and
    `row_end` after each row. `before` the tiles and before the `whole` image are other tokens.
    """

    most: int  # tiles of an image
    n_parts: int
    before: tuple[int, ...]
    whole: tuple[int, ...]
    marks: Mapping[tuple[int, int], int]
    column_end: tuple[int, ...] = ()
    row_end: tuple[int, ...] = ()

    @property
    def max_tokens(self) -> int:
        """The most tokens of an image before its parts as a whole."""
        n_ends = max(len(self.column_end), len(self.row_end))
        n_each = bool(self.marks) + self.n_parts + n_ends
        return len(self.before) + self.most * n_each + len(self.whole)


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The tokens of a checkpoint's images.

    In place of a `placeholder`, which the chat template writes once for each image, a prompt has
    the tokens `before`, a token `part` for each square of `merge` x `merge` patches, row by row,
    and the tokens `after`. A token `row_end` stands between two rows. An image may also be shown in
    `tiles`; then its grid begins with the rows and the columns of tiles.
    """

    placeholder: int
    part: int
    merge: int
    max_tokens: int  # of the largest image, those around it included
    before: tuple[int, ...] = ()
    row_end: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    is_whole: bool = False  # the parts see each other
    tiles: Tiles | None = None

    def prepared(self, digest: bytes, grid: tuple[int, ...], file: str) -> PreparedImage:
        """The image whose array is in `file`, with its tokens. Its `grid` ends with the rows and
        the columns of patches. Raises ValueError for a grid that no image of the checkpoint has.
        """
        *first, patch_rows, patch_columns = grid
        rows, columns = patch_rows // self.merge, patch_columns // self.merge
        n_rows = rows if self.tiles is not None else math.prod(first) * rows
        n_around = len(self.before) + len(self.after) + len(self.row_end) * (n_rows - 1)
        if min(grid) < 1 or not 0 < n_rows * columns <= self.max_tokens - n_around:
            raise ValueError(f"no image has a grid of {grid} patches")
        tokens, runs = list(self.before), list[tuple[int, int]]()
        if self.tiles is not None:
            tokens, runs = self._tiled(self.tiles, first)
        n_rows, columns = (n_rows, columns) if self.row_end else (1, n_rows * columns)
        for row in range(n_rows):
            tokens += self.row_end if row else ()
            runs.append((len(tokens), columns))
            tokens += (self.part,) * columns
        tokens += self.after
        if len(tokens) > self.max_tokens:
            raise ValueError(f"no image has a grid of {grid} patches")
        return PreparedImage(Image(digest, tuple(runs), grid, file, self.is_whole), tuple(tokens))

    def _tiled(self, tiles: Tiles, first: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens before the parts of the whole image, and the runs among them."""
        rows, columns = first
        if rows * columns > tiles.most:
            raise ValueError(f"no image has {rows} x {columns} tiles")
        if rows * columns == 1:
            return list(self.before), []
        tokens, runs = list(tiles.before), list[tuple[int, int]]()
        for row, column in product(range(rows), range(columns)):
            if tiles.marks:
                tokens.append(tiles.marks[row, column])
            runs.append((len(tokens), tiles.n_parts))
            tokens += (self.part,) * tiles.n_parts
            tokens += tiles.row_end if column == columns - 1 else tiles.column_end
        return tokens + list(tiles.whole), runs


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
        if self.family in (ImageFamily.GEMMA3, ImageFamily.LLAMA4):
            return int(self._vision["patch_size"])
        if self.family is ImageFamily.LFM2:
            return int(self.settings.get("encoder_patch_size", 16))
        return int(self.settings.get("patch_size", 16 if self.family is ImageFamily.GEMMA4 else 14))

    def layout(self) -> ImageLayout:
        """How images stand in a prompt."""
        make: Mapping[ImageFamily, Callable[[], ImageLayout]] = {
            ImageFamily.QWEN: self._qwen,
            ImageFamily.PIXTRAL: self._pixtral,
            ImageFamily.GEMMA3: self._gemma3,
            ImageFamily.GEMMA4: self._gemma4,
            ImageFamily.KIMI: self._kimi,
            ImageFamily.LLAMA4: self._llama4,
            ImageFamily.LFM2: self._lfm2,
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
        token = int(self.config["image_token_id"])
        max_tokens = _most_resized(least, most, self.patch_size * merge)
        return ImageLayout(token, token, merge, max_tokens)

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

    def _llama4(self) -> ImageLayout:
        merge = round(1 / float(self._vision["pixel_shuffle_ratio"]))
        side = int(self._vision["image_size"]) // self.patch_size // merge
        start, image, end, column_end, row_end = (
            self._token_of(f"<|{name}|>")
            for name in (
                "image_start",
                "image",
                "image_end",
                "tile_x_separator",
                "tile_y_separator",
            )
        )
        tiles = Tiles(
            int(self.settings.get("max_patches", 16)),
            side**2,
            before=(start,),
            whole=(image,),
            marks={},
            column_end=(column_end,),
            row_end=(row_end,),
        )
        return ImageLayout(
            image,
            int(_first(self.config, "image_token_index", "image_token_id")),
            merge,
            tiles.max_tokens + side**2 + 1,
            before=(start, image),
            after=(end,),
            tiles=tiles,
        )

    def _lfm2(self) -> ImageLayout:
        settings = self.settings
        merge = int(settings.get("downsample_factor", 2))
        least, most = (int(settings.get(f"{m}_image_tokens", n)) for m, n in LFM2_TOKENS.items())
        before, whole, after = tuple[int, ...](), tuple[int, ...](), tuple[int, ...]()
        has_marks = bool(self._processor.get("use_image_special_tokens", True))
        if has_marks:
            names = "<|image_start|>", "<|img_thumbnail|>", "<|image_end|>"
            before, whole, after = ((self._token_of(name),) for name in names)
        tiles = None
        if settings.get("do_image_splitting", True):
            if not settings.get("use_thumbnail", True):
                raise ValueError("images in tiles alone (use_thumbnail)")
            n_tiles = int(settings.get("max_tiles", LFM2_TILES["max"]))
            n_parts = (int(settings.get("tile_size", LFM2_TILE)) // self.patch_size // merge) ** 2
            rows = range(n_tiles if has_marks else 0)
            marks = {
                (row, column): self._token_of(f"<|img_row_{row + 1}_col_{column + 1}|>")
                for row in rows
                for column in range(n_tiles // (row + 1))
            }
            tiles = Tiles(n_tiles, n_parts, before=before, whole=whole, marks=marks)
        token = int(_first(self.config, "image_token_id", "image_token_index"))
        n_around = (len(before) if tiles is None else tiles.max_tokens) + len(after)
        max_tokens = _most_resized(least, most, 1) + n_around
        return ImageLayout(token, token, merge, max_tokens, before, after=after, tiles=tiles)

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


def _most_resized(least: int, most: int, side: int) -> int:
    """The most squares of an image that is resized to between `least` and `most` pixels, in whole
    squares of `side` pixels, with sides in the ratio of MAX_ASPECT_RATIO at most.
    """
    grown = least / side**2  # of an image that was too small, before its sides are rounded up
    return max(
        most // side**2,
        math.isqrt(MAX_ASPECT_RATIO * most) // side,  # one row
        math.floor(grown + math.sqrt(grown / MAX_ASPECT_RATIO) * (MAX_ASPECT_RATIO + 1) + 1),
    )


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
