"""Prefixes that running requests compute now, and prompts that wait rather than compute the same.

A lease's prefix is *in flight* from when the lease begins until its blocks are indexed or it ends.
A *pending prompt* has not been admitted yet. It waits while a running request computes more of it
than is indexed. Such a pair is found whichever of the two comes first.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Generic, Protocol, TypeVar

from kvstore.lease import Lease
from kvstore.tokens import TOKEN_BYTES, Tokens, common_tokens
from kvstore.types import Namespace


class Run(Protocol):
    """Tokens in a namespace. Two runs may be equal; each is itself."""

    @property
    def namespace(self) -> Namespace: ...

    @property
    def packed(self) -> bytes: ...


R = TypeVar("R", bound=Run)
_packed = attrgetter("packed")


@dataclass(slots=True)
class _Line(Generic[R]):
    """The runs of one namespace. `common[i]` tokens begin both `runs[i - 1]` and `runs[i]`."""

    runs: list[R] = field(default_factory=list)
    common: list[int] = field(default_factory=list)


class PrefixOrder(Generic[R]):
    """Finds the runs that begin as a given one does, at the cost of comparing it with a few.

    What two runs have in common is the least that any two neighbours between them have, so only
    the runs on either side of a place are ever compared by their tokens.
    """

    def __init__(self) -> None:
        self._lines: dict[Namespace, _Line[R]] = {}

    def __len__(self) -> int:
        return sum(len(line.runs) for line in self._lines.values())

    def __iter__(self) -> Iterator[R]:
        for line in self._lines.values():
            yield from line.runs

    def add(self, run: R) -> None:
        line = self._lines.setdefault(run.namespace, _Line())
        at = bisect_right(line.runs, run.packed, key=_packed)
        line.runs.insert(at, run)
        line.common.insert(at, self._common_before(line, at))
        if at + 1 < len(line.runs):
            line.common[at + 1] = self._common_before(line, at + 1)

    def remove(self, run: R) -> None:
        """Raises ValueError, or KeyError for the namespace, when the run is not here."""
        line = self._lines[run.namespace]
        at = line.runs.index(run, bisect_left(line.runs, run.packed, key=_packed))
        del line.runs[at]
        behind = line.common.pop(at)
        if at < len(line.runs):
            line.common[at] = min(behind, line.common[at])
        elif not line.runs:
            del self._lines[run.namespace]

    def beginning_like(
        self, namespace: Namespace, packed: bytes, least_tokens: int
    ) -> Iterator[tuple[R, int]]:
        """The runs that share the first `least_tokens` (at least one) tokens of `packed`, each
        with how many it shares."""
        line = self._lines.get(namespace)
        if line is None:
            return
        behind = bisect_left(line.runs, packed, key=_packed)
        for start, step in ((behind - 1, -1), (behind, 1)):
            at = start
            while 0 <= at < len(line.runs):
                if at == start:
                    common = common_tokens(packed, line.runs[at].packed)
                else:
                    common = min(common, line.common[max(at, at - step)])
                if common < least_tokens:
                    break
                yield line.runs[at], common
                at += step

    def problems(self) -> Iterator[str]:
        """What does not add up."""
        for line in self._lines.values():
            if not line.runs:
                yield "a namespace without runs"
            if sorted(line.runs, key=_packed) != line.runs:
                yield "runs out of order"
            if line.common != [self._common_before(line, at) for at in range(len(line.runs))]:
                yield "runs with other tokens in common than are noted"

    def _common_before(self, line: _Line[R], at: int) -> int:
        return common_tokens(line.runs[at - 1].packed, line.runs[at].packed) if at else 0


Probe = Callable[[Namespace, Tokens], int]
"""How many tokens of a prompt could be adopted now; see `KVStore.probe`."""

Checkpoint = Callable[[Lease, int], None]
"""Somebody will want to resume behind so many tokens of a lease; see `KVStore.checkpoint`."""


@dataclass(eq=False, slots=True)
class InFlightPrefix:
    """The whole blocks of the tokens that `lease` began with, cached ones included, as far as it
    shares them.
    """

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
    def computed_tokens(self) -> int:
        return self.lease.written_tokens

    def is_coming(self, n_tokens: int) -> bool:
        """Whether the first `n_tokens` tokens will be indexed, and are not yet."""
        return not self.is_over and self.computed_tokens < n_tokens


@dataclass(eq=False, slots=True)
class PendingPrompt:
    """A prompt to be admitted; `packed` is all of it that could be adopted.

    It waits until the request behind `awaited` has computed the first `until_tokens` tokens.
    """

    namespace: Namespace
    tokens: Tokens
    packed: bytes
    awaited: InFlightPrefix | None = None
    until_tokens: int = 0

    @property
    def is_waiting(self) -> bool:
        return self.awaited is not None and self.awaited.is_coming(self.until_tokens)


class InFlight:
    """What an index that shares nothing knows of prefixes in flight: no prompt waits for any."""

    def begin(self, lease: Lease) -> None:
        """The lease has begun: what it has not adopted of its tokens is in flight."""

    def end(self, lease: Lease) -> None:
        """The lease has ended: it will compute nothing more. Does nothing for an unknown lease."""

    def add_pending(self, namespace: Namespace, tokens: Tokens) -> PendingPrompt:
        """These tokens are to be admitted, until `remove_pending` is called."""
        return PendingPrompt(namespace, tokens, b"")

    def remove_pending(self, pending: PendingPrompt) -> None:
        """The prompt has been admitted, or never will be."""

    def must_wait(self, pending: PendingPrompt) -> bool:
        """Whether a running request computes more of it than is indexed. Each wait has an end."""
        return False

    def problems(self, leases: frozenset[Lease]) -> Iterator[str]:
        """What does not add up, given the leases that have not been released."""
        yield from ()


class InFlightPrefixes(InFlight):
    """Prefixes in flight and pending prompts, both sorted by their tokens.

    A newcomer is compared by its own tokens alone. The index is asked only for a pending prompt
    that shares tokens with a prefix in flight, and again only when its wait is over.
    """

    def __init__(self, block_size: int, probe: Probe, checkpoint: Checkpoint) -> None:
        self._block_size = block_size
        self._probe = probe
        self._checkpoint = checkpoint
        self._prefixes = PrefixOrder[InFlightPrefix]()
        self._of_lease: dict[Lease, InFlightPrefix] = {}
        self._pending = PrefixOrder[PendingPrompt]()

    def begin(self, lease: Lease) -> None:
        end_tokens = self._whole(min(len(lease.tokens), lease.shared_tokens))
        if end_tokens <= lease.cached_tokens:
            return
        prefix = InFlightPrefix(lease, lease.tokens.packed(0, end_tokens))
        self._prefixes.add(prefix)
        self._of_lease[lease] = prefix
        least_tokens = self._whole(lease.cached_tokens) + self._block_size
        for pending, common in self._pending.beginning_like(
            lease.namespace, prefix.packed, least_tokens
        ):
            if pending.tokens is not lease.tokens and not pending.is_waiting:
                self._choose(pending, [(self._whole(common), prefix)])

    def end(self, lease: Lease) -> None:
        prefix = self._of_lease.pop(lease, None)
        if prefix is not None:
            prefix.is_over = True
            self._prefixes.remove(prefix)

    def add_pending(self, namespace: Namespace, tokens: Tokens) -> PendingPrompt:
        pending = PendingPrompt(namespace, tokens, tokens.packed(0, max(len(tokens) - 1, 0)))
        self._pending.add(pending)
        self._look(pending)
        return pending

    def remove_pending(self, pending: PendingPrompt) -> None:
        self._pending.remove(pending)

    def must_wait(self, pending: PendingPrompt) -> bool:
        if pending.awaited is not None and not pending.is_waiting:
            pending.awaited = None
            self._look(pending)
        return pending.is_waiting

    def problems(self, leases: frozenset[Lease]) -> Iterator[str]:
        yield from self._prefixes.problems()
        yield from self._pending.problems()
        if self._of_lease.keys() - leases:
            yield "a prefix of a released lease is in flight"
        if set(self._prefixes) != set(self._of_lease.values()):
            yield "sorted prefixes in flight are not those of the leases"

    def _look(self, pending: PendingPrompt) -> None:
        """Find a prefix to wait for; on the way, drop those that are computed to their end."""
        found = self._prefixes.beginning_like(pending.namespace, pending.packed, self._block_size)
        coming = list[tuple[int, InFlightPrefix]]()
        for prefix, common in tuple(found):
            if not prefix.is_coming(prefix.end_tokens):
                self.end(prefix.lease)
            elif prefix.is_coming(tokens := self._whole(common)):
                coming.append((tokens, prefix))
        if coming:
            self._choose(pending, coming)

    def _choose(self, pending: PendingPrompt, coming: list[tuple[int, InFlightPrefix]]) -> None:
        """Let it wait for the prefix with most of it, if that is worth the wait: if the running
        request has less left before the point where the prompt would begin than the two share
        behind that point.
        """
        indexed_tokens = self._probe(pending.namespace, pending.tokens)
        for n_tokens, prefix in sorted(coming, key=itemgetter(0), reverse=True):
            if n_tokens - indexed_tokens > indexed_tokens - prefix.computed_tokens:
                pending.awaited, pending.until_tokens = prefix, n_tokens
                self._checkpoint(prefix.lease, n_tokens)
                return

    def _whole(self, n_tokens: int) -> int:
        """As many of the tokens as fill blocks."""
        return n_tokens - n_tokens % self._block_size
