"""Files that are sent as images: bombs, broken ones, and ones that are something else, too."""

import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
from PIL import Image

from tests.unit.images.files import SIGNATURE, chunk, gif, header, noise, png

KINDS = ("PNG", "JPEG", "WEBP", "GIF")


@dataclass(frozen=True, slots=True)
class Hostile:
    """What is sent, and whether a model may be shown it: its first frame does no harm."""

    name: str
    encoded: bytes
    is_shown: bool = False


def saved(kind: str, size: tuple[int, int] = (24, 24), seed: int = 0, **options: object) -> bytes:
    """A sound image of random colours."""
    encoded = io.BytesIO()
    mode = "P" if kind == "GIF" else "RGB"
    with Image.open(io.BytesIO(noise(*size, seed))) as image:
        image.convert(mode).save(encoded, kind, **options)
    return encoded.getvalue()


def padded(n_bytes: int, seed: int = 0) -> bytes:
    """A sound PNG file of `n_bytes`, most of them in a chunk that nobody reads."""
    rows = np.random.default_rng(seed).integers(0, 256, (16, 16, 3))
    size = n_bytes - len(png(rows, 8, 2, chunk(b"prIv", b"")))
    return png(rows, 8, 2, chunk(b"prIv", bytes(size)))


def huge_png() -> bytes:
    """50,000 x 50,000 pixels in 2 kB."""
    rows = zlib.compress(bytes(1_000_000), 9)
    return SIGNATURE + header(50_000, 50_000, 1, 0) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def bombs() -> Iterator[Hostile]:
    """Few bytes that ask for much memory or time."""
    yield Hostile("a PNG of 50,000 x 50,000 pixels", huge_png())
    flat = png(np.zeros((2, 2, 3)), 8, 2, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 26))))
    yield Hostile("a PNG with a text that grows to 64 MiB", flat)
    yield Hostile("a GIF of 100,000 frames", gif(100_000), is_shown=True)
    screen = b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0, 0, 0)
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 65_535, 65_535, 0) + b"\2\0;"
    yield Hostile("a GIF of 65,535 x 65,535 pixels", screen + frame)
    yield Hostile("a WebP whose canvas is 16,384 x 16,384", animated_webp(1, canvas=16_384))
    yield Hostile("a WebP of 2,000 frames", animated_webp(2_000), is_shown=True)
    small = saved("JPEG")
    at = small.index(b"\xff\xc0")
    tall = small[: at + 5] + struct.pack(">HH", 65_500, 65_500) + small[at + 9 :]
    yield Hostile("a JPEG of 65,500 x 65,500 pixels", tall)


def animated_webp(n_frames: int, canvas: int = 16) -> bytes:
    """An animation of one repeated frame on a large canvas."""
    encoded = io.BytesIO()
    Image.new("RGB", (16, 16), (9, 9, 9)).save(encoded, "WEBP", lossless=True)
    frame = encoded.getvalue()[12:]  # after RIFF, its size and WEBP
    place = bytes(6) + (15).to_bytes(3, "little") * 2 + (40).to_bytes(3, "little") + b"\0"
    size = (canvas - 1).to_bytes(3, "little") * 2
    data = _riff(b"VP8X", b"\x02\0\0\0" + size) + _riff(b"ANIM", bytes(6))
    data += _riff(b"ANMF", place + frame) * n_frames
    return b"RIFF" + struct.pack("<I", len(data) + 4) + b"WEBP" + data


def _riff(kind: bytes, data: bytes) -> bytes:
    return kind + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)


def truncated(random: Random, times: int) -> Iterator[Hostile]:
    """Files of each format, cut at any place before their last bytes."""
    for kind in KINDS:
        whole = saved(kind, seed=random.getrandbits(16))
        for n_bytes in sorted(random.sample(range(1, len(whole) - 16), times)):
            yield Hostile(f"{n_bytes} of {len(whole)} bytes of a {kind} image", whole[:n_bytes])


def polyglots() -> Iterator[Hostile]:
    """Images that other programs read as an archive or a page."""
    archive = b"PK\x03\x04" + bytes(26) + b"PK\x05\x06" + bytes(18)
    page = b"<!doctype html><script>alert(1)</script>"
    for kind in KINDS:
        image = saved(kind)
        yield Hostile(f"{kind} and a ZIP archive after it", image + archive)
        yield Hostile(f"{kind} after a ZIP archive", archive + image)
        yield Hostile(f"{kind} and a page after it", image + page, is_shown=True)
        yield Hostile(f"{kind} after a page", page + image)


def others() -> Iterator[Hostile]:
    """Files of formats that are not served."""
    yield Hostile("an SVG", b'<svg xmlns="http://www.w3.org/2000/svg"><script>1</script></svg>')
    laughs = b'<!DOCTYPE a [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><svg>&b;</svg>'
    yield Hostile("an SVG with entities", laughs)
    for kind in ("TIFF", "BMP", "AVIF", "ICO", "PPM", "TGA", "PDF", "JPEG2000", "DDS"):
        if kind in Image.SAVE or kind.lower() in Image.registered_extensions().values():
            yield Hostile(f"{kind}", saved(kind))
    yield Hostile("Photoshop", b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 9, 9, 8, 3))
    yield Hostile("a video", b"\0\0\0\x20ftypisom" + bytes(40))
    yield Hostile("nothing", b"")
    yield Hostile("a program", b"\x7fELF" + bytes(200))


def changed(random: Random, times: int) -> Iterator[Hostile]:
    """Sound files of each format with some other bytes. Some can be read."""
    for kind in KINDS:
        for _ in range(times):
            encoded = bytearray(saved(kind, seed=random.getrandbits(16)))
            for _ in range(random.randint(1, 8)):
                encoded[random.randrange(12, len(encoded))] = random.getrandbits(8)
            yield Hostile(f"{kind} with other bytes", bytes(encoded), is_shown=True)
