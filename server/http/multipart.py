"""Reads `multipart/form-data` (RFC 7578) as it arrives, one part after the other."""

import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from server.errors import ApiError, invalid

MAX_BOUNDARY_BYTES = 70  # RFC 2046, section 5.1.1
MAX_HEAD_BYTES = 8 * 1024  # of a part, and of what comes before the first
MAX_PARTS = 16
MAX_NAME_CHARACTERS = 255  # of the fields and files that are named

_PARAMETER = re.compile(r';\s*(name|filename|boundary)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.I)


@dataclass(frozen=True, slots=True)
class Part:
    """One field of a form. `filename` is None where it is no file. `data` is its content in pieces,
    which have to be read before the next part is.
    """

    name: str
    filename: str | None
    data: AsyncGenerator[bytes, None]

    async def text(self, max_bytes: int) -> str:
        """The whole content of a short field. Raises ApiError (400)."""
        content = b""
        async with aclosing(self.data) as pieces:
            async for piece in pieces:
                content += piece
                if len(content) > max_bytes:
                    raise invalid(f"{self.name}: at most {max_bytes} bytes", self.name)
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise invalid(f"{self.name}: must be UTF-8", self.name) from None


def boundary_of(content_type: str) -> bytes:
    """The boundary of a form's parts, from its Content-Type. Raises ApiError (400)."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        message = f"The body must be sent as multipart/form-data, not '{media_type[:64]}'."
        raise invalid(message, None)
    boundary = _parameters(content_type).get("boundary", "").encode("latin-1", "replace")
    if not 1 <= len(boundary) <= MAX_BOUNDARY_BYTES:
        message = f"Content-Type needs a boundary of 1 to {MAX_BOUNDARY_BYTES} bytes."
        raise invalid(message, None)
    return boundary


class MultipartReader:
    """The parts of a body that comes in chunks. It keeps at most a chunk and MAX_HEAD_BYTES."""

    def __init__(self, chunks: AsyncIterator[bytes], boundary: bytes) -> None:
        self._chunks = chunks
        self._delimiter = b"\r\n--" + boundary
        self._buffer = b"\r\n"  # so that the first delimiter is one like the others

    async def parts(self) -> AsyncGenerator[Part, None]:
        """All parts, in order. Raises ApiError (400) for a body that is no form."""
        await self._until(self._delimiter, "the first boundary")
        for _ in range(MAX_PARTS):
            if await self._is_last():
                return
            head = await self._until(b"\r\n\r\n", "the end of a part's head")
            name, filename = _disposition(head)
            data = self._data()
            yield Part(name, filename, data)
            async with aclosing(data):  # what its reader has left
                async for _ in data:
                    continue
        if not await self._is_last():
            raise _broken(f"it has more than {MAX_PARTS} parts")

    async def _is_last(self) -> bool:
        """Read what follows a delimiter: two hyphens after the last part, else a line end."""
        while len(self._buffer) < 2:
            await self._more("the end of a boundary")
        after, self._buffer = self._buffer[:2], self._buffer[2:]
        if after not in {b"--", b"\r\n"}:
            raise _broken("a boundary is followed by other text")
        self._buffer = b"\r\n" + self._buffer  # a part may have no headers
        return after == b"--"

    async def _data(self) -> AsyncGenerator[bytes, None]:
        """The content of a part. The delimiter after it is read."""
        kept_bytes = len(self._delimiter) - 1  # which may begin a delimiter
        while True:
            content, delimiter, rest = self._buffer.partition(self._delimiter)
            if delimiter:
                self._buffer = rest
                if content:
                    yield content
                return
            if len(content) > kept_bytes:
                self._buffer = content[-kept_bytes:]
                yield content[:-kept_bytes]
            await self._more("the last boundary")

    async def _until(self, end: bytes, what: str) -> bytes:
        """What comes before `end`, which is read as well."""
        while True:
            found, separator, rest = self._buffer.partition(end)
            if separator:
                self._buffer = rest
                return found
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise _broken(f"{what} does not come within {MAX_HEAD_BYTES} bytes")
            await self._more(what)

    async def _more(self, what: str) -> None:
        chunk = await anext(self._chunks, None)
        if chunk is None:
            raise _broken(f"it ends before {what}")
        self._buffer += chunk


def _disposition(head: bytes) -> tuple[str, str | None]:
    """Name and filename of a part, from its headers. Raises ApiError (400)."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        header, _, value = line.partition(":")
        if header.strip().lower() == "content-disposition":
            found = _parameters(value)
            if found.get("name") and value.strip().lower().startswith("form-data"):
                filename = found.get("filename")
                name = found["name"][:MAX_NAME_CHARACTERS]
                return name, None if filename is None else filename[:MAX_NAME_CHARACTERS]
    raise _broken("a part has no Content-Disposition: form-data with a name")


def _parameters(value: str) -> dict[str, str]:
    """The parameters of a header that are known here, by their names."""
    return {
        name.lower(): re.sub(r"\\(.)", r"\1", quoted) or plain
        for name, quoted, plain in _PARAMETER.findall(value)
    }


def _broken(problem: str) -> ApiError:
    return invalid(f"The form cannot be read: {problem}.", None)
