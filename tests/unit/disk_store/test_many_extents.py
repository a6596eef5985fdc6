"""What a change of the store costs does not depend on how many extents there are. Lines of code and
calls to the disk are counted, not time.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.disk import extent as extents
from kvstore.disk import writer
from kvstore.disk.store import DiskStore
from tests.disk_store_harness import (
    BLOCK,
    DAEMON,
    LIMITS,
    PATIENCE,
    Chain,
    entry,
    read,
    stored,
)
from tests.line_counts import counted_lines

FEW, MANY = 600, 3_000  # both more than what upkeep looks at
SMALL = 64
LARGE = replace(LIMITS, max_bytes=1 << 40)
Change = Callable[[DiskStore], object]


def filled(
    directory: Path, n_extents: int, model: str, used_seconds: int, *, is_path: bool = False
) -> None:
    """A folder of n extents below one root, or each below the one before, and used a second after
    it.
    """
    DiskStore.open(directory, model, LARGE, daemon=DAEMON, model=model).close()
    parent = root = Chain("any", 0).root
    [folder] = (path.parent for path in directory.rglob("model") if path.read_text() == model)
    for number in range(n_extents):
        found = entry(Chain(f"{model} {number}", 1).names[0], SMALL)
        _, header = extents.encode(root, parent, [found])
        parent = found.block_hash if is_path else root
        path = folder / f"{number:016x}.kv"
        path.write_bytes(b"".join([header, *(part for part in found.parts if part is not None)]))
        os.utime(path, (used_seconds + number,) * 2)


def store_a_block(tier: DiskStore) -> None:
    stored(tier, Chain("new", 1, SMALL).extent())


def keep_up(tier: DiskStore) -> None:
    tier.upkeep()
    assert tier.flush(PATIENCE)


def shrink(tier: DiskStore) -> None:
    n_bytes = tier.stats().shared_bytes - 100 * 4096
    object.__setattr__(tier._space._limits, "max_bytes", n_bytes)
    keep_up(tier)
    assert tier.stats().shared_bytes <= n_bytes


def evict(tier: DiskStore) -> None:
    """About a hundred extents, after one of them has been used."""
    tier.touch(Chain("model 0", 1).names)
    shrink(tier)
    assert 90 < tier.stats().counters.evicted_entries < 110
    assert tier.known(Chain("model 0", 1).names) == 1


def lose_a_file(tier: DiskStore) -> None:
    """A file in the folder is removed by people."""
    before = tier.stats().entries
    (tier._space._folder / f"{7:016x}.kv").unlink()
    keep_up(tier)
    assert tier.stats().entries == before - 1


def look_up(tier: DiskStore) -> None:
    chain = Chain("model 9", 1)
    assert tier.lengths_below(chain.root) == {BLOCK}
    assert tier.roots() == {chain.root}
    assert read(tier, chain.names)[1] is None


def clear_a_namespace(tier: DiskStore) -> None:
    other = Chain("new", 1, SMALL, "other")
    stored(tier, other.extent())
    tier.clear(other.root)
    assert tier.flush(PATIENCE)


def cost(directory: Path, change: Change) -> int:
    """The lines that a change takes in a store that has just been opened."""
    with counted_lines("/kvstore/") as n_lines:
        tier = DiskStore.open(directory, "model", replace(LARGE), daemon=DAEMON)
        before = n_lines[0]
        change(tier)
        n_changed = n_lines[0] - before
    assert not list(tier.problems())
    tier.close()
    return n_changed


@pytest.mark.parametrize(
    "change", [store_a_block, keep_up, evict, lose_a_file, look_up, clear_a_namespace]
)
def test_a_change_costs_the_same_however_many_extents_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    monkeypatch.setattr(writer, "UPKEEP_SECONDS", 1e6)
    costs = list[int]()
    for n_extents in (FEW, MANY):
        directory = tmp_path / str(n_extents)
        filled(directory, n_extents, "model", 1_000_000)
        costs.append(cost(directory, change))
    few, many = costs
    assert 0 < many < 2 * few, f"{few} lines with {FEW} extents, {many} with {MANY}"


def test_nor_on_how_many_other_models_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model's extents are the oldest, and a third one writes as well."""
    monkeypatch.setattr(writer, "UPKEEP_SECONDS", 1e6)
    costs = list[int]()
    for n_extents in (FEW, MANY):
        directory = tmp_path / str(n_extents)
        filled(directory, n_extents, "other", 1_000_000)
        filled(directory, 10, "model", 2_000_000)
        third = DiskStore.open(directory, "third", LARGE, daemon=DAEMON)

        def change(tier: DiskStore, third: DiskStore = third) -> None:
            for number in range(3):
                stored(third, Chain(f"third {number}", 1, SMALL).extent())
                store_a_block(tier)
            shrink(tier)
            assert tier.stats().counters.evicted_entries == 0

        costs.append(cost(directory, change))
        third.close()
    few, many = costs
    assert 0 < many < 2 * few, f"{few} lines with {FEW} extents, {many} with {MANY}"


def test_opening_costs_the_same_for_each_extent(tmp_path: Path) -> None:
    """Also for a path whose end was used last, as it looks in a copy of the folder."""
    costs = list[float]()
    for n_extents, is_path in ((FEW, False), (FEW, True), (MANY, False), (MANY, True)):
        directory = tmp_path / f"{n_extents} {is_path}"
        filled(directory, n_extents, "model", 1_000_000, is_path=is_path)
        with counted_lines("/kvstore/") as n_lines:
            tier = DiskStore.open(directory, "model", replace(LARGE), daemon=DAEMON)
            costs.append(n_lines[0] / n_extents)
        assert (tier.stats().entries, list(tier.problems())) == (n_extents, [])
        tier.close()
    assert 0 < max(costs) < 2 * min(costs), f"lines an extent: {costs}"
