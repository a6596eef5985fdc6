"""The clients that are being served, in the order of their turns."""

from collections import OrderedDict
from collections.abc import Iterator


class Turns:
    """Clients that have live sequences. A turn is a chunk of a prompt, the first one or another.

    Who had a turn goes behind all others when the next step begins. Who comes new is behind those
    that have waited for a turn, and before those that had one in the latest step.
    """

    def __init__(self) -> None:
        self._live = OrderedDict[str, int]()  # how many sequences each has
        self._had: list[str] = []  # in this step

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def enter(self, client: str) -> None:
        """It has one live sequence more."""
        self._live[client] = self._live.get(client, 0) + 1

    def leave(self, client: str) -> None:
        """It has one live sequence less."""
        self._live[client] -= 1
        if not self._live[client]:
            del self._live[client]

    def had(self, client: str) -> None:
        """It has had a turn in this step."""
        self._had.append(client)

    def begin_step(self) -> None:
        """Those who had a turn in the step before go behind all others."""
        for client in self._had:
            if client in self._live:
                self._live.move_to_end(client)
        self._had.clear()
