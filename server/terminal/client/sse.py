"""Server-sent events from raw bytes, as far as OpenAI's streams use them.

httpx's `iter_lines` will not do: like `str.splitlines` it also breaks lines at U+0085, U+2028 and
others, which JSON may contain as they are.
Format: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from collections.abc import Iterator

from server.terminal.errors import TerminalError

MAX_LINE_BYTES = 16 * 2**20


class EventStream:
    """One stream, fed in pieces of any size.

    Comments and fields other than `data` are skipped. An event that the stream's end leaves
    without its blank line is dropped, as the format demands. A lone CR does not end a line here.
    """

    def __init__(self) -> None:
        self._rest = b""  # of a line whose end is still to come
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of each event that the piece completes.

        Raises TerminalError for a line that is longer than any that makes sense.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise TerminalError(f"the stream has a line of more than {MAX_LINE_BYTES >> 20} MiB")
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
