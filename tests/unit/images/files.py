"""Encoded images made at test time: sound ones by a seed, with what is to be seen, and hostile
ones.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from random import Random
from typing import Any

import numpy as np
from PIL import Image, ImageOps

Levels = np.ndarray[Any, np.dtype[Any]]

SIGNATURE = b"\x89PNG\r\n\x1a\n"
ORIENTATION = 0x0112


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def header(width: int, height: int, depth: int = 8, colour: int = 2) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))


def png(
    levels: Levels, depth: int, colour: int, *others: bytes, after: Sequence[bytes] = ()
) -> bytes:
    """A PNG file of `levels` [rows, columns, channels], with other chunks before and after them."""
    height, width, _ = levels.shape
    rows = b""
    for row in levels.reshape(height, -1):
        if depth == 16:
            packed = row.astype(">u2").tobytes()
        else:
            bits = "".join(f"{int(level):0{depth}b}" for level in row)
            bits += "0" * (-len(bits) % 8)
            packed = int(bits, 2).to_bytes(len(bits) // 8, "big")
        rows += b"\0" + packed
    data = chunk(b"IDAT", zlib.compress(rows))
    return b"".join(
        (
            SIGNATURE,
            header(width, height, depth, colour),
            *others,
            data,
            *after,
            chunk(b"IEND", b""),
        )
    )


@dataclass(frozen=True)
class Picture:
    """An encoded image, and the pixels in RGB that are to be seen."""

    name: str
    encoded: bytes
    rgb: Levels


def on_white(rgb: Levels, alpha: Levels) -> Levels:
    """Each colour mixed with white by its alpha, within rounding."""
    share = alpha[..., None].astype(np.float64) / 255
    return np.rint(rgb * share + 255 * (1 - share)).astype(np.uint8)


def png_picture(random: Random) -> Picture:
    """Any kind of PNG: grey, palette or colours, 1 to 16 bits, with or without transparency."""
    colour = random.choice([0, 2, 3, 4, 6])
    depth = random.choice({0: [1, 2, 4, 8, 16], 3: [1, 2, 4, 8]}.get(colour, [8, 16]))
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    height, width = random.randint(1, 40), random.randint(1, 40)
    draws = np.random.default_rng(random.getrandbits(32))
    levels = draws.integers(0, 1 << depth, (height, width, channels))
    eight = levels >> 8 if depth == 16 else levels * 255 // ((1 << depth) - 1)
    alpha, others = np.full((height, width), 255), list[bytes]()
    is_keyed = random.random() < 0.5
    if colour == 3:
        palette = draws.integers(0, 256, (1 << depth, 3))
        others.append(chunk(b"PLTE", palette.astype(np.uint8).tobytes()))
        rgb = palette[levels[..., 0]]
        if is_keyed:
            alphas = np.full(1 << depth, 255)
            alphas[: random.randint(1, 1 << depth)] = draws.integers(0, 256)
            others.append(chunk(b"tRNS", alphas.astype(np.uint8).tobytes()))
            alpha = alphas[levels[..., 0]]
    else:
        rgb = eight[..., : 3 if channels > 2 else 1].repeat(3 if channels <= 2 else 1, axis=-1)
        if colour in (4, 6):
            alpha = eight[..., -1]
        elif is_keyed:
            key = levels[0, 0]
            others.append(chunk(b"tRNS", key.astype(">u2").tobytes()))
            alpha = np.where((levels == key).all(axis=-1), 0, 255)
    name = f"PNG of {depth} bits, colour type {colour}{', keyed' if is_keyed else ''}"
    return Picture(name, png(levels, depth, colour, *others), on_white(rgb, alpha))


def saved_picture(random: Random) -> Picture:
    """JPEG in colours, grey and CMYK, WebP, and GIF, turned by EXIF, as Pillow itself saves and
    reads them.
    """
    choices: Sequence[tuple[str, str, dict[str, Any]]] = [
        ("JPEG", "RGB", {"quality": 90}),
        ("JPEG", "RGB", {"progressive": True, "quality": 60}),
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}),
        ("WEBP", "RGB", {"lossless": True}),
        ("WEBP", "RGBA", {"lossless": True, "exact": True}),
        ("WEBP", "RGB", {"quality": 50}),
        ("PNG", "RGB", {}),
        ("GIF", "P", {}),
        ("GIF", "L", {}),
    ]
    kind, mode, options = random.choice(choices)
    draws = np.random.default_rng(random.getrandbits(32))
    size = random.randint(1, 60), random.randint(1, 60)
    channels = {"L": 1, "P": 1, "CMYK": 4, "RGBA": 4}.get(mode, 3)
    levels = draws.integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)
    image = Image.frombytes(mode, size, levels.tobytes())
    if mode == "P":
        image.putpalette(draws.integers(0, 256, 768, dtype=np.uint8).tobytes())
    if kind != "GIF" and (orientation := random.randint(0, 8)):
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        options = {**options, "exif": exif.tobytes()}
    encoded = BytesIO()
    image.save(encoded, kind, **options)
    with Image.open(BytesIO(encoded.getvalue())) as read:
        upright = ImageOps.exif_transpose(read)
        rgba = np.asarray(upright.convert("RGBA"))
        rgb = np.asarray(upright.convert("RGB"))
    if mode == "RGBA":
        rgb = on_white(rgba[..., :3], rgba[..., 3])
    return Picture(f"{kind} {mode} {sorted(options)}", encoded.getvalue(), rgb)


PICTURES: Sequence[Callable[[Random], Picture]] = (png_picture, saved_picture)


def noise(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG file of random colours."""
    draws = np.random.default_rng(seed)
    return encoded_png(draws.integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded_png(rgb: Levels) -> bytes:
    encoded = BytesIO()
    Image.fromarray(rgb).save(encoded, "PNG", compress_level=1)
    return encoded.getvalue()


def gif(n_frames: int) -> bytes:
    """A GIF of 4 x 4 pixels: the first frame is black, all others are white."""
    table = b"\0\0\0\xff\xff\xff"
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 4, 4, 0) + b"\x02"
    black, white = b"\x03\x84\x8f\x05\0", b"\x03\x8c\x8f\x05\0"  # the codes of 16 equal pixels
    control = b"\x21\xf9\x04\0\x01\0\0\0"
    return b"".join(
        (
            b"GIF89a" + struct.pack("<HHBBB", 4, 4, 0x80, 0, 0) + table,
            control + frame + black,
            (control + frame + white) * (n_frames - 1),
            b";",
        )
    )
