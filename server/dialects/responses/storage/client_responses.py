"""The stored responses of one client, in LRU order."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeAlias

from server.dialects.responses.storage.stored import Conversation, StoredResponse

Key: TypeAlias = tuple[str, str]
"""A response's owner (the name of an API key) and its id."""


class ClientResponses:
    """Responses, the least recently used first, and their conversations. What several responses
    continue is there once, and goes with the last of them.
    """

    def __init__(self) -> None:
        self.responses: OrderedDict[Key, StoredResponse] = OrderedDict()
        self.n_bytes = 0
        self._holders: dict[Conversation, dict[Key | Conversation, None]] = {}  # latest last

    @property
    def oldest(self) -> Key:
        return next(iter(self.responses))

    def add(self, key: Key, response: StoredResponse) -> list[Conversation]:
        """Returns the conversations that were not here before."""
        self.responses[key] = response
        self.n_bytes += response.n_bytes
        added = []
        holder: Key | Conversation = key
        held: Conversation | None = response.conversation
        while held is not None and held not in self._holders:
            self._holders[held] = {holder: None}
            self.n_bytes += held.n_bytes
            added.append(held)
            holder, held = held, held.before
        if held is not None:
            self._holders[held][holder] = None
        return added

    def remove(self, key: Key) -> list[Conversation]:
        """Returns the conversations that no response here continues any more."""
        response = self.responses.pop(key)
        self.n_bytes -= response.n_bytes
        removed = []
        holder: Key | Conversation = key
        held: Conversation | None = response.conversation
        while held is not None:
            del self._holders[held][holder]
            if self._holders[held]:
                break
            del self._holders[held]
            self.n_bytes -= held.n_bytes
            removed.append(held)
            holder, held = held, held.before
        return removed

    def touch(self, asked_for: Iterable[Conversation]) -> None:
        """Mark the latest responses that continue these as used."""
        passed = set[Conversation]()  # what many of them lead to is gone through once
        for held in asked_for:
            holder: Key | Conversation = held
            while isinstance(holder, Conversation) and holder not in passed:
                passed.add(holder)
                holder = next(reversed(self._holders[holder]))
            if not isinstance(holder, Conversation):
                self.responses.move_to_end(holder)
