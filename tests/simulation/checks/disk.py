"""Loads under way and what is to be written, recounted from the store, the tree and the tier."""

from collections import Counter
from collections.abc import Iterator

from engine.disk_cache.archive import Archive
from engine.disk_cache.names import BlockNames
from engine.disk_cache.recalls import _Load
from engine.types import DiskWrites
from kvstore.digest import Digest, digest_behind
from kvstore.groups.recurrent import RecurrentGroup
from kvstore.radix_node import Node
from kvstore.tokens import TOKEN_BYTES
from tests.simulation.daemon import Daemon
from tests.simulation.troubled_tier import FakeTicket, TroubledTier


class DiskCheck:
    """See `problems`. `archive` is the engine's, None where it has no disk."""

    def __init__(self, daemon: Daemon, tier: TroubledTier) -> None:
        self._daemon = daemon
        self._tier = tier
        self._states = [g for g in daemon.store.groups if isinstance(g, RecurrentGroup)]
        self._promised: dict[Node, set[Digest]] = {}  # states of nodes
        self._evictions = 0

    def check(self) -> None:
        """Raises AssertionError with all that was found after a turn."""
        problems = [*self._tier.problems(), *self._leases(), *map(self._load, self._daemon.loads)]
        if (archive := self._daemon.archive) is not None:
            problems += self._archive(archive)
            problems += () if archive._is_ending else self._unwritten(archive)
        found = [problem for problem in problems if problem]
        assert not found, found

    def excuse(self) -> None:
        """What is in memory now need not be on disk any more: it has been cleared there."""
        if (archive := self._daemon.archive) is not None:
            for node in self._daemon.store.index.nodes():
                self._tier.lost.update(*self._names(archive._names, node))

    def _leases(self) -> Iterator[str]:
        running = {sequence.lease for sequence in self._daemon.scheduler.running}
        loading = {load.lease for load in self._daemon.loads}
        if running | loading != self._daemon.store.leases:
            yield "the leases are not those of who runs and what is loaded"
        tickets = {id(ticket) for ticket in self._tier.tickets if not ticket.is_over}
        if tickets - {id(load.ticket) for load in self._daemon.loads}:
            yield "somebody reads for a load that is over"

    def _load(self, load: _Load) -> str | None:
        if load.deadline <= self._daemon.clock():
            return "a load beyond its time"
        assert self._daemon.recalls is not None
        steps = self._daemon.recalls._fills.values()
        filling = [fill for fills in steps for fill in fills if fill[0] is load]
        held = sum(each.n_bytes for each in load.arrived) + sum(fill[2] for fill in filling)
        assert isinstance(load.ticket, FakeTicket)
        has_all = self._daemon.inbox.is_empty and not load.is_cut
        if has_all and load.ticket.ahead_bytes != held:
            return f"{load.ticket.ahead_bytes} bytes were read ahead, and {held} are held"
        if load.n_filled != load.n_committed + sum(fill[1] for fill in filling):
            return "entries were filled by no step"
        return None

    def _archive(self, archive: Archive) -> Iterator[str]:
        reads = [read for reads in archive._reads.values() for read in reads]
        wanted = {each.name for read in reads if read.is_wanted for each in read.candidates}
        if archive._unwritten._reading.keys() != wanted:
            yield "the names that are being read are not those of the reads"
        in_flight = self._daemon.in_flight
        assert self._daemon.recalls is not None
        if not (archive._reads.keys() | self._daemon.recalls._fills.keys()) <= {in_flight}:
            yield "something awaits a step that is over"
        nodes = set(self._daemon.store.index.nodes())
        seen = archive._unwritten._seen.keys()
        if not (archive._due.keys() | archive._later.keys() | seen) <= nodes:
            yield "something is to be written that has left the tree"
        if archive._due.keys() & archive._later.keys():
            yield "a node is due now and later"

    def _unwritten(self, archive: Archive) -> Iterator[str]:
        """Of nodes that are not dirty any more, what is neither on disk nor on its way, nor was
        ever lost.

        A state counts if it has been there since before the writing began: one that comes to a node
        with nothing else new does not make it dirty.
        """
        if self._evictions != (evictions := sum(group.slots.evictions for group in self._states)):
            self._evictions = evictions
            self._promised.clear()  # any may have gone and come back
        names = {node: self._names(archive._names, node) for node in self._worth(archive)}
        once = Counter(name for _, states in names.values() for name in states)
        promised = dict[Node, set[Digest]]()
        for node, (going_on, stopping) in names.items():
            is_dirty = node in archive._due or node in archive._later
            has_begun = not is_dirty or node in archive._unwritten._seen
            states = stopping & self._promised.get(node, set()) if has_begun else stopping
            promised[node] = {name for name in states if once[name] == 1}  # else another's affair
            wanted = set() if is_dirty else going_on | promised[node]
            for name in wanted - archive._unwritten._reading.keys() - self._tier.lost:
                if not self._tier.holds(name):
                    yield f"{name.hex()} of node {node.serial} was never written"
        self._promised = promised

    def _worth(self, archive: Archive) -> Iterator[Node]:
        rules = archive._rules
        for namespace, path, node in self._daemon.store.index.walk():
            is_long = len(path) // TOKEN_BYTES >= rules.least_tokens
            if namespace.cache_salt and not rules.salted:
                continue
            if is_long or rules.writes is DiskWrites.ALL:
                yield node

    def _names(self, names: BlockNames, node: Node) -> tuple[set[Digest], set[Digest]]:
        """Of all entries that its blocks are worth: those that go on, and those of states."""
        block_size = self._daemon.store.block_size
        parent, n_tokens = names.above(node, 0), len(node.packed) // TOKEN_BYTES
        going_on, stopping = set[Digest](), set[Digest]()
        for index, block in enumerate(node.blocks):
            first = index * block_size
            packed = bytes(node.packed[first * TOKEN_BYTES : (first + block_size) * TOKEN_BYTES])
            for group in self._states:
                stopping |= {
                    digest_behind(parent, packed[: stop * TOKEN_BYTES])
                    for stop in group.slots.carried_by(block)
                }
            parent = digest_behind(parent, packed)
            if not self._states or n_tokens - first >= block_size:
                going_on.add(parent)
        return going_on, stopping - going_on
