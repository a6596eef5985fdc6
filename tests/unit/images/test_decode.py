"""Encoded images are read as they look, and anything else is refused in words."""

import io
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any, TypeAlias

import numpy as np
import pytest
from PIL import Image

from engine.images.decode import MAX_ENCODED_BYTES, UnreadableImage, decode
from tests.unit.images.files import (
    PICTURES,
    SIGNATURE,
    Picture,
    chunk,
    encoded_png,
    gif,
    header,
    noise,
    png,
)

SEEDS = range(60)

Maker: TypeAlias = Callable[[Random], Picture]


def refusal(encoded: bytes) -> str:
    with pytest.raises(UnreadableImage) as refused:
        decode(encoded)
    return str(refused.value)


def jpeg(**options: Any) -> bytes:
    encoded = io.BytesIO()
    Image.open(io.BytesIO(noise(40, 30))).save(encoded, "JPEG", **options)
    return encoded.getvalue()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("make", PICTURES)
def test_an_image_is_read_as_it_looks(make: Maker, seed: int) -> None:
    picture = make(Random(seed))
    found = decode(picture.encoded)
    assert found.mode == "RGB"
    difference = np.abs(np.asarray(found).astype(int) - picture.rgb.astype(int)).max()
    assert difference <= 1, picture.name  # alpha may be rounded either way


def test_only_the_first_frame_of_a_gif_is_read() -> None:
    found = np.asarray(decode(gif(200_000)))
    assert found.shape == (4, 4, 3)
    assert not found.any()


def test_the_first_frame_of_an_animated_png_and_of_a_webp_is_read() -> None:
    frames = [Image.new("RGB", (8, 8), (10 * at, 0, 0)) for at in range(1, 5)]
    for kind in ("PNG", "WEBP"):
        encoded = io.BytesIO()
        frames[0].save(encoded, kind, save_all=True, append_images=frames[1:], lossless=True)
        assert np.asarray(decode(encoded.getvalue())).max() == 10


@pytest.mark.parametrize("size", [(50_000, 50_000), (2**31 - 1, 1), (40_000_001, 1), (6400, 6251)])
def test_pixels_are_counted_in_the_header(size: tuple[int, int]) -> None:
    rows = zlib.compress(bytes(1_000_000), 9)
    encoded = SIGNATURE + header(*size) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    assert len(encoded) < 2_000
    assert "pixels" in refusal(encoded)


def test_as_many_pixels_as_may_be_are_read() -> None:
    encoded = io.BytesIO()
    Image.new("1", (8_000, 5_000), 1).save(encoded, "PNG")
    assert decode(encoded.getvalue()).size == (8_000, 5_000)


def test_pixels_are_counted_in_headers_of_other_formats() -> None:
    for screen, frame in ((65_535, 4), (4, 65_535)):
        begins = b"GIF89a" + struct.pack("<HHBBB", screen, screen, 0, 0, 0)
        shown = b"\x2c" + struct.pack("<HHHHB", 0, 0, frame, frame, 0) + b"\2\0;"
        assert "pixels" in refusal(begins + shown)
    small = jpeg()
    at = small.index(b"\xff\xc0")
    assert "pixels" in refusal(
        small[: at + 5] + struct.pack(">HH", 65_500, 65_500) + small[at + 9 :]
    )
    size = (16_383).to_bytes(3, "little") * 2
    extended = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + size
    encoded = b"RIFF" + struct.pack("<I", len(extended)) + extended
    assert refusal(encoded)


def test_encoded_bytes_are_counted() -> None:
    assert "are the most" in refusal(SIGNATURE + bytes(MAX_ENCODED_BYTES))


@pytest.mark.parametrize(
    ("encoded", "words"),
    [
        (b"", "empty"),
        (b"hello", "no image"),
        (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b"\xef\xbb\xbf <SVG></SVG>", "SVG"),
        (b"<!doctype html><p>", "markup"),
        (b"II*\0\x08\0\0\0", "TIFF"),
        (b"MM\0*\0\0\0\x08", "TIFF"),
        (b"%PDF-1.7\n", "PDF"),
        (b"BM" + bytes(60), "BMP"),
        (b"\0\0\0\x20ftypavif", "AVIF"),
        (b"\0\0\0\x20ftypheic", "HEIC"),
        (b"\0\0\0\x20ftypisom", "video"),
        (b"\x1a\x45\xdf\xa3" + bytes(60), "video"),
        (b"RIFF\0\0\0\0AVI LIST", "video"),
        (b"RIFF\0\0\0\0WAVE", "RIFF"),
        (b"PK\3\4", "ZIP"),
        (b"%!PS-Adobe", "PostScript"),
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"\xff\xd8\xff\xe0", "JPEG"),
        (b"GIF89a", "GIF"),
        (b"RIFF\0\0\0\0WEBP", "WEBP"),
    ],
)
def test_what_is_no_image_is_refused_in_words(encoded: bytes, words: str) -> None:
    assert words in refusal(encoded)


def test_files_that_are_something_else_as_well_are_refused() -> None:
    document = chunk(b"tEXt", b"Title\0%PDF-1.4 1 0 obj")
    assert "PDF" in refusal(png(np.zeros((2, 2, 3)), 8, 2, document))
    directory = b"PK\x05\x06" + bytes(16) + struct.pack("<H", 5) + b"hello"
    assert "ZIP" in refusal(noise(4, 4) + directory)
    assert "ZIP" in refusal(jpeg() + directory)
    assert decode(jpeg() + b"a video, as phones append it").size == (40, 30)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_file_that_is_cut_anywhere_is_refused(kind: str) -> None:
    encoded = io.BytesIO()
    Image.open(io.BytesIO(noise(24, 24))).convert("P" if kind == "GIF" else "RGB").save(
        encoded, kind
    )
    whole, random = encoded.getvalue(), Random(1)
    assert decode(whole).size == (24, 24)
    for n_bytes in sorted(random.sample(range(len(whole) - 16), 60)):
        assert refusal(whole[:n_bytes])


@pytest.mark.parametrize("seed", range(40))
def test_bytes_after_a_valid_beginning_never_do_more_than_be_refused(seed: int) -> None:
    random = Random(seed)
    beginnings = (
        SIGNATURE,
        b"\xff\xd8\xff",
        b"GIF89a",
        b"RIFF\xff\0\0\0WEBPVP8 ",
        SIGNATURE + header(9, 9),
    )
    with suppress(UnreadableImage):
        decode(random.choice(beginnings) + random.randbytes(random.randint(0, 3_000)))


@pytest.mark.parametrize("seed", range(80))
def test_changed_bytes_never_do_more_than_be_refused(seed: int) -> None:
    random = Random(seed)
    encoded = bytearray(random.choice(PICTURES)(random).encoded)
    for _ in range(random.randint(1, 6)):
        encoded[random.randrange(len(encoded))] = random.getrandbits(8)
    with suppress(UnreadableImage):
        decode(bytes(encoded))


def test_texts_that_grow_when_they_are_unpacked_are_refused() -> None:
    grown = zlib.compress(bytes(50_000_000), 9)
    for bomb in (
        chunk(b"iTXt", b"a\0\1\0\0\0" + grown),
        chunk(b"zTXt", b"a\0\0" + grown),
        chunk(b"iCCP", b"a\0\0" + grown),
    ):
        assert refusal(png(np.zeros((2, 2, 3)), 8, 2, bomb))
    many = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1_000_000), 9)) * 100
    assert refusal(png(np.zeros((2, 2, 3)), 8, 2, many))


def test_large_profiles_and_metadata_do_no_harm() -> None:
    random = Random(2)
    profile = random.randbytes(900_000)
    assert decode(jpeg(icc_profile=profile)).size == (40, 30)
    exif = b"Exif\0\0" + random.randbytes(60_000)
    assert decode(jpeg(exif=exif)).size == (40, 30)
    assert decode(png(np.zeros((2, 2, 3)), 8, 2, chunk(b"eXIf", random.randbytes(500_000)))).size


def test_an_image_with_alpha_is_seen_on_white() -> None:
    rgba = np.zeros((2, 2, 4), np.uint8)
    rgba[0, 0, 3] = 255
    found = np.asarray(decode(encoded_png(rgba)))
    assert found[0, 0].tolist() == [0, 0, 0]
    assert (found[1] == 255).all()
