"""Stored responses, in memory."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from threading import Lock
from typing import TypeAlias

from server.dialects.responses.storage.client_responses import ClientResponses, Key
from server.dialects.responses.storage.stored import Conversation, StoredItem, StoredResponse

ItemLocation: TypeAlias = tuple[ClientResponses, Conversation]
"""Where an item is stored. Of several items of one id in a conversation the last counts."""


class ResponseStore:
    """An LRU cache of responses, fair between clients. Safe from any thread.

    Where there are too many responses, or too many bytes, the client that has the most loses its
    least recently used one, so one client's flood evicts nothing of the others. A response that is
    larger than the limit alone is not stored.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._by_client: defaultdict[str, ClientResponses] = defaultdict(ClientResponses)
        self._clients: dict[Key, str] = {}
        self._items: dict[Key, dict[ItemLocation, StoredItem]] = {}  # latest location last
        self._lock = Lock()

    @property
    def n_bytes(self) -> int:
        """The bytes of all responses."""
        return sum(stored.n_bytes for stored in self._by_client.values())

    def __len__(self) -> int:
        return len(self._clients)

    def clear(self) -> int:
        """Forget all responses, whoever may retrieve them. Returns how many there were."""
        with self._lock:
            n_responses = len(self._clients)
            self._by_client.clear()
            self._clients.clear()
            self._items.clear()
        return n_responses

    def put(self, client: str, owner: str, id: str, response: StoredResponse) -> None:
        """`client` is whose responses it counts among, `owner` the API key that may retrieve it."""
        with self._lock:
            self._forget((owner, id))
            if response.n_bytes + response.conversation.total_bytes > self._max_bytes:
                return
            self._clients[owner, id] = client
            stored = self._by_client[client]
            self._index(owner, stored, stored.add((owner, id), response))
            while len(self._clients) > self._max_responses:
                self._evict(lambda stored: len(stored.responses))
            while self.n_bytes > self._max_bytes:
                self._evict(lambda stored: stored.n_bytes)

    def get(self, owner: str, id: str) -> StoredResponse | None:
        with self._lock:
            if (owner, id) not in self._clients:
                return None
            responses = self._by_client[self._clients[owner, id]].responses
            responses.move_to_end((owner, id))
            return responses[owner, id]

    def delete(self, owner: str, id: str) -> bool:
        """Whether it was there."""
        with self._lock:
            return self._forget((owner, id))

    def items(self, owner: str, ids: Iterable[str]) -> dict[str, StoredItem]:
        """The stored ones of these items by their ids, whichever response they belong to."""
        found = dict[str, StoredItem]()
        used = defaultdict[ClientResponses, list[Conversation]](list)
        with self._lock:
            for id in dict.fromkeys(ids):
                if (owner, id) in self._items:
                    (stored, conversation), found[id] = _last(self._items[owner, id])
                    used[stored].append(conversation)
            for stored, conversations in used.items():
                stored.touch(conversations)
        return found

    def item_bytes(self, owner: str, id: str) -> int:
        """The size of a stored item; 0 where there is none."""
        with self._lock:
            locations = self._items.get((owner, id))
            return _last(locations)[1].n_bytes if locations else 0

    def _evict(self, size: Callable[[ClientResponses], int]) -> None:
        self._forget(max(self._by_client.values(), key=size).oldest)

    def _forget(self, key: Key) -> bool:
        if key not in self._clients:
            return False
        client = self._clients.pop(key)
        stored = self._by_client[client]
        self._unindex(key[0], stored, stored.remove(key))
        if not stored.responses:
            del self._by_client[client]
        return True

    def _index(self, owner: str, stored: ClientResponses, added: Iterable[Conversation]) -> None:
        for conversation in added:
            location = stored, conversation
            for item in conversation.items:
                self._items.setdefault((owner, item.id), {})[location] = item

    def _unindex(
        self, owner: str, stored: ClientResponses, removed: Iterable[Conversation]
    ) -> None:
        for conversation in removed:
            for id in {item.id for item in conversation.items}:
                locations = self._items[owner, id]
                del locations[stored, conversation]
                if not locations:
                    del self._items[owner, id]


def _last(locations: dict[ItemLocation, StoredItem]) -> tuple[ItemLocation, StoredItem]:
    return next(reversed(locations.items()))
