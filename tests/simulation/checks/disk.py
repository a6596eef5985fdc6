"""Loads under way and what is to be written, recounted from the store, the tree and the tier."""

from collections.abc import Iterator

from engine.disk_cache.loader import _Load
from engine.disk_cache.writer import DiskWriter
from engine.values.settings import DiskWrites
from kvstore.disk.types import EntryHead
from kvstore.node import Node
from kvstore.recurrent import RecurrentGroup
from kvstore.tokens import TOKEN_BYTES, Digest, child_digest, later_digest
from tests.simulation.census import Happening
from tests.simulation.daemon import Daemon
from tests.simulation.fake_store import FakeTicket
from tests.simulation.troubled_store import TroubledStore


class DiskCheck:
    """See `problems`. `writer` is the engine's, None where it has no disk."""

    def __init__(self, daemon: Daemon, tier: TroubledStore) -> None:
        self._daemon = daemon
        self._tier = tier
        self._states = [g for g in daemon.store.groups if isinstance(g, RecurrentGroup)]

    def check(self) -> None:
        """Raises AssertionError with all that was found after a turn."""
        problems = [*self._tier.problems(), *self._leases(), *map(self._load, self._daemon.loads)]
        if (writer := self._daemon.writer) is not None:
            problems += self._writer(writer)
            problems += () if writer._is_ending else self._not_dirty(writer)
        found = [problem for problem in problems if problem]
        assert not found, found

    def excuse(self) -> None:
        """What is in memory now need not be on disk any more: it has been cleared there."""
        if (writer := self._daemon.writer) is not None:
            for node in writer._tree.nodes():
                self._tier.lost.update(head.block_hash for _, head in self._entries(node))

    def _leases(self) -> Iterator[str]:
        running = {sequence.lease for sequence in self._daemon.scheduler.running}
        loading = {load.lease for load in self._daemon.loads}
        pinned = {lease for lease in self._daemon.store.leases if lease.is_pin}
        if running | loading != self._daemon.store.leases - pinned:
            yield "the leases are not those of who runs and what is loaded"
        tickets = {id(ticket) for ticket in self._tier.tickets if not ticket.is_over}
        if tickets - {id(load.ticket) for load in self._daemon.loads}:
            yield "somebody reads for a load that is over"

    def _load(self, load: _Load) -> str | None:
        if load.deadline <= self._daemon.clock():
            return "a load beyond its time"
        assert self._daemon.loader is not None
        steps = self._daemon.loader._fills.values()
        filling = [fill for fills in steps for fill in fills if fill[0] is load]
        held = sum(each.n_bytes for each in load.arrived) + sum(fill[2] for fill in filling)
        assert isinstance(load.ticket, FakeTicket)
        has_all = self._daemon.inbox.is_empty and not load.is_cut
        if has_all and load.ticket.ahead_bytes != held:
            return f"{load.ticket.ahead_bytes} bytes were read ahead, and {held} are held"
        if load.n_filled != load.n_committed + sum(fill[1] for fill in filling):
            return "entries were filled by no step"
        return None

    def _writer(self, writer: DiskWriter) -> Iterator[str]:
        reads = [read for reads in writer._reads.values() for read in reads]
        reserved = [read.reservation for read in reads if read.reservation is not None]
        if any(it not in reserved for it in self._tier.unread()):
            yield "room is reserved for what no step reads"
        in_flight = self._daemon.in_flight
        assert self._daemon.loader is not None
        if not (writer._reads.keys() | self._daemon.loader._fills.keys()) <= {in_flight}:
            yield "something awaits a step that is over"
        dirty = writer._dirty_nodes()
        for node in writer._tree.nodes():
            if node.n_saved > len(node.packed) // TOKEN_BYTES // self._daemon.store.block_size:
                yield "more of a node is saved than it has"
            if node.save_at is not None and node not in dirty:
                yield "a node is to be written, and nobody knows"
        if not writer._rules.salted and any(node.namespace.cache_salt for node in dirty):
            yield "something salted is to be written"

    def _not_dirty(self, writer: DiskWriter) -> Iterator[str]:
        """Of nodes that are not dirty any more, nor above one that is, what is neither on disk nor
        on its way, nor was ever lost, nor stands behind the longest path.
        """
        dirty = {above for node in writer._dirty_nodes() for above in _lineage(node)}
        reads = (read for reads in writer._reads.values() for read in reads)
        read = {read.candidate.head.block_hash for read in reads}
        for node in self._worth(writer):
            if node in dirty:
                continue
            entries = list(self._entries(node))
            for parent, head in entries:
                name = self._missing(head)
                if name is not None and name not in self._tier.lost | read:
                    if self._is_long(parent):
                        self._tier.census[Happening.PATH_LONG] += 1
                        # It is not asked for again when what stands above has become smaller.
                        self._tier.lost.update(head.block_hash for _, head in entries)
                        break
                    yield f"{name.hex()} of node {node.serial} was never written whole"

    def _missing(self, head: EntryHead) -> Digest | None:
        """The name of the version to write, where none that is stored or on its way has all."""
        name = head.block_hash
        while (held := self._tier.held_head(name)) is not None:
            pairs = zip(head.sizes, held.sizes, strict=True)
            if all(size is None or there is not None for size, there in pairs):
                return None
            name = later_digest(name)
        return name

    def _is_long(self, parent: Digest) -> bool:
        """Whether an entry behind this one could make a path that is too long, or could have
        before the tier lost some of what stands above.
        """
        whole = sum(self._daemon.part_bytes)
        above = self._tier.path_bytes(parent) + sum(
            whole - head.n_bytes
            for head in self._tier.path(parent)
            if head.block_hash in self._tier.lost
        )
        room = self._tier.temper.longest_path - above
        return room < whole or not self._tier.holds(parent)

    def _worth(self, writer: DiskWriter) -> Iterator[Node]:
        rules = writer._rules
        for node in writer._tree.nodes():
            is_long = sum(each.n_tokens for each in node.path()) >= rules.least_tokens
            if node.namespace.cache_salt and not rules.salted:
                continue
            if is_long or rules.writes is DiskWrites.ALL:
                yield node

    def _entries(self, node: Node) -> Iterator[tuple[Digest, EntryHead]]:
        """All that its blocks are worth, with their parents, and what memory has of them."""
        block_size, store = self._daemon.store.block_size, self._daemon.store
        n_tokens = len(node.packed) // TOKEN_BYTES
        for index, block in enumerate(node.blocks):
            here = min(n_tokens - index * block_size, block_size)
            stops = {stop for group in self._states for stop in group.slots.attached_to(block)}
            if here == block_size or not self._states:
                stops.add(here)
            for stop in sorted(stops):
                slots = [group.attached(block, stop) for group in store.groups]
                slots += [None] * (len(self._daemon.part_bytes) - 1 - len(slots))
                sizes = tuple(
                    None if slot is None else size
                    for slot, size in zip((block, *slots), self._daemon.part_bytes, strict=True)
                )
                start = index * block_size * TOKEN_BYTES
                parent = node.parent_hash(index)
                packed = bytes(node.packed[start : start + stop * TOKEN_BYTES])
                name = child_digest(parent, packed)
                yield parent, EntryHead(name, stop, sizes)


def _lineage(node: Node) -> Iterator[Node]:
    """From a node up to its root: who writes it writes what is lacking above."""
    above: Node | None = node
    while above is not None and above.blocks:
        yield above
        above = above.parent
