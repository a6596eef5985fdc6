"""What is stored of a response."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OVERHEAD_BYTES = 512  # of an item, a conversation or a response, with its index entries: measured


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item as JSON."""

    id: str
    json: bytes

    @property
    def n_bytes(self) -> int:
        return len(self.json) + len(self.id) + OVERHEAD_BYTES


class Conversation:
    """Items, and the conversation `before` them, which several may share. Immutable."""

    __slots__ = ("before", "items", "n_bytes", "total_bytes")

    def __init__(
        self, items: Sequence[StoredItem] = (), before: "Conversation | None" = None
    ) -> None:
        self.items = tuple(items)
        self.before = before
        self.n_bytes = sum(item.n_bytes for item in self.items) + OVERHEAD_BYTES
        self.total_bytes: int = self.n_bytes + (before.total_bytes if before else 0)

    def __iter__(self) -> Iterator[StoredItem]:
        """All items, oldest first."""
        chain: list[Conversation] = []
        link: Conversation | None = self
        while link is not None:
            chain.append(link)
            link = link.before
        for link in reversed(chain):
            yield from link.items


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON, its input, and the `conversation` of both that others may continue."""

    json: bytes
    input: Conversation
    conversation: Conversation
    is_background: bool = False

    @property
    def n_bytes(self) -> int:
        """Its bytes besides those of its conversation."""
        return len(self.json) + OVERHEAD_BYTES
