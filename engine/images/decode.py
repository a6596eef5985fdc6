"""Reads encoded images with Pillow: PNG, JPEG, WebP, and the first frame of GIF.

For the worker process alone: images come from clients, and may be made to take memory and time.
"""

import warnings
from contextlib import suppress
from io import BytesIO

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from engine.api import one_line

MAX_ENCODED_BYTES = 20 * 1024**2
MAX_PIXELS = 40_000_000

Image.MAX_IMAGE_PIXELS = MAX_PIXELS
warnings.simplefilter("error", Image.DecompressionBombWarning)

_SERVED = "PNG, JPEG, WebP or GIF"
_BEGINNINGS = (
    ("PNG", b"\x89PNG\r\n\x1a\n"),
    ("JPEG", b"\xff\xd8\xff"),
    ("GIF", b"GIF87a"),
    ("GIF", b"GIF89a"),
)
_OTHERS = (
    ("a TIFF image", b"II*\0"),
    ("a TIFF image", b"MM\0*"),
    ("a TIFF image", b"II+\0"),
    ("a TIFF image", b"MM\0+"),
    ("a PDF document", b"%PDF-"),
    ("a BMP image", b"BM"),
    ("a Photoshop image", b"8BPS"),
    ("an icon", b"\0\0\1\0"),
    ("a JPEG XL image", b"\xff\x0a"),
    ("a JPEG XL image", b"\0\0\0\x0cJXL "),
    ("a JPEG 2000 image", b"\0\0\0\x0cjP  "),
    ("a video", b"\x1a\x45\xdf\xa3"),
    ("a ZIP archive", b"PK"),
    ("PostScript", b"%!PS"),
)
_BOXED = {b"avif": "an AVIF image", b"heic": "a HEIC image", b"mif1": "a HEIF image"}
_PDF_BYTES = 1024  # a PDF reader looks for the header in them
_ZIP_END = b"PK\x05\x06"
_ZIP_END_BYTES = 22  # and a comment, whose length is in the last two

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""How an image is turned upright, by its orientation in EXIF."""

_WHITE = (255, 255, 255, 255)
_GREYS = {"L;2": 85, "L;4": 17}  # of one step, in PNG images with fewer than 8 bits


class UnreadableImage(ValueError):
    """The image is refused: why, in words for a client."""


def decode(encoded: bytes) -> Image.Image:
    """The image in RGB, upright, on white where it is transparent. Raises UnreadableImage, and
    MemoryError.
    """
    if len(encoded) > MAX_ENCODED_BYTES:
        raise UnreadableImage(f"it has {len(encoded):,} bytes; {MAX_ENCODED_BYTES:,} are the most")
    kind = _kind(encoded)
    try:
        with Image.open(BytesIO(encoded), formats=[kind]) as image:
            _check_pixels(image)
            raw_mode = image.tile[0].args if image.tile else ""
            image.load()
            _check_pixels(image)
            return _on_white(_upright(image), raw_mode)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise UnreadableImage(f"it has more than {MAX_PIXELS:,} pixels") from error
    except UnidentifiedImageError as error:
        raise UnreadableImage(f"it begins like a {kind} image, and is none") from error
    except (MemoryError, UnreadableImage):
        raise
    except Exception as error:  # Pillow's decoders raise almost any
        raise UnreadableImage(f"it cannot be read as {kind}: {one_line(error)}") from error


def _check_pixels(image: Image.Image) -> None:
    """Raises UnreadableImage."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise UnreadableImage(
            f"it has {width:,} x {height:,} pixels; {MAX_PIXELS:,} in all are the most"
        )
    if not width or not height:
        raise UnreadableImage("it has no pixels")


def _kind(encoded: bytes) -> str:
    """Pillow's name of the format. Raises UnreadableImage for any other format, and for files that
    other programs read as something else.
    """
    if not encoded:
        raise UnreadableImage("it is empty")
    found = next((kind for kind, begins in _BEGINNINGS if encoded.startswith(begins)), "")
    if encoded[:4] == b"RIFF":
        found = "WEBP" if encoded[8:12] == b"WEBP" else ""
    if not found:
        raise UnreadableImage(f"it is {_described(encoded)}; send {_SERVED}")
    if b"%PDF-" in encoded[:_PDF_BYTES]:
        raise UnreadableImage(f"it is a {found} image and a PDF document in one file")
    if _ends_as_zip(encoded):
        raise UnreadableImage(f"it is a {found} image and a ZIP archive in one file")
    return found


def _described(encoded: bytes) -> str:
    for name, begins in _OTHERS:
        if encoded.startswith(begins):
            return name
    if encoded[4:8] == b"ftyp":
        return _BOXED.get(encoded[8:12], "a video")
    if encoded[:4] == b"RIFF":
        return "a video" if encoded[8:12] == b"AVI " else "a RIFF file without an image"
    text = encoded[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in text:
        return "an SVG image"
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<")):
        return "a text with markup"
    return "no image that is known here"


def _ends_as_zip(encoded: bytes) -> bool:
    """Whether the file ends with the directory of a ZIP archive."""
    tail = encoded[-(_ZIP_END_BYTES + 0xFFFF) :]
    at = tail.rfind(_ZIP_END)
    if not 0 <= at <= len(tail) - _ZIP_END_BYTES:
        return False
    n_comment_bytes = int.from_bytes(tail[at + 20 : at + 22], "little")
    return at + _ZIP_END_BYTES + n_comment_bytes == len(tail)


def _upright(image: Image.Image) -> Image.Image:
    """The image, turned as its orientation says. Metadata that cannot be read say nothing."""
    orientation = None
    with suppress(Exception):
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    turn = _TURNS.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _on_white(image: Image.Image, raw_mode: object) -> Image.Image:
    """The image in RGB. `raw_mode` is the layout of its pixels in the file, as Pillow names it."""
    transparent = image.info.get("transparency")
    if image.mode.startswith("I;16"):  # Pillow would cut brightness above 255
        levels = np.asarray(image)
        grey = Image.fromarray((levels >> 8).astype(np.uint8))
        if not isinstance(transparent, int):
            return grey.convert("RGB")
        grey.putalpha(Image.fromarray(np.where(levels == transparent, 0, 255).astype(np.uint8)))
        image = grey
    elif isinstance(transparent, int) and raw_mode in _GREYS:
        image.info["transparency"] = transparent * _GREYS[str(raw_mode)]
    elif isinstance(transparent, tuple) and raw_mode == "RGB;16B":
        image.info["transparency"] = tuple(level >> 8 for level in transparent)
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image).convert("RGB")
