"""What a picture shows of the disk cache."""

from collections.abc import Callable

import pytest

from engine.disk_cache.cache import DiskCache
from engine.disk_cache.loader import LoadRules
from engine.disk_cache.writer import WriteRules
from engine.values.settings import DiskWrites
from engine.values.tree import TreeNode
from kvstore.store import KVStore
from tests.simulation.fake_store import FakeStore
from tests.unit.engine_harness import Harness, disk_of, prompt
from tests.unit.watching.test_renderer import BLOCK, Watcher

LIMIT_BYTES = 1000
PART_BYTES = (16 * BLOCK, 8)


class Tiered:
    """A harness with a disk cache, and a watcher."""

    def __init__(self) -> None:
        self.tier = FakeStore()
        self.harness = Harness(disk=self._disk)
        self.watcher = Watcher(self.harness)

    def _disk(self, store: KVStore) -> DiskCache:
        return DiskCache(
            self.tier,
            store,
            PART_BYTES,
            LIMIT_BYTES,
            lambda told: told(),
            WriteRules(writes=DiskWrites.ALL),
            LoadRules(least_tokens=1, worth=float("inf")),
        )

    def nodes(self) -> list[TreeNode]:
        return sorted(self.watcher.picture().nodes, key=lambda node: (node.start, node.id))

    def stored(self, tokens: list[int]) -> list[int]:
        """Serve and write the tokens. Returns the tokens on disk of each node."""
        self.harness.serve(tokens)
        return [node.disk_tokens for node in self.nodes()]


@pytest.fixture
def tiered() -> Tiered:
    return Tiered()


def test_without_a_disk_nothing_is_said_of_one() -> None:
    harness = Harness()
    harness.serve(prompt(1, 10))
    picture = Watcher(harness).picture()
    assert picture.disk is None
    assert [node.disk_tokens for node in picture.nodes] == [0]


def test_what_has_been_written_is_counted_to_the_last_token(tiered: Tiered) -> None:
    shared = prompt(1, 12)
    tiered.stored([*shared, *prompt(2, 9)])
    tiered.stored([*shared, *prompt(3, 7)])
    nodes = tiered.nodes()
    assert len(nodes) == 3
    assert any(node.tail for node in nodes)
    assert [node.disk_tokens for node in nodes] == [node.tokens for node in nodes]
    stats = disk_of(tiered.harness).stats()
    assert tiered.watcher.picture().disk == stats
    assert stats.limit_bytes == LIMIT_BYTES
    assert stats.written_bytes > 0 == stats.read_bytes
    assert stats.entries == len(tiered.tier.records) > 0


def test_what_the_disk_has_lost_is_not(tiered: Tiered) -> None:
    tiered.stored(prompt(1, 20))
    tiered.watcher.look()
    assert not tiered.watcher.look()
    third = list(tiered.tier.records)[2]
    tiered.tier.forget(third)
    assert tiered.watcher.look()
    assert [node.disk_tokens for node in tiered.nodes()] == [2 * BLOCK]


def test_what_is_in_memory_alone_is_not(tiered: Tiered) -> None:
    tiered.tier.room = 0
    tiered.harness.add(prompt(1, 20))
    for _ in range(8):
        tiered.harness.step()
    assert [node.disk_tokens for node in tiered.nodes()] == [0]


def test_who_waits_for_the_disk_is_said_to_be_loading(tiered: Tiered) -> None:
    asked = prompt(1, 20)
    tiered.stored(asked)
    tiered.harness.store.clear()
    tiered.harness.add(asked)
    tiered.harness.add(asked)
    assert states(tiered) == ["waiting", "waiting"]
    tiered.harness.step()
    assert states(tiered) == ["loading", "loading"]
    tiered.tier.hand_over(len(asked))
    step_until(tiered, lambda: "running" in states(tiered))
    disk = tiered.watcher.picture().disk
    assert disk is not None
    assert (disk.hits, disk.loaded_tokens) == (1, 16)
    assert disk.read_bytes > 0


def test_who_waits_for_somebody_else_is_not(tiered: Tiered) -> None:
    asked = prompt(1, 20)
    tiered.stored(asked)
    tiered.harness.store.clear()
    for tokens in (asked, prompt(2, 100), prompt(2, 100)):
        tiered.harness.add(tokens)
    tiered.harness.step()
    assert sorted(states(tiered)) == ["loading", "running", "waiting"]


def states(tiered: Tiered) -> list[str]:
    return [request.state for request in tiered.watcher.picture().requests]


def step_until(tiered: Tiered, is_so: Callable[[], bool]) -> None:
    for _ in range(200):
        tiered.harness.step()
        if is_so():
            return
    raise AssertionError("it never came to be")
