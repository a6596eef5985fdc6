"""Many streams read at once, at little cost: bare sockets, and no answer is parsed."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise

from load_tests.client import TargetError

READ_BYTES = 2**16


@dataclass(slots=True)
class Heard:
    """What came of one stream: when, on the clock of `time.perf_counter`, and how many words."""

    reads: list[tuple[float, int]] = field(default_factory=list)

    def words(self, since: float, until: float) -> int:
        """How many came in that time."""
        return sum(count for moment, count in self.reads if since <= moment < until)

    def gap_seconds(self, since: float, until: float) -> list[float]:
        """Between one read that had words and the next."""
        moments = [moment for moment, _ in self.reads if since <= moment < until]
        return [b - a for a, b in pairwise(moments)]


class WordCounter:
    """Counts a word in a text that comes in pieces, which may cut it."""

    def __init__(self, word: str) -> None:
        self._word = word.encode()
        self._rest = b""

    def count(self, piece: bytes) -> int:
        """How many words the piece completes."""
        text = self._rest + piece
        found = text.count(self._word)
        self._rest = text[text.rfind(self._word) + len(self._word) :] if found else text
        self._rest = self._rest[1 - len(self._word) :]
        return found


async def listen(port: int, body: dict[str, object], word: str, heard: Heard) -> None:
    """Ask for one stream on the loopback and note when words come, until it ends.

    Raises TargetError when it is refused.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request(body))
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise TargetError((head + await reader.read(500)).decode(errors="replace"))
        counter = WordCounter(word)
        while piece := await reader.read(READ_BYTES):
            if count := counter.count(piece):
                heard.reads.append((time.perf_counter(), count))
    except (OSError, EOFError) as error:
        raise TargetError(f"a stream broke off: {error!r}") from error
    finally:
        writer.close()


def request(body: dict[str, object]) -> bytes:
    """The bytes of a chat request, on a connection that is closed after its answer."""
    content = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\n"
        "Host: 127.0.0.1\r\n"
        "Content-Type: application/json\r\n"
        "Connection: close\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content
