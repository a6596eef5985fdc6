"""The store of responses and their items, which evicts the least recently used of a client."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Annotated, TypeAlias, cast

from fastapi import Depends, Request

OVERHEAD_BYTES = 512  # of an item, a conversation or a response, with its index entries: measured


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item as JSON."""

    id: str
    json: bytes

    @property
    def n_bytes(self) -> int:
        return len(self.json) + len(self.id) + OVERHEAD_BYTES


class StoredConversation:
    """Items, and the conversation `before` them, which several may share. Immutable."""

    __slots__ = ("before", "items", "n_bytes", "total_bytes")

    def __init__(
        self, items: Sequence[StoredItem] = (), before: "StoredConversation | None" = None
    ) -> None:
        self.items = tuple(items)
        self.before = before
        self.n_bytes = sum(item.n_bytes for item in self.items) + OVERHEAD_BYTES
        self.total_bytes: int = self.n_bytes + (before.total_bytes if before else 0)

    def __iter__(self) -> Iterator[StoredItem]:
        """All items, oldest first."""
        chain: list[StoredConversation] = []
        link: StoredConversation | None = self
        while link is not None:
            chain.append(link)
            link = link.before
        for link in reversed(chain):
            yield from link.items


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON, its input, and the `conversation` of both that others may continue."""

    json: bytes
    input: StoredConversation
    conversation: StoredConversation
    is_background: bool = False

    @property
    def n_bytes(self) -> int:
        """Its bytes, without those of its conversation."""
        return len(self.json) + OVERHEAD_BYTES


Key: TypeAlias = tuple[str, str]
"""A response's owner (the name of an API key) and its id."""


class ClientResponses:
    """One client's responses, the least recently used first. A conversation that several responses
    continue is kept once, until the last of them is dropped.
    """

    def __init__(self) -> None:
        self.responses: OrderedDict[Key, StoredResponse] = OrderedDict()
        self.n_bytes = 0
        self._holders: dict[
            StoredConversation, dict[Key | StoredConversation, None]
        ] = {}  # latest last

    @property
    def oldest(self) -> Key:
        return next(iter(self.responses))

    def add(self, key: Key, response: StoredResponse) -> list[StoredConversation]:
        """Add a response. Returns the conversations that are new."""
        self.responses[key] = response
        self.n_bytes += response.n_bytes
        added = []
        holder: Key | StoredConversation = key
        held: StoredConversation | None = response.conversation
        while held is not None and held not in self._holders:
            self._holders[held] = {holder: None}
            self.n_bytes += held.n_bytes
            added.append(held)
            holder, held = held, held.before
        if held is not None:
            self._holders[held][holder] = None
        return added

    def remove(self, key: Key) -> list[StoredConversation]:
        """Remove a response. Returns the conversations that no other one continues."""
        response = self.responses.pop(key)
        self.n_bytes -= response.n_bytes
        removed = []
        holder: Key | StoredConversation = key
        held: StoredConversation | None = response.conversation
        while held is not None:
            del self._holders[held][holder]
            if self._holders[held]:
                break
            del self._holders[held]
            self.n_bytes -= held.n_bytes
            removed.append(held)
            holder, held = held, held.before
        return removed

    def touch(self, conversations: Iterable[StoredConversation]) -> None:
        """Mark the latest responses that continue these as used."""
        passed = set[StoredConversation]()  # what many of them lead to is gone through once
        for held in conversations:
            holder: Key | StoredConversation = held
            while isinstance(holder, StoredConversation) and holder not in passed:
                passed.add(holder)
                holder = next(reversed(self._holders[holder]))
            if not isinstance(holder, StoredConversation):
                self.responses.move_to_end(holder)


ItemLocation: TypeAlias = tuple[ClientResponses, StoredConversation]
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
        """Forget the responses of all clients. Returns how many there were."""
        with self._lock:
            n_responses = len(self._clients)
            self._by_client.clear()
            self._clients.clear()
            self._items.clear()
        return n_responses

    def put(self, client: str, owner: str, id: str, response: StoredResponse) -> None:
        """Store a response. It counts among the responses of `client`. Only the API key `owner` may
        retrieve it.
        """
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
        """Delete a response. Returns whether it was stored."""
        with self._lock:
            return self._forget((owner, id))

    def items(self, owner: str, ids: Iterable[str]) -> dict[str, StoredItem]:
        """The stored items of these ids, by id, whichever responses they belong to."""
        found = dict[str, StoredItem]()
        used = defaultdict[ClientResponses, list[StoredConversation]](list)
        with self._lock:
            for id in dict.fromkeys(ids):
                if (owner, id) in self._items:
                    (stored, conversation), found[id] = _last(self._items[owner, id])
                    used[stored].append(conversation)
            for stored, conversations in used.items():
                stored.touch(conversations)
        return found

    def item_bytes(self, owner: str, id: str) -> int:
        """The size of a stored item; 0 for one that is not stored."""
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

    def _index(
        self, owner: str, stored: ClientResponses, added: Iterable[StoredConversation]
    ) -> None:
        for conversation in added:
            location = stored, conversation
            for item in conversation.items:
                self._items.setdefault((owner, item.id), {})[location] = item

    def _unindex(
        self, owner: str, stored: ClientResponses, removed: Iterable[StoredConversation]
    ) -> None:
        for conversation in removed:
            for id in {item.id for item in conversation.items}:
                locations = self._items[owner, id]
                del locations[stored, conversation]
                if not locations:
                    del self._items[owner, id]


def _last(locations: dict[ItemLocation, StoredItem]) -> tuple[ItemLocation, StoredItem]:
    return next(reversed(locations.items()))


async def _store(request: Request) -> ResponseStore:
    return cast(ResponseStore, request.app.state.responses)


StoreDependency = Annotated[ResponseStore, Depends(_store)]
"""The application's store. Like all dependencies it is a coroutine, which no worker thread runs."""
