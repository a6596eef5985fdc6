"""Images in the bodies of requests: their base64 goes into files as it arrives, so that no parser
has to read megabytes of it.
"""

import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import jiter

LONG_BYTES = 16 * 1024
"""Data of twice as many bytes or more always go into a file, of fewer never."""

_DATA = re.compile(rb"(?i:data:)[!-~]{59}|[A-Za-z0-9+/=\\_-]{64}")
"""How a string begins that is a data URL or base64. Any string may be cut out: one that is no image
comes back where it stood."""


class Attachments:
    """The body of one request, without the long strings in it that look like data. Each is in a
    file of its own, and in its place is a reference that no client can know.

    Texts that look like data are put back when the body is parsed. With them the body may have no
    more than `max_text_bytes`.
    """

    def __init__(
        self,
        new_file: Callable[[], Path],
        max_text_bytes: int,
        too_large: Callable[[], Exception],
    ) -> None:
        """`new_file` names a file that does not exist; `too_large` makes the error of a text that
        is too long.
        """
        self._new_file = new_file
        self._max_text_bytes = max_text_bytes
        self._too_large = too_large
        self._nonce = secrets.token_hex(16)
        self._kept = bytearray()
        self._quote = -1  # the place in `_kept` of its last quotation mark
        self._file: BinaryIO | None = None  # of the string that is arriving
        self._n_backslashes = 0  # with which that string ends so far
        self.files: dict[str, Path] = {}
        """The files by reference. Each has what was between the quotation marks."""

    def add(self, chunk: bytes) -> None:
        """Take the next bytes of the body. Raises the error of a text that is too long."""
        for start in range(0, len(chunk), LONG_BYTES):
            piece = chunk[start : start + LONG_BYTES]
            if self._file is None:
                self._keep(piece)
            else:
                self._attach(piece)

    def text(self) -> bytes:
        """The body, when all of it has come."""
        self._end_file()
        text = bytes(self._kept)
        self._kept.clear()
        return text

    def close(self) -> None:
        """Delete the files."""
        self._end_file()
        for path in self.files.values():
            path.unlink(missing_ok=True)
        self.files.clear()

    def restored(self, body: Any, n_bytes: int) -> Any:
        """The parsed body of `n_bytes`, with the strings that are no images where they were. Raises
        the error of a text that is too long, and ValueError for what is no JSON.
        """
        return _Restored(self.files, self._max_text_bytes - n_bytes, self._too_large).value(body)

    def _keep(self, piece: bytes) -> None:
        self._kept += piece
        if len(self._kept) > self._max_text_bytes:
            raise self._too_large()
        quote = piece.rfind(b'"')
        if quote >= 0:
            self._quote = len(self._kept) - len(piece) + quote
        elif len(self._kept) - self._quote > LONG_BYTES and self._is_data():
            reference = f"{self._nonce}-{len(self.files)}"
            path = self.files[reference] = self._new_file()
            self._file = path.open("wb")
            start = self._quote + 1
            self._file.write(self._kept[start:])
            self._n_backslashes = _n_last_backslashes(self._kept[-LONG_BYTES:])
            self._kept[start:] = reference.encode()

    def _is_data(self) -> bool:
        """Whether data begin at the last quotation mark. One that ends a string is followed by
        something else, and one within a string has a backslash before it.
        """
        before = self._kept[max(self._quote - 64, 0) : max(self._quote, 0)]
        is_escaped = _n_last_backslashes(before) % 2 == 1
        return (
            self._quote >= 0
            and not is_escaped
            and _DATA.match(self._kept, self._quote + 1) is not None
        )

    def _attach(self, piece: bytes) -> None:
        assert self._file is not None
        end = piece.find(b'"')
        data = piece if end < 0 else piece[:end]
        n_backslashes = _n_last_backslashes(data)
        if n_backslashes == len(data):
            n_backslashes += self._n_backslashes
        self._file.write(data)
        self._n_backslashes = n_backslashes
        if end < 0:
            return
        self._end_file()
        if n_backslashes % 2:  # a quotation mark within the string: these are no data
            self._put_back()
        self._keep(piece[end:])

    def _put_back(self) -> None:
        reference, path = self.files.popitem()
        n_bytes = path.stat().st_size
        if len(self._kept) + n_bytes > self._max_text_bytes:
            path.unlink()
            raise self._too_large()
        self._kept[-len(reference) :] = path.read_bytes()
        path.unlink()

    def _end_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _n_last_backslashes(data: bytes | bytearray) -> int:
    return len(data) - len(data.rstrip(b"\\"))


_NO_BODY = frozenset({"arguments", "parameters", "input_schema", "operation", "action"})
"""Members that are the client's own values, whatever they look like."""


class _Restored:
    """Puts strings back where no image can be."""

    def __init__(
        self, files: dict[str, Path], room_bytes: int, too_large: Callable[[], Exception]
    ) -> None:
        self._files = files
        self._room_bytes = room_bytes
        self._too_large = too_large

    def value(self, value: Any, *, own: bool = False) -> Any:
        """The value with its strings. `own`: it is in a value of the client's own."""
        match value:
            case str():
                return self._string(value) if value in self._files else value
            case list():
                return [self.value(item, own=own) for item in value]
            case dict():
                return {key: self._member(value, key, own=own) for key in value}
            case _:
                return value

    def _member(self, parent: dict[str, Any], key: str, *, own: bool) -> Any:
        member, kind = parent[key], parent.get("type")
        if own or key in _NO_BODY or (key == "input" and kind == "tool_use"):
            return self.value(member, own=True)
        match key, member:
            case "image_url", str() if kind in {"image_url", "input_image"}:
                return member
            case "image_url", {"url": str(url)} if kind == "image_url":
                return {**self.value({**member, "url": ""}), "url": url}
            case "source", {"type": "base64", "data": str(data)} if kind == "image":
                return {**self.value({**member, "data": ""}), "data": data}
            case "images", list() if kind is None:
                return [each if isinstance(each, str) else self.value(each) for each in member]
            case _:
                return self.value(member)

    def _string(self, reference: str) -> Any:
        path = self._files[reference]
        self._room_bytes -= path.stat().st_size
        if self._room_bytes < 0:
            raise self._too_large()
        return jiter.from_json(b'"%b"' % path.read_bytes())
