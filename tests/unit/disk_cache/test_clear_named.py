"""What a clear of one namespace finds by its name: in memory, on disk alone, and on the way."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.inbox import Inbox
from engine.core.loop import EngineLoop
from engine.core.namespace_ids import namespace_id
from engine.disk_cache.cache import DiskCache
from engine.disk_cache.loader import LoadRules
from engine.disk_cache.writer import WriteRules
from engine.values.settings import DiskWrites
from engine.values.stats import ALL_TIERS, CacheTier
from kvstore.disk.store import DiskStore
from kvstore.store import KVStore
from kvstore.tokens import root_digest
from kvstore.types import DEFAULT_NAMESPACE, Namespace
from tests.disk_store_harness import LIMITS, PATIENCE
from tests.simulation.daemon import NO_BYTES
from tests.unit.engine_harness import Harness, disk_of, prompt

PROMPT = prompt(1, 40)
ALICE, BOB = (replace(DEFAULT_NAMESPACE, cache_salt=salt) for salt in ("alice", "bob"))
EVERYBODY = (DEFAULT_NAMESPACE, ALICE, BOB)
DISK, MEMORY = [CacheTier.DISK], [CacheTier.MEMORY]


class Engine:
    """One of several over one folder, the others before it."""

    def __init__(self, folder: Path) -> None:
        self.tier = DiskStore.open(folder, "model", LIMITS)
        self.inbox = Inbox()
        self.harness = Harness(disk=self._disk)
        scheduler, runner = self.harness.scheduler, self.harness.runner
        self.loop = EngineLoop(scheduler, runner, self.inbox, print, NO_BYTES)

    def _disk(self, store: KVStore) -> DiskCache:
        return DiskCache(
            self.tier,
            store,
            (16 * store.block_size, 8),
            LIMITS.max_bytes,
            self.inbox.post,
            WriteRules(writes=DiskWrites.ALL, salted=True),
            LoadRules(least_tokens=1, worth=float("inf"), salted=True),
        )

    def ask(self, namespace: Namespace) -> int:
        """How many tokens of the prompt were cached; all is written then."""
        harness = self.harness
        request_id = harness.add(PROMPT, cache_salt=namespace.cache_salt)
        for _ in range(10_000):
            self.inbox.handle()
            if not harness.scheduler.has_work:
                break
            harness.step()
            if disk_of(harness).is_loading:
                self.inbox.wait(PATIENCE)
                assert self.inbox.n_calls, "the load makes no progress"
        assert self.tier.flush(PATIENCE)
        return harness.usage(request_id).cached_tokens

    def clear(self, namespace: Namespace, tiers: list[CacheTier]) -> None:
        self.loop.clear_named(namespace_id(namespace), (), tiers)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With everybody's prompt, of an engine that has ended."""
    engine = Engine(tmp_path)
    for namespace in EVERYBODY:
        assert engine.ask(namespace) == 0
    engine.tier.close()
    return tmp_path


@pytest.mark.parametrize("tiers", [DISK, [*ALL_TIERS]])
@pytest.mark.parametrize("cleared", EVERYBODY)
def test_what_an_earlier_engine_has_left_is_cleared_and_nothing_else(
    folder: Path, cleared: Namespace, tiers: list[CacheTier]
) -> None:
    engine = Engine(folder)
    engine.clear(cleared, tiers)
    assert engine.loop.forget_cleared() is None
    assert engine.tier.roots() == {root_digest(it) for it in EVERYBODY if it != cleared}
    engine.tier.close()
    engine = Engine(folder)
    found = {it: engine.ask(it) for it in EVERYBODY}
    assert found == {it: 0 if it == cleared else 36 for it in EVERYBODY}
    engine.tier.close()


def test_a_clear_of_memory_leaves_the_disk(folder: Path) -> None:
    engine = Engine(folder)
    engine.clear(ALICE, MEMORY)
    assert engine.ask(ALICE) == 36
    engine.tier.close()


def test_what_has_come_to_memory_since_somebody_looked_there_is_cleared_there_too(
    folder: Path,
) -> None:
    """The others were looked through on another thread."""
    engine = Engine(folder)
    others = engine.loop.namespaces
    assert ALICE not in others
    assert engine.ask(ALICE) == 36
    engine.loop.clear_named(namespace_id(ALICE), others, [*ALL_TIERS])
    cleared = engine.loop.forget_cleared()
    assert cleared is not None
    assert cleared.blocks > 0
    assert engine.ask(ALICE) == 0
    engine.tier.close()


@pytest.mark.parametrize("name", ["0123456789ab", root_digest(ALICE).hex()[:8], "1"])
def test_nobody_is_meant_by_another_name(folder: Path, name: str) -> None:
    engine = Engine(folder)
    engine.loop.clear_named(name, (), [*ALL_TIERS])
    assert engine.tier.roots() == set(map(root_digest, EVERYBODY))
    engine.tier.close()
