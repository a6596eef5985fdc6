"""Whose turn it is, where not all can be served at once."""

from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio import Event


class Turns:
    """Lets so many in at once. Who waits has a line for each client, and the lines take turns:
    however much one client asks, until its own turn every other has at most one.
    """

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._lines: OrderedDict[str, deque[Event]] = OrderedDict()  # in the order of turns

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        await self.begin(client)
        try:
            yield
        finally:
            self.end()

    async def begin(self, client: str) -> None:
        """Wait for a turn of the client's, which has to be ended."""
        if self._free:
            self._free -= 1
            return
        called = Event()
        self._lines.setdefault(client, deque()).append(called)
        try:
            await called.wait()
        except BaseException:
            if called.is_set():
                self.end()
            else:
                self._leave(client, called)
            raise

    def end(self) -> None:
        if not self._lines:
            self._free += 1
            return
        client, line = self._lines.popitem(last=False)
        line.popleft().set()
        if line:
            self._lines[client] = line

    def _leave(self, client: str, called: Event) -> None:
        line = self._lines[client]
        line.remove(called)
        if not line:
            del self._lines[client]


class Turn:
    """One request's, while it has one."""

    def __init__(self) -> None:
        self._turns: Turns | None = None

    @property
    def is_held(self) -> bool:
        return self._turns is not None

    async def begin(self, turns: Turns, client: str) -> None:
        await turns.begin(client)
        self._turns = turns

    def end(self) -> None:
        """Does nothing where there is none."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.end()
