"""Images in bodies: cut out as they arrive, wherever the chunks end, and decoded or put back."""

import base64
import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from engine.api import InvalidImage
from server.http.attachments import LONG_BYTES, Attachments
from server.images import encoded
from server.images.encoded import decode_image

MOST_TEXT_BYTES = 1 << 20


class TooLarge(Exception):
    pass


def cut(
    body: bytes, sizes: Sequence[int], folder: Path, most: int = MOST_TEXT_BYTES
) -> Attachments:
    """The attachments of a body that comes in chunks of these sizes, over and over."""
    numbers = count()
    attachments = Attachments(lambda: folder / str(next(numbers)), most, TooLarge)
    start, index = 0, 0
    while start < len(body):
        size = sizes[index % len(sizes)]
        attachments.add(body[start : start + size])
        start, index = start + size, index + 1
    return attachments


def parsed(attachments: Attachments) -> tuple[bytes, Any]:
    text = attachments.text()
    return text, attachments.restored(json.loads(text), len(text))


LONG = st.integers(2 * LONG_BYTES, 4 * LONG_BYTES)
SIZES = st.lists(st.integers(1, 3 * LONG_BYTES), min_size=1, max_size=5)


@st.composite
def long_strings(draw: st.DrawFn) -> str:
    """Data, and texts that look like data at first, or are none."""
    length = draw(LONG)
    kind = draw(st.sampled_from(("base64", "url", "text", "quoted", "escaped")))
    data = base64.b64encode(blake3(bytes([draw(st.integers(0, 255))])).digest(length)).decode()
    match kind:
        case "base64":
            return data
        case "url":
            return f"data:image/png;base64,{data}"
        case "text":
            return "many words " * (length // 11)
        case "quoted":
            place = draw(st.integers(64, length))
            return (
                data[:place] + draw(st.sampled_from(('"', '\\"', "\\\\", '\\\\"', '", "'))) + data
            )
        case _:
            return "\n".join(data[at : at + 76] for at in range(0, length, 76))


def image_parts(data: str) -> list[dict[str, Any]]:
    return [
        {"type": "image_url", "image_url": {"url": data}},
        {"type": "image_url", "image_url": data},
        {"type": "input_image", "image_url": data},
        {"type": "image", "source": {"type": "base64", "data": data}},
        {"images": [data, "short"]},
    ]


TEXT_PLACES = ("text", "url", "image_url", "data", "images")


@given(long_strings(), SIZES, st.sampled_from(TEXT_PLACES), st.booleans(), st.booleans())
def test_a_string_that_is_no_image_comes_back(
    text: str, sizes: list[int], key: str, in_list: bool, slashes: bool
) -> None:
    value: Any = [text, text] if in_list and key != "images" else text
    body: dict[str, Any] = {
        "messages": [
            {key: value, "type": "text"},
            {"type": "tool_use", "input": image_parts(text)},
        ],
        "arguments": {"images": [text]},
    }
    sent = json.dumps(body).encode()
    if slashes:
        sent = sent.replace(b"/", b"\\/")
    with TemporaryDirectory() as folder:
        _, read = parsed(cut(sent, sizes, Path(folder)))
    assert read == body


@given(st.integers(2 * LONG_BYTES, 3 * LONG_BYTES), SIZES, st.booleans(), st.integers(0, 4))
def test_an_image_is_in_a_file(n_bytes: int, sizes: list[int], slashes: bool, form: int) -> None:
    data = blake3(b"image").digest(n_bytes)
    part = image_parts(base64.b64encode(data).decode())[form]
    sent = json.dumps({"messages": [part]}).encode()
    if slashes:
        sent = sent.replace(b"/", b"\\/")
    with TemporaryDirectory() as folder:
        attachments = cut(sent, sizes, Path(folder))
        text, read = parsed(attachments)
        assert len(text) < LONG_BYTES
        ((reference, path),) = attachments.files.items()
        assert reference in json.dumps(read)
        digest, size = decode_image(path, Path(folder) / "decoded")
        assert (Path(folder) / "decoded").read_bytes() == data
        assert (digest, size) == (blake3(data).digest(), n_bytes)
        attachments.close()
        assert not path.exists()


def test_a_reference_cannot_be_known() -> None:
    """Two bodies have different ones, and a text like one is a text."""
    data = base64.b64encode(bytes(4 * LONG_BYTES)).decode()
    sent = json.dumps({"images": [data]}).encode()
    with TemporaryDirectory() as folder:
        first = cut(sent, [1000], Path(folder))
        first.text()
        forged = json.dumps({"images": list(first.files)}).encode()
        second = cut(forged, [1000], Path(folder))
        assert parsed(second)[1] == {"images": list(first.files)}
        assert not second.files


@pytest.mark.parametrize("text", ["a b " * LONG_BYTES, "A" * 4 * LONG_BYTES + '"'])
def test_texts_have_a_limit(text: str) -> None:
    sent = json.dumps({"text": text}).encode()
    with TemporaryDirectory() as folder, pytest.raises(TooLarge):
        parsed(cut(sent, [LONG_BYTES], Path(folder), most=LONG_BYTES))


def test_data_that_are_put_back_have_a_limit() -> None:
    sent = json.dumps({"text": "A" * 4 * LONG_BYTES}).encode()
    with TemporaryDirectory() as folder, pytest.raises(TooLarge):
        parsed(cut(sent, [LONG_BYTES], Path(folder), most=LONG_BYTES))


def decoded(text: str) -> bytes:
    with TemporaryDirectory() as folder:
        target = Path(folder) / "decoded"
        decode_image(text, target)
        return target.read_bytes()


@given(
    st.binary(min_size=1, max_size=300),
    st.sampled_from(("", "image/png", 'image/svg+xml;charset="utf-8"', "x/y;a=b;c")),
    st.sampled_from(("plain", "base64", "quoted", "spaced", "unpadded", "url safe", "raw")),
    st.integers(1, 40),
)
def test_what_a_data_url_says(data: bytes, kind: str, form: str, block_bytes: int) -> None:
    text = base64.b64encode(data).decode()
    url = f"data:{kind};base64,"
    match form:
        case "plain":
            url, text = f"data:{kind},", quote(data, safe="")
        case "quoted":
            text = quote(text, safe="")
        case "spaced":
            text = "\n ".join(text[at : at + 5] for at in range(0, len(text), 5))
        case "unpadded":
            text = text.rstrip("=")
        case "url safe":
            text = base64.urlsafe_b64encode(data).decode()
        case "raw":
            url = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoded, "_BLOCK_BYTES", block_bytes)
        patch.setattr(encoded, "_MAX_HEAD_BYTES", 60)
        assert decoded(url + text) == data


@pytest.mark.parametrize(
    "text",
    [
        *("", "data:", "data:image/png;base64", "data:image/png;base64,", "data:;base64,A"),
        *("A", "AA=A", "AAAA=", "AA==AAAA", "AAAA A===", "Ä" * 8, "AA*A", "x" * 5, "%41%41"),
        *("file:///etc/passwd", "ftp://example.org/a.png"),
        "data:" + "x" * 2000 + ",AAAA",
    ],
)
def test_what_is_no_data_is_refused(text: str) -> None:
    with pytest.raises(InvalidImage):
        decoded(text)


def test_large_images_are_refused() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoded, "MAX_IMAGE_BYTES", 999)
        assert decoded(base64.b64encode(bytes(999)).decode()) == bytes(999)
        with pytest.raises(InvalidImage, match="larger"):
            decoded(base64.b64encode(bytes(1000)).decode())
