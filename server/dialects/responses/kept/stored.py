"""What is kept of a response."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OVERHEAD_BYTES = 512  # of an item, a run of items or a response, and of what points to it: measured


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item as JSON."""

    id: str
    json: bytes

    @property
    def n_bytes(self) -> int:
        return len(self.json) + len(self.id) + OVERHEAD_BYTES


class Conversation:
    """Items, and the conversation `before` them, which many may continue. Never changed."""

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
        runs: list[Conversation] = []
        run: Conversation | None = self
        while run is not None:
            runs.append(run)
            run = run.before
        for run in reversed(runs):
            yield from run.items


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON, what it was made from, and with its own items what may be continued."""

    json: bytes
    input: Conversation
    conversation: Conversation
    is_background: bool = False

    @property
    def n_bytes(self) -> int:
        """What it takes besides its conversation."""
        return len(self.json) + OVERHEAD_BYTES
