"""Responses that can be asked for again, in memory."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from threading import Lock
from typing import TypeAlias

from server.dialects.responses.kept.shelf import Key, Shelf
from server.dialects.responses.kept.stored import Conversation, StoredItem, StoredResponse

Place: TypeAlias = tuple[Shelf, Conversation]
"""Where an item is. A conversation that says one id often has one item of it, the last."""


class ResponseStore:
    """The responses that were asked for last. Safe from any thread.

    Where there are too many, or they take too many bytes, the client with the most of that loses
    the one that it has not asked for longest: nobody's flood takes what is within another's share.
    One that takes more bytes alone is not kept.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._shelves: defaultdict[str, Shelf] = defaultdict(Shelf)  # by client
        self._clients: dict[Key, str] = {}
        self._items: dict[Key, dict[Place, StoredItem]] = {}  # by owner and id; the last put last
        self._lock = Lock()

    @property
    def n_bytes(self) -> int:
        """What all of them take together."""
        return sum(shelf.n_bytes for shelf in self._shelves.values())

    def put(self, client: str, owner: str, id: str, response: StoredResponse) -> None:
        """`client` is whose share it counts in, `owner` who may ask for it."""
        with self._lock:
            self._forget((owner, id))
            if response.n_bytes + response.conversation.total_bytes > self._max_bytes:
                return
            self._clients[owner, id] = client
            shelf = self._shelves[client]
            self._index(owner, shelf, shelf.add((owner, id), response))
            while len(self._clients) > self._max_responses:
                self._shorten(lambda shelf: len(shelf.responses))
            while self.n_bytes > self._max_bytes:
                self._shorten(lambda shelf: shelf.n_bytes)

    def get(self, owner: str, id: str) -> StoredResponse | None:
        with self._lock:
            if (owner, id) not in self._clients:
                return None
            responses = self._shelves[self._clients[owner, id]].responses
            responses.move_to_end((owner, id))
            return responses[owner, id]

    def delete(self, owner: str, id: str) -> bool:
        """Whether it was there."""
        with self._lock:
            return self._forget((owner, id))

    def items(self, owner: str, ids: Iterable[str]) -> dict[str, StoredItem]:
        """Those that are there, by their ids: of any response, or of what one continues."""
        found = dict[str, StoredItem]()
        asked_for = defaultdict[Shelf, list[Conversation]](list)
        with self._lock:
            for id in dict.fromkeys(ids):
                if (owner, id) in self._items:
                    (shelf, conversation), found[id] = _last(self._items[owner, id])
                    asked_for[shelf].append(conversation)
            for shelf, conversations in asked_for.items():
                shelf.touch(conversations)
        return found

    def item_bytes(self, owner: str, id: str) -> int:
        """Of an item that may be asked for; 0 where there is none."""
        with self._lock:
            places = self._items.get((owner, id))
            return _last(places)[1].n_bytes if places else 0

    def _shorten(self, taken: Callable[[Shelf], int]) -> None:
        self._forget(max(self._shelves.values(), key=taken).oldest)

    def _forget(self, key: Key) -> bool:
        if key not in self._clients:
            return False
        client = self._clients.pop(key)
        shelf = self._shelves[client]
        self._unindex(key[0], shelf, shelf.remove(key))
        if not shelf.responses:
            del self._shelves[client]
        return True

    def _index(self, owner: str, shelf: Shelf, added: Iterable[Conversation]) -> None:
        for conversation in added:
            place = shelf, conversation
            for item in conversation.items:
                self._items.setdefault((owner, item.id), {})[place] = item

    def _unindex(self, owner: str, shelf: Shelf, removed: Iterable[Conversation]) -> None:
        for conversation in removed:
            for id in {item.id for item in conversation.items}:
                places = self._items[owner, id]
                del places[shelf, conversation]
                if not places:
                    del self._items[owner, id]


def _last(places: dict[Place, StoredItem]) -> tuple[Place, StoredItem]:
    return next(reversed(places.items()))
