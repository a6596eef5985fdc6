"""Server-sent events from raw bytes, as far as OpenAI's streams use them.

httpx's `iter_lines` will not do: like `str.splitlines` it also breaks lines at U+0085, U+2028 and
others, which JSON may contain as they are.
Format: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from collections.abc import Iterator


class EventStream:
    """One stream, fed in pieces of any size.

    Comments and fields other than `data` are skipped. An event that the stream's end leaves
    without its blank line is dropped, as the format demands. A lone CR does not end a line here.
    """

    def __init__(self) -> None:
        self._rest = b""  # of a line whose end is still to come
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of each event that the piece completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            yield from self._take(line.removesuffix(b"\r"))

    def _take(self, line: bytes) -> Iterator[bytes]:
        if line == b"":
            if self._data:
                data, self._data = self._data, []
                yield b"\n".join(data)
            return
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
