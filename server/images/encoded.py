"""The bytes of an image in a `data:` URL or in base64, decoded piece by piece into a file."""

import binascii
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote_to_bytes

import jiter
from blake3 import blake3

from engine.api import InvalidImage

MAX_IMAGE_BYTES = 20 << 20
NO_DATA = "the image is neither a data: URL nor base64"

_BLOCK_BYTES = 1 << 20
_MAX_HEAD_BYTES = 1024  # of a data: URL up to its comma
_LONGEST_ESCAPE = 12  # of JSON: a character in two halves
_SPACE = b" \t\r\n\f"
_CUT_PERCENT = re.compile(rb"%[0-9A-Fa-f]?$")
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def decode_image(source: str | Path, target: Path) -> tuple[bytes, int]:
    """Write the bytes of an image into a file. A source that is a file has what JSON has between
    quotation marks. Returns their digest and number. Raises InvalidImage.
    """
    blocks = _raw_blocks(source) if isinstance(source, Path) else _text_blocks(source)
    digest, n_bytes = blake3(), 0
    with target.open("wb") as file:
        for block in _decoded(blocks):
            n_bytes += len(block)
            if n_bytes > MAX_IMAGE_BYTES:
                raise too_large_image()
            digest.update(block)
            file.write(block)
    if not n_bytes:
        raise InvalidImage("the image is empty")
    return digest.digest(), n_bytes


def too_large_image() -> InvalidImage:
    """The error of an image of too many bytes."""
    return InvalidImage(f"the image is larger than {MAX_IMAGE_BYTES >> 20} MiB")


def _text_blocks(text: str) -> Iterator[bytes]:
    for start in range(0, len(text), _BLOCK_BYTES):
        yield text[start : start + _BLOCK_BYTES].encode("utf-8", "replace")


def _raw_blocks(path: Path) -> Iterator[bytes]:
    """The text of a JSON string, read from a file."""
    rest = b""
    with path.open("rb") as file:
        while read := file.read(_BLOCK_BYTES):
            block = rest + read
            cut = block.find(b"\\", max(len(block) - _LONGEST_ESCAPE, 0))
            cut = len(block) if cut < 0 else cut
            block, rest = block[:cut], block[cut:]
            yield _unescaped(block)
    yield _unescaped(rest)


def _unescaped(block: bytes) -> bytes:
    if b"\\" not in block:
        return block
    try:
        text: str = jiter.from_json(b'"%b"' % block)
    except ValueError:
        raise InvalidImage(NO_DATA) from None
    return text.encode("utf-8", "replace")


def _decoded(blocks: Iterator[bytes]) -> Iterator[bytes]:
    first = b""
    for block in blocks:
        first += block
        if len(first) >= _MAX_HEAD_BYTES:
            break
    if first[:5].lower() != b"data:":
        yield from _from_base64(_chained(first, blocks))
        return
    head, comma, data = first.partition(b",")
    if not comma or len(head) > _MAX_HEAD_BYTES:
        raise InvalidImage("the data: URL has no comma")
    plain = _unquoted(_chained(data, blocks))
    is_base64 = head.lower().rstrip().endswith(b";base64")
    yield from _from_base64(plain) if is_base64 else plain


def _chained(first: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from blocks


def _unquoted(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The blocks without percent-encoding."""
    rest = b""
    for read in blocks:
        block = rest + read
        cut = _CUT_PERCENT.search(block)
        end = cut.start() if cut else len(block)
        rest = block[end:]
        yield unquote_to_bytes(block[:end])
    yield rest


def _from_base64(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """White space and missing padding are accepted, and the alphabet of URLs."""
    rest = b""
    for read in blocks:
        block = rest + read.translate(_URL_SAFE, _SPACE)
        end = max(len(block) - 1, 0) // 4 * 4  # the last characters may be padding, or lack it
        rest = block[end:]
        yield _bytes_of(block[:end], is_last=False)
    yield _bytes_of(rest + b"=" * (-len(rest) % 4), is_last=True)


def _bytes_of(block: bytes, *, is_last: bool) -> bytes:
    if b"=" in block and not is_last:
        raise InvalidImage(NO_DATA)
    try:
        return binascii.a2b_base64(block, strict_mode=True)
    except binascii.Error:
        raise InvalidImage(NO_DATA) from None
