"""Responses that can be asked for again, in memory."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

OVERHEAD_BYTES = 400  # of an item or a response, and of what points to it: measured, rounded up


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item as JSON."""

    id: str
    json: bytes

    @property
    def n_bytes(self) -> int:
        return len(self.json) + len(self.id) + OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON, and the items that it was made from and consists of."""

    json: bytes
    input: Sequence[StoredItem]  # the whole conversation before it, oldest first
    output: Sequence[StoredItem]
    is_background: bool = False

    @property
    def n_bytes(self) -> int:
        """What it takes by itself; it may share items with the one that it continues."""
        items = sum(item.n_bytes for item in (*self.input, *self.output))
        return len(self.json) + items + OVERHEAD_BYTES


Key = tuple[str, str]
"""Whose it is, and its id: nobody finds what is another's."""


class ResponseStore:
    """The responses that were asked for last. Safe from any thread.

    The one that was not asked for longest is forgotten where there are too many or they take too
    many bytes; one that takes more alone is not kept.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._responses: OrderedDict[Key, StoredResponse] = OrderedDict()
        self._items: dict[Key, tuple[StoredItem, list[str]]] = {}  # with who has it, the last last
        self._n_bytes = 0
        self._lock = Lock()

    def put(self, owner: str, id: str, response: StoredResponse) -> None:
        with self._lock:
            self._forget((owner, id))
            if response.n_bytes > self._max_bytes:
                return
            self._responses[owner, id] = response
            self._n_bytes += response.n_bytes
            for item in _items(response):
                _, holders = self._items.get((owner, item.id), (item, []))
                holders.append(id)
                self._items[owner, item.id] = item, holders
            while len(self._responses) > self._max_responses or self._n_bytes > self._max_bytes:
                self._forget(next(iter(self._responses)))

    def get(self, owner: str, id: str) -> StoredResponse | None:
        with self._lock:
            if (owner, id) in self._responses:
                self._responses.move_to_end((owner, id))
            return self._responses.get((owner, id))

    def delete(self, owner: str, id: str) -> bool:
        """Whether it was there."""
        with self._lock:
            return self._forget((owner, id))

    def item(self, owner: str, id: str) -> StoredItem | None:
        """An item of any response that is there."""
        with self._lock:
            if (owner, id) not in self._items:
                return None
            item, holders = self._items[owner, id]
            self._responses.move_to_end((owner, holders[-1]))
            return item

    def _forget(self, key: Key) -> bool:
        response = self._responses.pop(key, None)
        if response is None:
            return False
        owner, id = key
        self._n_bytes -= response.n_bytes
        for item in _items(response):
            _, holders = self._items[owner, item.id]
            holders.remove(id)
            if not holders:
                del self._items[owner, item.id]
        return True


def _items(response: StoredResponse) -> Iterator[StoredItem]:
    yield from response.input
    yield from response.output
