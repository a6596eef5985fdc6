"""Clients whose jobs have kept others waiting."""

from collections.abc import Callable

SLOW_SECONDS = 60.0
"""For so long each is one of them."""


class SlowClients:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    def __contains__(self, client: str) -> bool:
        return self._until.get(client, 0.0) > self._clock()

    def add(self, client: str) -> None:
        now = self._clock()
        self._until = {one: until for one, until in self._until.items() if until > now}
        self._until[client] = now + SLOW_SECONDS
