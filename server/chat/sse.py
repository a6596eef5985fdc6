"""Server-sent events from raw bytes, as far as OpenAI's streams use them.

httpx's `iter_lines` will not do: like `str.splitlines` it also breaks lines at U+0085, U+2028 and
others, which JSON may contain as they are.
Format: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from collections.abc import Iterable, Iterator


def event_data(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the data of each event, given the stream in pieces of any size.

    Comments and fields other than `data` are skipped. An event that the stream's end leaves
    without its blank line is dropped, as the format demands. A lone CR does not end a line here.
    """
    data: list[bytes] = []
    for line in _lines(chunks):
        if line == b"":
            if data:
                yield b"\n".join(data)
                data = []
            continue
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without their LF or CR LF; what follows the last one is dropped."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
