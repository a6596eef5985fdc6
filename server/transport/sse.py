"""Server-sent events as bytes."""

EVENT_STREAM = "text/event-stream"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients ignore."""


def sse_data(data: bytes) -> bytes:
    """An event without a name. The data is one line."""
    return b"data: %b\n\n" % data


def sse_event(name: str, data: bytes) -> bytes:
    """An event with a name. The data is one line."""
    return b"event: %b\n" % name.encode() + sse_data(data)
