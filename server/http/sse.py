"""Server-sent events and lines of JSON (NDJSON), as bytes."""

EVENT_STREAM = "text/event-stream"
NDJSON = "application/x-ndjson"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients ignore."""

_LINE_ENDS = tuple((char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029")
"""Characters that JSON allows in strings and at which clients may split a text into lines, as
Python's `str.splitlines` and so httpx does. Each with its JSON escape.
"""


def one_line(json: bytes) -> bytes:
    """The JSON text without characters that could be taken for the end of a line.

    They can only stand in strings, where an escape means the same.
    """
    for char, escape in _LINE_ENDS:
        json = json.replace(char, escape)
    return json


def sse_data(data: bytes) -> bytes:
    """An event without a name. The data is JSON, or text of ASCII, without line breaks."""
    return b"data: %b\n\n" % one_line(data)


def sse_event(name: str, data: bytes) -> bytes:
    """An event with a name. The data is JSON without line breaks."""
    return b"event: %b\n" % name.encode() + sse_data(data)


def json_line(json: bytes) -> bytes:
    """A line of an NDJSON stream. The JSON is without line breaks."""
    return one_line(json) + b"\n"
