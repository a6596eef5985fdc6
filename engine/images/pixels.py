"""The image processors of families whose own need torch: Kimi-VL, Llama 4 and LFM2-VL.

For the worker process alone.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from PIL import Image

from engine.images.layout import (
    LFM2_TILE,
    LFM2_TILES,
    LFM2_TOKENS,
    MAX_ASPECT_RATIO,
    MAX_KIMI_PATCHES,
    Settings,
)
from engine.values.images import Detail

LOW_EDGE = 512
"""The pixels of the longest side for `Detail.LOW`, where a processor has no least size."""

_BLACK = (0, 0, 0)

Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image as a vision tower reads it, with its grid of patches."""

    array: Array
    grid: tuple[int, ...]


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
    return Pixels(as_float32(patches.reshape(-1, 3, side, side)), (rows, columns))


_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def as_float32(values: object) -> Array:
    """The values in one piece of memory."""
    return np.ascontiguousarray(values, dtype=np.float32)


def llama4_pixels(settings: Settings, patch: int, image: Image.Image, detail: Detail) -> Pixels:
    """Llama 4's processor, `Llama4ImageProcessor` of transformers: tiles of one size on the canvas
    that fits best, and the image in one more.

    The array has the tiles row by row, `[tiles, 3, side, side]`, and the grid the rows and columns
    of tiles, then those of the patches of a tile.
    """
    size = settings.get("size") or {"height": 336, "width": 336}
    side = int(size["height"])
    resample = Image.Resampling(int(settings.get("resample", Image.Resampling.BILINEAR)))
    most = 1 if detail is Detail.LOW else int(settings.get("max_patches", 16))
    enlarges = bool(settings.get("resize_to_max_canvas", False))
    rows, columns = _best_canvas(image.size, side, most, enlarges=enlarges)
    width, height = image.size
    canvas = columns * side, rows * side
    limits = (
        canvas
        if enlarges
        else tuple(min(max(own, side), of) for own, of in zip(image.size, canvas, strict=True))
    )
    scales = limits[0] / width, limits[1] / height
    if scales[0] < scales[1]:
        resized = limits[0], min(math.floor(height * scales[0]), limits[1])
    else:
        resized = min(math.floor(width * scales[1]), limits[0]), limits[1]
    padded = Image.new("RGB", canvas, _BLACK)
    padded.paste(image.resize((max(resized[0], 1), max(resized[1], 1)), resample))
    views = list(_split(padded, rows, columns))
    if len(views) > 1:
        views.append(image.resize((side, side), resample))
    mean, std = (_bfloat16(settings.get(f"image_{name}", [0.5] * 3)) for name in ("mean", "std"))
    scale = np.float32(settings.get("rescale_factor", 1 / 255))
    array = _bfloat16(np.stack([np.asarray(view, np.float32) for view in views]) * scale)
    array = _bfloat16(_bfloat16(array - mean) / std).transpose(0, 3, 1, 2)
    return Pixels(as_float32(array), (rows, columns, side // patch, side // patch))


def _best_canvas(size: tuple[int, int], side: int, most: int, *, enlarges: bool) -> tuple[int, int]:
    """The rows and columns of tiles on which an image is scaled up least; where it is larger than
    all of them, down least. `enlarges`: on which it is scaled up most.
    """
    ratios = dict[float, list[tuple[int, int]]]()
    for n_tiles in range(most, 0, -1):
        for rows in (of for of in range(1, n_tiles + 1) if n_tiles % of == 0):
            ratios.setdefault(rows * rows / n_tiles, []).append((rows, n_tiles // rows))
    canvases = np.array([canvas for each in ratios.values() for canvas in each])
    scales = ((canvases * side).astype(np.float32) / np.array(size[::-1], np.float32)).min(axis=1)
    larger = scales[scales >= 1]
    scale = scales.max() if enlarges or not len(larger) else larger.min()
    found = canvases[scales == scale]
    rows, columns = found[found.prod(axis=1).argmin()]
    return int(rows), int(columns)


def _split(image: Image.Image, rows: int, columns: int) -> Iterator[Image.Image]:
    """The tiles of an image, row by row."""
    width, height = image.size[0] // columns, image.size[1] // rows
    for row, column in product(range(rows), range(columns)):
        yield image.crop((column * width, row * height, (column + 1) * width, (row + 1) * height))


def _bfloat16(values: object) -> Array:
    """The values, rounded to those that bfloat16 has, in which Llama 4's processor computes."""
    bits = as_float32(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def lfm2_pixels(settings: Settings, patch: int, image: Image.Image, detail: Detail) -> Pixels:
    """LFM2-VL's processor, `Lfm2VlImageProcessor` of transformers: the image in whole squares of
    patches, and before it tiles of one size where it is large.

    The array has the patches of the tiles and of the image, `[patches, values]`, and the grid the
    rows and columns of tiles, then those of the patches of the image. Raises ValueError.
    """
    width, height = image.size
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ValueError(f"one side is more than {MAX_ASPECT_RATIO} times the other")
    square = patch * int(settings.get("downsample_factor", 2))
    least, most = (int(settings.get(f"{m}_image_tokens", n)) for m, n in LFM2_TOKENS.items())
    resample = Image.Resampling(int(settings.get("resample", Image.Resampling.BILINEAR)))
    rounded = [round(side / square) * square for side in image.size]
    is_large = math.prod(max(side, patch) for side in rounded) > (
        most * square**2 * float(settings.get("max_pixels_tolerance", 2.0))
    )
    if detail is Detail.LOW:
        most = least
    sides = [max(side, square) for side in rounded]
    if math.prod(sides) > most * square**2:
        scale = math.sqrt(width * height / (most * square**2))
        sides = [max(math.floor(of / scale / square), 1) * square for of in image.size]
    elif math.prod(sides) < least * square**2:
        scale = math.sqrt(least * square**2 / (width * height))
        sides = [math.ceil(of * scale / square) * square for of in image.size]
    views, rows, columns = list[Image.Image](), 1, 1
    if is_large and detail is Detail.FULL and settings.get("do_image_splitting", True):
        side = int(settings.get("tile_size", LFM2_TILE))
        limits = (int(settings.get(f"{m}_tiles", n)) for m, n in LFM2_TILES.items())
        rows, columns = closest_tiles(image.size, side, *limits)
        tiled = image.resize((columns * side, rows * side), resample)
        views += _split(tiled, rows, columns) if rows * columns > 1 else ()
    views.append(image.resize((sides[0], sides[1]), resample))
    mean, std = (np.float32(settings.get(f"image_{name}", [0.5] * 3)) for name in ("mean", "std"))
    scale = settings.get("rescale_factor", 1 / 255)
    arrays = [(np.asarray(view, np.float32) * scale - mean) / std for view in views]
    patches = [_patches(array, patch) for array in arrays]
    grid = rows, columns, sides[1] // patch, sides[0] // patch
    return Pixels(as_float32(np.concatenate(patches)), grid)


def closest_tiles(size: tuple[int, int], side: int, least: int, most: int) -> tuple[int, int]:
    """The rows and columns of tiles whose ratio is closest to the image's. Of several, those with
    the most tiles of which the image fills half.
    """
    grids = [
        (columns, rows)
        for columns, rows in product(range(1, most + 1), repeat=2)
        if least <= columns * rows <= most
    ]
    best, found = math.inf, (1, 1)
    for columns, rows in sorted(grids, key=math.prod):
        off = abs(size[0] / size[1] - columns / rows)
        if off < best:
            best, found = off, (rows, columns)
        elif off == best and math.prod(size) > 0.5 * side**2 * columns * rows:
            found = rows, columns
    return found


def _patches(array: Array, patch: int) -> Array:
    """An image `[height, width, 3]` as `[patches, values]`."""
    rows, columns = (side // patch for side in array.shape[:2])
    split = array.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 1, 3, 4)
    return split.reshape(rows * columns, -1)
