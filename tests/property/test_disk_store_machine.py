"""DiskStore against a dictionary, with restarts and a disk that loses and changes what it has.

Bytes follow from names, so whatever comes back can be checked. The property: what is read is what
was offered under that name, what is stored hangs from what is stored, and while the disk is sound
the tier holds exactly what the dictionary does.
"""

import errno
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvstore.disk.store import DiskStore
from kvstore.disk.types import MIB, Fault
from kvstore.tokens import Digest
from tests.disk_store_harness import (
    LIMITS,
    PATIENCE,
    Chain,
    Extent,
    FaultyFiles,
    allocated,
    entry,
    extent_files,
    flip,
    offer,
    read,
)
from tests.profiles import examples

N_BYTES, LENGTH = 20_000, 12
SMALL = replace(LIMITS, extent_bytes=100_000, least_free=0.05)
EXTENT = 4  # entries of 25,000 bytes
LEFT_FREE = 5 * MIB  # by that share of what FaultyFiles say that the disk has
CHAINS = (
    Chain("a", LENGTH, N_BYTES),
    Chain("b", LENGTH, N_BYTES),
    Chain("a", LENGTH, N_BYTES, "b"),
)
BRANCH = Chain("branch", LENGTH, N_BYTES)

chains = st.sampled_from((*CHAINS, BRANCH))
positions = st.integers(0, LENGTH)


class TierMachine(RuleBasedStateMachine):
    """See the module."""

    @initialize()
    def begin(self) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="tier-")
        self.path = Path(self.directory.name)
        self.files = FaultyFiles()
        self.parents: dict[Digest, Digest] = {}
        self.is_damaged = False
        self.open()
        for chain in (*CHAINS, BRANCH):
            self.offer(chain, 0, 9)

    def open(self) -> None:
        self.tier = DiskStore.open(self.path, "model", SMALL, self.files)

    @rule(chain=chains, start=positions, n_entries=st.integers(1, LENGTH))
    def offer(self, chain: Chain, start: int, n_entries: int) -> None:
        """Mostly where the chain ends; sometimes in its midst, and below nothing."""
        start = min(start, self.tier.known(chain.names) + 1)
        extent = self.extent(chain, start, n_entries)
        if extent.entries:
            in_place = extent.parent == extent.root or self.tier.known([extent.parent]) == 1
            assert offer(self.tier, extent) == in_place
            assert self.tier.flush(PATIENCE)
            if in_place:
                above = extent.parent
                for found in extent.entries:
                    self.parents[found.block_hash], above = above, found.block_hash
                assert self.tier.known(chain.names[start:][:n_entries]) == len(extent.entries)

    @rule(chain=chains, start=positions, n_entries=st.integers(1, LENGTH))
    def offer_to_a_full_disk(self, chain: Chain, start: int, n_entries: int) -> None:
        extent, before = self.extent(chain, start, n_entries), self.known()
        self.files.fail("write", errno.ENOSPC)
        offer(self.tier, extent)
        assert self.tier.flush(PATIENCE)
        self.files.heal()
        self.tier.upkeep()
        assert self.tier.flush(PATIENCE)
        assert self.known() == before

    @rule(chain=chains, start=positions, stop=positions)
    def read(self, chain: Chain, start: int, stop: int) -> None:
        names = chain.names[start:stop]
        n_known = self.tier.known(names)
        entries, failure = read(self.tier, names)
        assert entries == [entry(name, N_BYTES) for name in names[: len(entries)]]
        if not self.is_damaged:
            assert len(entries) == n_known
        if failure is not None:
            assert self.is_damaged or failure.fault is Fault.GONE
            assert self.tier.known(names) <= len(entries)  # a damaged extent goes as a whole

    @rule(chain=chains, position=st.integers(0, LENGTH - 1))
    def forget(self, chain: Chain, position: int) -> None:
        """The entry goes, with all below it, and what stands in the same extent."""
        self.tier.forget(chain.names[position])
        known = self.known()
        assert chain.names[position] not in known
        doomed = {chain.names[position]}
        for name, parent in self.parents.items():  # a dictionary has parents before children
            if parent in doomed:
                doomed.add(name)
        assert not doomed & known
        above = chain.names[: max(position - EXTENT + 1, 0)]
        assert self.is_damaged or set(above) & self.parents.keys() <= known
        self.parents = {name: above for name, above in self.parents.items() if name in known}

    @rule(root=st.sampled_from((None, CHAINS[0].root, CHAINS[2].root)))
    def clear(self, root: Digest | None) -> None:
        self.tier.clear(root)
        for chain in (*CHAINS, BRANCH):
            if root in (None, chain.root):
                for name in chain.names:
                    self.parents.pop(name, None)

    @rule(is_flushed=st.booleans())
    def reopen(self, is_flushed: bool) -> None:
        if is_flushed:
            assert self.tier.flush(PATIENCE)
        self.tier.close()
        self.open()

    @rule(
        which=st.integers(0, 99),
        where=st.integers(0, 99_999),
        how=st.sampled_from(("flip", "truncate", "overwrite", "put a folder", "put a pipe")),
    )
    def damage(self, which: int, where: int, how: str) -> None:
        """Whoever opens a pipe waits for somebody at its other end."""
        assert self.tier.flush(PATIENCE)
        if not (found := [path for path in self.extents() if path.stat().st_size]):
            return
        self.is_damaged = True
        path = found[which % len(found)]
        n_bytes = path.stat().st_size
        match how:
            case "flip":
                flip(path, where % n_bytes)
            case "truncate":
                os.truncate(path, where % n_bytes)
            case "overwrite":
                path.write_bytes(b"nonsense" * (n_bytes // 8))
            case "put a folder":
                path.unlink()
                path.mkdir()
            case "put a pipe":
                path.unlink()
                os.mkfifo(path)

    @rule(which=st.integers(0, 99), is_read=st.booleans())
    def be_evicted_by_another_process(self, which: int, is_read: bool) -> None:
        assert self.tier.flush(PATIENCE)
        before, faults = self.known(), self.tier.stats().counters.faults
        if found := self.extents():
            found[which % len(found)].unlink()
        for chain in CHAINS if is_read else ():
            entries, failure = read(self.tier, chain.names)
            assert entries == [entry(name, N_BYTES) for name in chain.names[: len(entries)]]
            assert self.is_damaged or failure is None or failure.fault is Fault.GONE
        self.tier.upkeep()
        assert self.tier.flush(PATIENCE)
        assert self.is_damaged or self.tier.stats().counters.faults == faults
        known = self.known()
        assert known <= before
        self.parents = {name: above for name, above in self.parents.items() if name in known}

    @rule(spare_bytes=st.integers(0, 800_000))
    def make_the_disk_narrow(self, spare_bytes: int) -> None:
        """So that what comes takes the place of what is there: extents go, with what hangs from
        them.
        """
        before = self.known()
        self.files.capacity = allocated(self.path) + LEFT_FREE + spare_bytes
        chain = Chain("narrow", 3, N_BYTES)
        offer(self.tier, chain.extent())
        assert self.tier.flush(PATIENCE)
        self.tier.forget(chain.names[0])
        assert self.tier.flush(PATIENCE)
        self.files.capacity = None
        self.tier.upkeep()
        assert self.tier.flush(PATIENCE)
        known = self.known()
        assert known <= before
        self.parents = {name: above for name, above in self.parents.items() if name in known}

    @rule(chain=chains, start=positions)
    def fill_the_disk(self, chain: Chain, start: int) -> None:
        """Somebody else does, and goes away again."""
        before = self.known()
        self.files.capacity = 0
        offer(self.tier, self.extent(chain, start, LENGTH))
        self.tier.upkeep()
        assert self.tier.flush(PATIENCE)
        assert self.tier.room == 0
        self.files.capacity = None
        self.tier.upkeep()
        assert self.tier.flush(PATIENCE)
        assert self.known() == before

    @invariant()
    def holds_what_it_should(self) -> None:
        assert not list(self.tier.problems())
        known = self.known()
        assert known <= self.parents.keys()
        assert self.is_damaged or known == self.parents.keys()
        roots = {chain.root for chain in CHAINS}
        assert {self.parents[name] for name in known} <= known | roots
        assert self.tier.stats().entries == len(known)
        names = {chain: known.intersection(chain.names) for chain in (*CHAINS, BRANCH)}
        assert self.tier.roots() == {chain.root for chain, found in names.items() if found}
        assert allocated(self.path) <= SMALL.max_bytes
        self.parents = {name: parent for name, parent in self.parents.items() if name in known}

    def teardown(self) -> None:
        self.tier.close()
        self.directory.cleanup()

    def extents(self) -> list[Path]:
        return [path for path in extent_files(self.path) if path.is_file()]

    def known(self) -> set[Digest]:
        return {
            name for chain in (*CHAINS, BRANCH) for name in chain.names if self.tier.entry(name)
        }

    def extent(self, chain: Chain, start: int, n_entries: int) -> Extent:
        """The branch begins behind the fifth entry of the first chain."""
        extent = chain.extent(start, start + n_entries)
        at_fork = chain is BRANCH and not start
        return replace(extent, parent=CHAINS[0].names[4]) if at_fork else extent


def test_the_tier_is_a_dictionary_that_may_lose() -> None:
    run_state_machine_as_test(
        TierMachine,
        settings=settings(
            max_examples=examples(60), stateful_step_count=40, deadline=None, print_blob=True
        ),
    )
