"""The texts that wait for an encoder, and which of them share the next forward."""

from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from engine.values.request import Request

MOST_PADDING = 0.1
"""The padding of a forward, as a share of its tokens. A forward that takes fewer texts has less."""


@dataclass(frozen=True, slots=True)
class WaitingText:
    """A request that waits, or is computed. `order` numbers them as they arrive."""

    request: Request
    arrived_seconds: float
    order: int

    @property
    def n_tokens(self) -> int:
        return len(self.request.prompt)


def _turn(text: WaitingText) -> tuple[int, int]:
    """Sorts the texts of one client: by priority, then as they arrived."""
    return text.request.priority, text.order


class TextQueue:
    """Waiting texts by client. Clients take turns: a turn is a forward around the client's first
    text, which texts of about the same length join, whoever sent them.
    """

    def __init__(self, step_tokens: int) -> None:
        """A forward has at most `step_tokens` tokens, padding included, or one longer text."""
        self._step_tokens = step_tokens
        self._clients = OrderedDict[str, list[WaitingText]]()

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def __iter__(self) -> Iterator[WaitingText]:
        for texts in self._clients.values():
            yield from texts

    def of(self, client: str) -> int:
        """The number of texts of a client."""
        return len(self._clients.get(client, ()))

    def add(self, text: WaitingText) -> None:
        insort(self._clients.setdefault(text.request.client, []), text, key=_turn)

    def remove(self, request_id: str) -> WaitingText | None:
        """Take a text out of the queue. None if it does not wait."""
        found = next((text for text in self if text.request.id == request_id), None)
        if found is not None:
            self._drop([found])
        return found

    def take(self) -> list[WaitingText]:
        """Take the texts of the next forward out of the queue: at least one, if any waits."""
        if not self._clients:
            return []
        client, own = next(iter(self._clients.items()))
        waiting = sorted(self, key=lambda text: text.n_tokens)
        taken = self._around(waiting, waiting.index(own[0]))
        self._clients.move_to_end(client)
        self._drop(taken)
        return taken

    def _around(self, waiting: list[WaitingText], at: int) -> list[WaitingText]:
        """The text at this place of `waiting`, which is sorted by length, and the neighbours that
        may join it: always the one that adds less padding.
        """
        start, stop, n_tokens = at, at + 1, waiting[at].n_tokens
        while True:
            longest = waiting[stop - 1].n_tokens
            padding = dict[int, int]()  # of the forward, with each neighbour
            for place in (start - 1, stop):
                if 0 <= place < len(waiting):
                    n_texts, joining = stop - start + 1, waiting[place].n_tokens
                    area = n_texts * max(longest, joining)
                    padded = area - n_tokens - joining
                    if area <= self._step_tokens and padded <= MOST_PADDING * (area - padded):
                        padding[place] = padded
            if not padding:
                return waiting[start:stop]
            place = min(padding, key=padding.__getitem__)
            n_tokens += waiting[place].n_tokens
            start, stop = min(start, place), max(stop, place + 1)

    def _drop(self, texts: list[WaitingText]) -> None:
        gone = {text.order for text in texts}
        for client in Counter(text.request.client for text in texts):
            kept = [text for text in self._clients[client] if text.order not in gone]
            if kept:
                self._clients[client] = kept
            else:
                del self._clients[client]
