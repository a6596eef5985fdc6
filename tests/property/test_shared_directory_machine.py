"""Three models that share a directory, open and closed, against what each should have.

Whatever is written, the files are measured right behind it: they never take more than the limit.
What goes is what was used longest ago, whosever it is.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
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

from kvstore.disk import store as maintenance
from kvstore.disk.extent import OsFiles
from kvstore.disk.folder import fingerprint_of
from kvstore.disk.store import DiskStore
from kvstore.disk.types import Buffer, Fault
from tests.disk_store_harness import (
    DAEMON,
    LIMITS,
    PATIENCE,
    Chain,
    allocated,
    entry,
    extent_files,
    offer,
    read,
)
from tests.profiles import examples

N_BYTES, LENGTH = 200_000, 8
SMALL = replace(LIMITS, extent_bytes=600_000)
CHAINS = {
    model: [Chain(f"{model} {number}", LENGTH, N_BYTES) for number in range(4)]
    for model in ("red", "green", "blue")
}  # 24 MB, of which 11 fit

models = st.sampled_from(sorted(CHAINS))
numbers = st.integers(0, 3)


class MeasuringFiles(OsFiles):
    """Who writes has the directory for itself, so it can be measured then."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.most_bytes = 0

    def write(self, path: Path, buffers: Sequence[Buffer]) -> None:
        super().write(path, buffers)
        self.most_bytes = max(self.most_bytes, allocated(self._directory))


class SharingMachine(RuleBasedStateMachine):
    """See the module."""

    @initialize()
    def begin(self) -> None:
        self.scratch = tempfile.TemporaryDirectory(prefix="shared-")
        self.directory = Path(self.scratch.name)
        self.files = MeasuringFiles(self.directory)
        self.now = count(1_000_000)
        self.tiers: dict[str, DiskStore] = {}
        self.used: dict[Path, float] = {}
        for model, chains in CHAINS.items():
            for number in range(len(chains)):
                self.offer(model, number)

    @rule(model=models, number=numbers)
    def offer(self, model: str, number: int) -> None:
        tier, chain = self.tier(model), CHAINS[model][number]
        before = self.stamps()
        offer(tier, chain.extent(tier.known(chain.names)))
        self.settle(tier)
        self.what_went_was_cold(before)

    @rule(number=numbers)
    def offer_at_once(self, number: int) -> None:
        for model, chains in CHAINS.items():
            tier, chain = self.tier(model), chains[number]
            offer(tier, chain.extent(tier.known(chain.names)))
        for tier in self.tiers.values():
            self.settle(tier)

    @rule(model=models, number=numbers)
    def read(self, model: str, number: int) -> None:
        """What another model has evicted, nobody may have noticed yet."""
        tier, chain = self.tier(model), CHAINS[model][number]
        n_known = tier.known(chain.names)
        entries, failure = read(tier, chain.names[:n_known])
        assert entries == [entry(name, N_BYTES) for name in chain.names[: len(entries)]]
        assert failure is None or failure.fault is Fault.GONE
        self.settle(tier)
        assert tier.known(chain.names) == len(entries)

    @rule(model=models)
    def close(self, model: str) -> None:
        if model in self.tiers:
            self.tiers.pop(model).close()

    @rule(model=models)
    def start(self, model: str) -> None:
        """No other model's extents go for it, and of its own only those that held nothing but
        entries whose parents others had evicted: what could be read before still can be.
        """
        tier = self.tier(model)
        self.settle(tier)
        known = [tier.known(chain.names) for chain in CHAINS[model]]
        self.close(model)
        before = set(extent_files(self.directory))
        tier = self.tier(model)
        gone = before.difference(extent_files(self.directory))
        assert all(fingerprint_of(path.parent) == model for path in gone)
        assert [tier.known(chain.names) for chain in CHAINS[model]] == known

    @rule(model=models, number=numbers)
    def forget(self, model: str, number: int) -> None:
        tier = self.tier(model)
        tier.forget(CHAINS[model][number].names[LENGTH // 2])
        self.settle(tier)

    @invariant()
    def all_is_within_the_limit_and_sound(self) -> None:
        assert self.files.most_bytes <= SMALL.max_bytes
        for tier in self.tiers.values():
            assert not list(tier.problems())
            assert tier.stats().counters.faults == {}

    def teardown(self) -> None:
        for tier in self.tiers.values():
            tier.close()
        assert all(check.is_sound for check in maintenance.verify(self.directory))
        self.scratch.cleanup()

    def tier(self, model: str) -> DiskStore:
        if model not in self.tiers:
            self.tiers[model] = DiskStore.open(
                self.directory, model, SMALL, self.files, lambda: float(next(self.now)), DAEMON
            )
        return self.tiers[model]

    def settle(self, tier: DiskStore) -> None:
        tier.upkeep()
        assert tier.flush(PATIENCE)

    def stamps(self) -> dict[Path, float]:
        return {path: path.stat().st_mtime for path in extent_files(self.directory)}

    def what_went_was_cold(self, before: dict[Path, float]) -> None:
        """The coldest of all went first; those used meanwhile are not cold."""
        after = self.stamps()
        gone = [used for path, used in before.items() if path not in after]
        idle = [used for path, used in after.items() if used == before.get(path)]
        assert min(gone, default=0) <= min(idle, default=0) or not gone or not idle


def test_models_that_share_a_directory_take_no_more_than_its_limit() -> None:
    run_state_machine_as_test(
        SharingMachine,
        settings=settings(
            max_examples=examples(25), stateful_step_count=30, deadline=None, print_blob=True
        ),
    )
