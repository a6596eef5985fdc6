"""Prefixes that are on their way into the index, and the prompts that had better wait for them.

A lease *announces* the whole blocks of its prompt when it begins. A *prospect* is a prompt that
is yet to be admitted: it waits while somebody computes more of it than is indexed, and is told so
in both orders, when it comes and when somebody begins to compute.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

from kvstore.index.prefix_order import PrefixOrder
from kvstore.lease import Lease
from kvstore.tokens import TOKEN_BYTES, Tokens
from kvstore.types import Namespace

Probe = Callable[[Namespace, Tokens], int]
"""How many tokens of a prompt could be adopted now; see `KVStore.probe`."""

Checkpoint = Callable[[Lease, int], None]
"""Somebody will want to resume behind so many tokens of a lease; see `KVStore.checkpoint`."""


@dataclass(eq=False, slots=True)
class Announcement:
    """What `lease` was given to compute in whole blocks, with all that comes before it."""

    lease: Lease
    packed: bytes
    is_over: bool = False

    @property
    def namespace(self) -> Namespace:
        return self.lease.namespace

    @property
    def end_tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    @property
    def arrived_tokens(self) -> int:
        return self.lease.written_tokens

    def is_coming(self, n_tokens: int) -> bool:
        """Whether the first `n_tokens` tokens will be indexed, and are not yet."""
        return not self.is_over and self.arrived_tokens < n_tokens


@dataclass(eq=False, slots=True)
class Prospect:
    """A prompt to be admitted; `packed` is all of it that could be adopted.

    It waits until `awaited` has brought its first `until_tokens` tokens.
    """

    namespace: Namespace
    tokens: Tokens
    packed: bytes
    awaited: Announcement | None = None
    until_tokens: int = 0

    @property
    def is_waiting(self) -> bool:
        return self.awaited is not None and self.awaited.is_coming(self.until_tokens)


class Announcements(Protocol):
    """See PrefixAnnouncements, whose methods these are."""

    def announce(self, lease: Lease) -> None: ...

    def retract(self, lease: Lease) -> None: ...

    def expect(self, namespace: Namespace, tokens: Tokens) -> Prospect: ...

    def forget(self, prospect: Prospect) -> None: ...

    def must_wait(self, prospect: Prospect) -> bool: ...

    def problems(self, leases: frozenset[Lease]) -> Iterator[str]: ...


class PrefixAnnouncements:
    """Announcements and prospects, each in the order of their tokens.

    Who comes is compared by its own tokens alone. The index is asked only on behalf of a prospect
    that shares what somebody is computing, and not again until that has come or will not come.
    """

    def __init__(self, block_size: int, probe: Probe, checkpoint: Checkpoint) -> None:
        self._block_size = block_size
        self._probe = probe
        self._checkpoint = checkpoint
        self._announced = PrefixOrder[Announcement]()
        self._of_lease: dict[Lease, Announcement] = {}
        self._prospects = PrefixOrder[Prospect]()

    def announce(self, lease: Lease) -> None:
        """The lease has begun: what it has not adopted of its tokens is on its way."""
        end_tokens = self._whole(len(lease.tokens))
        if end_tokens <= lease.cached_tokens:
            return
        announcement = Announcement(lease, lease.tokens.packed(0, end_tokens))
        self._announced.add(announcement)
        self._of_lease[lease] = announcement
        least_tokens = self._whole(lease.cached_tokens) + self._block_size
        for prospect, common in self._prospects.beginning_like(
            lease.namespace, announcement.packed, least_tokens
        ):
            if prospect.tokens is not lease.tokens and not prospect.is_waiting:
                self._choose(prospect, [(self._whole(common), announcement)])

    def retract(self, lease: Lease) -> None:
        """The lease is over: nothing more will come of it."""
        announcement = self._of_lease.pop(lease, None)
        if announcement is not None:
            announcement.is_over = True
            self._announced.remove(announcement)

    def expect(self, namespace: Namespace, tokens: Tokens) -> Prospect:
        """These tokens are going to be admitted, unless `forget` is called before."""
        prospect = Prospect(namespace, tokens, tokens.packed(0, max(len(tokens) - 1, 0)))
        self._prospects.add(prospect)
        self._look(prospect)
        return prospect

    def forget(self, prospect: Prospect) -> None:
        """It has been admitted, or never will be."""
        self._prospects.remove(prospect)

    def must_wait(self, prospect: Prospect) -> bool:
        """Whether somebody is computing more of it than is indexed. Each wait has an end."""
        if prospect.awaited is not None and not prospect.is_waiting:
            prospect.awaited = None
            self._look(prospect)
        return prospect.is_waiting

    def problems(self, leases: frozenset[Lease]) -> Iterator[str]:
        """What does not add up, given the leases that have not been released."""
        yield from self._announced.problems()
        yield from self._prospects.problems()
        if self._of_lease.keys() - leases:
            yield "a lease that is over is announced"
        if set(self._announced) != set(self._of_lease.values()):
            yield "announcements in order are not those of the leases"

    def _look(self, prospect: Prospect) -> None:
        """Find whom it had better wait for; on the way, drop what has come altogether."""
        found = self._announced.beginning_like(
            prospect.namespace, prospect.packed, self._block_size
        )
        coming = list[tuple[int, Announcement]]()
        for announcement, common in tuple(found):
            if not announcement.is_coming(announcement.end_tokens):
                self.retract(announcement.lease)
            elif announcement.is_coming(tokens := self._whole(common)):
                coming.append((tokens, announcement))
        if coming:
            self._choose(prospect, coming)

    def _choose(self, prospect: Prospect, coming: list[tuple[int, Announcement]]) -> None:
        """Let it wait for who brings most of it, if that is worth the wait: if the other has less
        to compute before it is where the prospect would begin than both would compute behind that.
        """
        indexed_tokens = self._probe(prospect.namespace, prospect.tokens)
        for n_tokens, announcement in sorted(coming, key=itemgetter(0), reverse=True):
            if n_tokens - indexed_tokens > indexed_tokens - announcement.arrived_tokens:
                prospect.awaited, prospect.until_tokens = announcement, n_tokens
                self._checkpoint(announcement.lease, n_tokens)
                return

    def _whole(self, n_tokens: int) -> int:
        """As many of the tokens as fill blocks."""
        return n_tokens - n_tokens % self._block_size


class NoAnnouncements:
    """Nobody waits for anybody: there is no index that anything could come into."""

    def announce(self, lease: Lease) -> None:
        """Nobody would find it."""

    def retract(self, lease: Lease) -> None:
        """It was not announced."""

    def expect(self, namespace: Namespace, tokens: Tokens) -> Prospect:
        return Prospect(namespace, tokens, b"")

    def forget(self, prospect: Prospect) -> None:
        """Nothing was noted."""

    def must_wait(self, prospect: Prospect) -> bool:
        return False

    def problems(self, leases: frozenset[Lease]) -> Iterator[str]:
        return iter(())
