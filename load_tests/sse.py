"""Server-sent events, as far as OpenAI's streams use them.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from collections.abc import AsyncIterator


async def event_data(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield the data of each event, given lines without their ends.

    Comments and fields other than `data` are skipped. An event that the stream's end leaves
    without its blank line is dropped, as the format demands.
    """
    data: list[str] = []
    async for line in lines:
        if line == "":
            if data:
                yield "\n".join(data)
                data = []
            continue
        field, _, value = line.partition(":")
        if field == "data":
            data.append(value.removeprefix(" "))
