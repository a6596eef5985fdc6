"""Loads from disk: leases that are filled instead of computed.

Before a prompt is admitted it is looked up on disk. If much more of it is there than in memory, and
reading and filling are predicted to take less time than computing, a *load* begins: a lease,
announced like any other, so that the prompt and others with the same prefix wait for it. Loads have
a budget of bytes; one that does not fit waits for others to end. Readers deliver entries from the
root on; each step fills in what it has time for, and what has been filled is published. However a
load ends, what was published stays. The prompts that waited ask for the rest, or compute it.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from engine.disk_cache.entries import Entries, has_parts, versions
from engine.disk_cache.transfers import UNLIMITED, BytePace, LoadBudget, LoadLimits
from kvstore.disk.reader import Ticket
from kvstore.disk.store import DiskStore
from kvstore.disk.types import Entry, ReadFailure, ReadRun
from kvstore.lease import Lease, Refusal
from kvstore.store import KVStore
from kvstore.tokens import Digest, Tokens, child_digest, root_digest
from kvstore.types import Namespace

logger = logging.getLogger(__name__)

ComputeSeconds = Callable[[int, int], float]
"""Predicts the time to compute tokens from a position on: (start, n_tokens)."""

Post = Callable[[Callable[[], None]], object]
"""Has a function called on the engine thread."""


@dataclass(frozen=True, slots=True)
class LoadRules:
    """When a load pays, and how it is bounded.

    `worth`: the most that loading may take, as a share of what computing would. A load for which
    the disk delivers nothing is given up after `patience`, a share of what it would take to compute
    what is missing, but after `timeout_seconds` at least and `most_seconds` at most: others wait
    with it.
    """

    least_tokens: int = 256
    worth: float = 0.7
    first_rate: float = 500e6  # bytes a second, before any was observed
    looked_back_blocks: int = 64
    timeout_seconds: float = 2.0
    most_seconds: float = 10.0
    patience: float = 0.1
    salted: bool = False
    limits: LoadLimits = UNLIMITED

    def patience_seconds(self, compute_seconds: float) -> float:
        """The time for which the disk may deliver nothing, if computing the missing part takes
        `compute_seconds`.
        """
        return max(min(self.patience * compute_seconds, self.most_seconds), self.timeout_seconds)


class LoadOutcome(Enum):
    """The answer to a request to load a prompt."""

    NOT_WORTH_IT = auto()  # no load is worth it, nor will be while the prompt waits
    STARTED = auto()  # a load has begun
    DEFERRED = auto()  # until other loads have ended
    NO_BLOCKS = auto()  # until some are freed


@dataclass(slots=True)
class LoadAttempt:
    """The results of earlier attempts to load a waiting prompt. Kept while it waits."""

    is_settled: bool = False
    n_bytes: int = 0  # that the load would take, for which there was no budget
    n_releases: int = -1  # the pool's `n_releases` when there were too few
    had_tokens: int = -1  # that memory had of the prompt when it was last loaded
    is_deferred: bool = False  # by the last answer


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to load. `hashes` are of its whole blocks, without its last token."""

    namespace: Namespace
    tokens: Tokens
    hashes: Sequence[Digest]


@dataclass(slots=True)
class LoadCounters:
    """Counted since start; they only grow."""

    hits: int = 0  # loads that brought something
    loaded_tokens: int = 0
    load_seconds: float = 0.0  # of the hits
    given_up: int = 0  # loads for which the disk delivered nothing for seconds


@dataclass(eq=False, slots=True)
class _Load:
    """A load under way. `hashes[i]` is for entry `first + i` of the lease's table."""

    lease: Lease
    hashes: tuple[Digest, ...]
    first: int
    new_from: int  # the first entry of the table that is to be filled with a block, too
    n_bytes: int
    began: float
    compute_seconds: float  # of all that it loads, as predicted
    deadline: float  # by which something must come, where the disk is what it waits for
    ahead_bytes: int = 0  # that may be held
    held_bytes: int = 0  # that have come and are not committed
    ticket: Ticket | None = None
    arrived: deque[Entry] = field(default_factory=deque)
    n_filled: int = 0  # entries that steps have been planned to fill
    n_committed: int = 0
    is_cut: bool = False  # no more will arrive

    @property
    def missing_seconds(self) -> float:
        """The time to compute the part that the disk has not delivered."""
        return self.compute_seconds * (1 - self.n_filled / len(self.hashes))

    @property
    def waits_for_disk(self) -> bool:
        """Whether the disk is all that it waits for."""
        return self.ahead_bytes > 0 and not self.arrived and self.n_filled == self.n_committed


@dataclass(frozen=True, slots=True)
class _Loadable:
    """The part of a prompt that is worth loading."""

    hashes: Sequence[Digest]
    n_tokens: int
    have_tokens: int
    n_bytes: int
    compute_seconds: float


_Fill = tuple[_Load, int, int]
"""What a step fills in of a load: (load, entries, bytes)."""


class DiskLoader:
    """The loads under way."""

    def __init__(
        self,
        disk: DiskStore,
        store: KVStore,
        entries: Entries,
        rules: LoadRules,
        clock: Callable[[], float],
        post: Post,
    ) -> None:
        self._disk = disk
        self._store = store
        self._entries = entries
        self._rules = rules
        self._clock = clock
        self._post = post
        self._block_size = store.block_size
        self._loads: list[_Load] = []
        self._fills: dict[int, list[_Fill]] = {}  # by the step's number
        self._budget = LoadBudget(rules.limits)
        self.pace = BytePace()  # of what steps fill in
        self._step_bytes = 0.0  # that the last step had time for
        self.counters = LoadCounters()

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    @property
    def namespaces(self) -> frozenset[Namespace]:
        """The namespaces of the loads in progress."""
        return frozenset(load.lease.namespace for load in self._loads)

    def is_filling(self, lease: Lease) -> bool:
        """Whether it is the lease of a load."""
        return any(load.lease is lease for load in self._loads)

    def wait_seconds(self) -> float | None:
        """The seconds until a load is given up; None: there is no load."""
        deadline = min((load.deadline for load in self._loads), default=None)
        return None if deadline is None else max(deadline - self._clock(), 0.0)

    def begin(
        self,
        prompt: Prompt,
        attempt: LoadAttempt,
        spare_blocks: int,
        compute_seconds: ComputeSeconds,
    ) -> LoadOutcome:
        """Begin a load of the prompt if it pays and there is room for it."""
        if (known := self._known(attempt)) is not None:
            return known
        found = self._find(prompt, compute_seconds)
        if found is None or found.have_tokens <= attempt.had_tokens:
            attempt.is_settled = True
            return LoadOutcome.NOT_WORTH_IT
        attempt.n_bytes = found.n_bytes
        if not self._budget.takes(found.n_bytes):
            return LoadOutcome.DEFERRED
        if not self._begin(prompt, found, spare_blocks):
            attempt.n_releases = self._store.pool.n_releases
            return LoadOutcome.NO_BLOCKS
        attempt.had_tokens = found.have_tokens
        return LoadOutcome.STARTED

    def plan(self, number: int, seconds: float) -> bool:
        """Queue the fills of the step within `seconds`: at least one entry if one has arrived.
        Returns whether there are any.
        """
        self._budget.begin_round()
        self._expire()
        self._step_bytes = allowed = self.pace.bytes_in(seconds, self._disk.read_rate)
        if not self._loads:
            return False
        is_filling, planned = False, 0
        for load in tuple(self._loads):
            n_entries = n_bytes = 0
            while load.arrived and (not planned or planned + load.arrived[0].n_bytes <= allowed):
                each = load.arrived.popleft()
                if not self._entries.fits(each.parts):
                    self._disk.forget(load.hashes[load.n_filled])
                    self._cut(load)
                    break
                is_filling |= self._fill(load, each)
                n_entries, n_bytes = n_entries + 1, n_bytes + each.n_bytes
                planned += each.n_bytes
            if n_entries:
                self._fills.setdefault(number, []).append((load, n_entries, n_bytes))
            self._settle(load)
        if not is_filling:
            self._skip(number)
        self._read_on()
        return is_filling

    def filled_bytes(self, number: int) -> int:
        """The bytes that the step with this number fills in."""
        return sum(n_bytes for _, _, n_bytes in self._fills.get(number, ()))

    def fill_seconds(self, number: int) -> float:
        """The predicted time of the step's fills."""
        return self.pace.seconds(self.filled_bytes(number), self._disk.read_rate)

    def commit(self, number: int) -> None:
        """The step's fills have been carried out."""
        self._commit(self._fills.pop(number, ()))

    def _commit(self, fills: Sequence[_Fill]) -> None:
        for load, n_entries, n_bytes in fills:
            if load in self._loads:
                load.n_committed += n_entries
                load.held_bytes -= n_bytes
                if load.ticket is not None:
                    load.ticket.consumed(n_bytes)
                self._settle(load)

    def fail(self, number: int) -> None:
        """The blocks that the step was to fill are undefined: end their loads."""
        for load, _, _ in self._fills.pop(number, ()):
            self._end(load)

    def clear(self, namespace: Namespace | None) -> None:
        """End the loads of a namespace, or all, without publishing."""
        for load in tuple(self._loads):
            if namespace in (None, load.lease.namespace):
                self._stop(load)
                self._store.release(load.lease)

    def end(self) -> None:
        """Load nothing more."""
        for load in tuple(self._loads):
            self._end(load)

    def _known(self, attempt: LoadAttempt) -> LoadOutcome | None:
        """The answer, where it is known without another look."""
        if attempt.is_settled:
            return LoadOutcome.NOT_WORTH_IT
        if attempt.n_releases == self._store.pool.n_releases:
            return LoadOutcome.NO_BLOCKS
        if attempt.n_bytes and not self._budget.takes(attempt.n_bytes):
            return LoadOutcome.DEFERRED
        return None

    def _find(self, prompt: Prompt, compute_seconds: ComputeSeconds) -> _Loadable | None:
        """The part of the prompt that is worth loading; None: nothing."""
        if not prompt.hashes or (prompt.namespace.cache_salt and not self._rules.salted):
            return None
        have = self._store.probe(prompt.namespace, prompt.tokens)
        if len(prompt.tokens) - 1 - have < self._rules.least_tokens:
            return None
        hashes, n_tokens = self._longest(prompt)
        if n_tokens - have < self._rules.least_tokens:
            return None
        lacking = map(self._disk.entry, hashes[have // self._block_size :])
        n_bytes = sum(head.n_bytes for head in lacking if head is not None)
        reading = n_bytes / (self._disk.read_rate or self._rules.first_rate)
        loading = max(reading, self.pace.seconds(n_bytes))
        computing = compute_seconds(have, n_tokens - have)
        if loading >= self._rules.worth * computing:
            return None
        return _Loadable(hashes, n_tokens, have, n_bytes, computing)

    def _longest(self, prompt: Prompt) -> tuple[Sequence[Digest], int]:
        """The longest chain of entries after which all groups could resume, and its tokens. It cuts
        no image that is computed as a whole.
        """
        may_end = prompt.tokens.whole_until
        known = self._disk.known(prompt.hashes)
        for whole in range(known, max(known - self._rules.looked_back_blocks, 0) - 1, -1):
            hashes = prompt.hashes[:whole]
            for n_tokens, tail in self._tails(prompt, hashes):
                end = whole * self._block_size + n_tokens
                if may_end(end) == end and (found := self._resumable((*hashes, tail), end)):
                    return found, end
            end = whole * self._block_size
            if whole and may_end(end) == end and (found := self._resumable(hashes, end)):
                return found, end
        return (), 0

    def _tails(self, prompt: Prompt, hashes: Sequence[Digest]) -> Iterator[tuple[int, Digest]]:
        """Entries within the next block, the longest first."""
        parent = hashes[-1] if hashes else root_digest(prompt.namespace)
        start = len(hashes) * self._block_size
        most = min(len(prompt.tokens) - 1 - start, self._block_size - 1)
        for n_tokens in sorted(self._disk.lengths_below(parent), reverse=True):
            if n_tokens <= most:
                yield n_tokens, child_digest(parent, prompt.tokens.packed(start, start + n_tokens))

    def _resumable(self, hashes: Sequence[Digest], n_tokens: int) -> Sequence[Digest]:
        """The hashes with the versions of entries that it takes to resume; empty where one is not
        on disk.
        """
        last = len(hashes) - 1
        chosen = dict[int, Digest]()
        for index in range(last, min(self._entries.needed(n_tokens).start, last) - 1, -1):
            parts = self._entries.needed_parts(index, n_tokens)
            found = versions(hashes[index], self._disk.entry)
            head = next((head for head in found if has_parts(head, parts)), None)
            if head is None:
                return ()
            chosen[index] = head.block_hash
        return [chosen.get(index, block_hash) for index, block_hash in enumerate(hashes)]

    def _begin(self, prompt: Prompt, found: _Loadable, spare_blocks: int) -> bool:
        hashes, n_tokens = found.hashes, found.n_tokens
        tokens = Tokens(prompt.tokens.ids(0, n_tokens))
        lease = self._store.restore(prompt.namespace, tokens, found.have_tokens, spare_blocks)
        if isinstance(lease, Refusal):
            return False
        new_from = sum(map(self._store.pool.is_cached, lease.table))
        first = min(new_from, self._entries.needed(n_tokens).start, len(hashes) - 1)
        first = max(first, lease.written_tokens // self._block_size)
        load = _Load(
            lease,
            tuple(hashes[first:]),
            first,
            new_from,
            found.n_bytes,
            began=(now := self._clock()),
            compute_seconds=found.compute_seconds,
            deadline=now + self._rules.patience_seconds(found.compute_seconds),
        )
        self._loads.append(load)
        self._budget.began(load.n_bytes)
        load.ticket = self._disk.read(load.hashes, partial(self._deliver, load))
        self._read_on()
        return True

    def _deliver(self, load: _Load, found: ReadRun | ReadFailure) -> None:
        """Receive entries. Runs on a reader's thread."""
        if isinstance(found, ReadFailure):
            self._post(partial(self._fail, load))
        else:
            self._post(partial(self._arrive, load, found.entries))

    def _arrive(self, load: _Load, arrived: Sequence[Entry]) -> None:
        if not load.is_cut:
            load.arrived += arrived
            load.held_bytes += sum(each.n_bytes for each in arrived)

    def _fail(self, load: _Load) -> None:
        """End the load: no more entries will arrive."""
        load.is_cut = True

    def _cut(self, load: _Load) -> None:
        """Drop the entries after the filled ones, which are of no use."""
        self._fail(load)
        load.arrived.clear()
        if load.ticket is not None:
            load.ticket.cancel()

    def _skip(self, number: int) -> None:
        """The step has no fills that could be carried out, so there may be no step at all. Count
        those it was given as committed, after the fills of the steps in flight.
        """
        fills = self._fills.pop(number, [])
        if self._fills:
            self._fills[max(self._fills)] += fills
        else:
            self._commit(fills)

    def _fill(self, load: _Load, each: Entry) -> bool:
        """Queue the fills of an entry. Returns whether memory lacked any of it."""
        index = load.first + load.n_filled
        block = load.lease.table[index]
        load.n_filled += 1
        is_new = index >= load.new_from
        return self._store.fill(block, each.n_tokens, each.parts, is_new=is_new)

    def _settle(self, load: _Load) -> None:
        """Publish what has been filled, and end the load if it is complete or cut."""
        is_whole = load.n_committed == len(load.hashes)
        if is_whole:
            self._end(load)
            return
        n_tokens = (load.first + load.n_committed) * self._block_size
        last_whole = len(load.lease.tokens) // self._block_size * self._block_size
        if n_tokens < last_whole and n_tokens > load.lease.written_tokens:
            self._store.commit(load.lease, n_tokens - load.lease.written_tokens)
        if load.is_cut and not load.arrived and load.n_filled == load.n_committed:
            n_missing = len(load.hashes) - load.n_committed
            logger.info("the disk cache could not deliver %d blocks of a prefix", n_missing)
            self._end(load)

    def _end(self, load: _Load) -> None:
        """End the load. What has been filled stays."""
        if load not in self._loads:
            return
        self._stop(load)
        lease, began = load.lease, load.lease.cached_tokens
        if load.n_committed:
            n_tokens = (load.first + load.n_committed) * self._block_size
            n_filled = min(n_tokens, len(lease.tokens))
            self._store.commit(lease, n_filled - lease.written_tokens)
        if (n_tokens := lease.written_tokens - began) > 0:
            self.counters.hits += 1
            self.counters.loaded_tokens += n_tokens
            self.counters.load_seconds += self._clock() - load.began
        self._store.donate(lease)

    def _stop(self, load: _Load) -> None:
        self._loads.remove(load)
        self._budget.ended(load.n_bytes)
        load.arrived.clear()
        if load.ticket is not None:
            load.ticket.cancel()

    def _expire(self) -> None:
        """Give up loads for which the disk delivers nothing. Loads that wait for steps continue."""
        now = self._clock()
        for load in tuple(self._loads):
            if not load.waits_for_disk:
                load.deadline = now + self._rules.patience_seconds(load.missing_seconds)
            elif now >= load.deadline:
                self.counters.given_up += 1
                logger.warning("a load was given up: the disk has delivered nothing for seconds")
                self._end(load)

    def _read_on(self) -> None:
        """Let readers go ahead as far as the next steps fill in, the first load's reader first."""
        held = [load.held_bytes for load in self._loads]
        shares = self._budget.ahead(self._step_bytes, held)
        for load, n_bytes in zip(self._loads, shares, strict=True):
            load.ahead_bytes = n_bytes
            if load.ticket is not None:
                load.ticket.keep_ahead(n_bytes)
