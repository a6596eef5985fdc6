"""One client's responses."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeAlias

from server.dialects.responses.kept.stored import Conversation, StoredResponse

Key: TypeAlias = tuple[str, str]
"""Whose a response is, and its id: nobody finds what is another's."""


class Shelf:
    """Responses, the one that was not asked for longest first, and the conversations that they
    hold: of what several continue, one copy, which goes with the last of them.
    """

    def __init__(self) -> None:
        self.responses: OrderedDict[Key, StoredResponse] = OrderedDict()
        self.n_bytes = 0
        self._holders: dict[Conversation, dict[Key | Conversation, None]] = {}  # the last one last

    @property
    def oldest(self) -> Key:
        return next(iter(self.responses))

    def add(self, key: Key, response: StoredResponse) -> list[Conversation]:
        """The conversations that were not here before."""
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
        """The conversations that nothing here continues any more."""
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
        """The latest responses that continue these have been asked for."""
        passed = set[Conversation]()  # what many of them lead to is gone through once
        for held in asked_for:
            holder: Key | Conversation = held
            while isinstance(holder, Conversation) and holder not in passed:
                passed.add(holder)
                holder = next(reversed(self._holders[holder]))
            if not isinstance(holder, Conversation):
                self.responses.move_to_end(holder)
