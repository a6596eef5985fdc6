"""What was used last stays longest, and a day's budget is granted once, whatever the clock says."""

import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.disk.extent import OsFiles
from kvstore.disk.folder import SECONDS_OF_DAY, DailyBudget
from kvstore.disk.store import DiskStore
from tests.disk_store_harness import DAEMON, LIMITS, PATIENCE, Chain, stored
from tests.profiles import examples

DAY = SECONDS_OF_DAY
CHAINS = [Chain(f"chain {number}", 3, 10_000) for number in range(4)]
jumps = st.sampled_from([0.0, 1.0, 3600.0, -3600.0, 365.0 * DAY, -365.0 * DAY])
uses = st.tuples(jumps, st.integers(0, 3), st.booleans())


def evicted_first(tier: DiskStore) -> Chain:
    """Make the limit too small by one extent. Returns the chain that goes."""
    limits, before = tier._space._limits, [chain for chain in CHAINS if tier.known(chain.names)]
    object.__setattr__(limits, "max_bytes", tier.stats().shared_bytes - 1)
    tier.upkeep()
    assert tier.flush(PATIENCE)
    [gone] = [chain for chain in before if not tier.known(chain.names)]
    return gone


@given(st.lists(uses, max_size=12))
@settings(max_examples=examples(60), deadline=None)
def test_what_was_used_longest_ago_goes_first(steps: list[tuple[float, int, bool]]) -> None:
    """The clock jumps before each use, or while the cache is closed."""
    now = [1.8e9]
    with tempfile.TemporaryDirectory(prefix="clock-") as name:

        def opened() -> DiskStore:
            return DiskStore.open(Path(name), "model", replace(LIMITS), clock=lambda: now[0])

        tier, order = opened(), list(CHAINS)
        stored(tier, *(chain.extent() for chain in CHAINS))
        for jump, number, is_reopened in steps:
            now[0] += jump
            if is_reopened:
                tier.close()
                tier = opened()
            tier.touch(CHAINS[number].names)
            order.remove(CHAINS[number])
            order.append(CHAINS[number])
        try:
            assert not list(tier.problems())
            assert [evicted_first(tier) for _ in CHAINS] == order
        finally:
            tier.close()


def test_another_models_extents_do_not_outlive_ours_for_a_clock_that_was_ahead(
    tmp_path: Path,
) -> None:
    now = [1.8e9 + 365 * DAY]
    other = DiskStore.open(tmp_path, "other", LIMITS, clock=lambda: now[0], daemon=DAEMON)
    stored(other, *(Chain(f"other {number}", 25).extent() for number in range(10)))
    other.close()
    now[0] -= 365 * DAY
    tier = DiskStore.open(tmp_path, "model", LIMITS, clock=lambda: now[0], daemon=DAEMON)
    chains = [Chain(f"new {number}", 25) for number in range(10)]
    for chain in chains:
        now[0] += 1
        stored(tier, chain.extent())
    assert [tier.known(chain.names) for chain in chains] == [25] * 10
    tier.close()


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 60)), max_size=30))
@settings(max_examples=examples(200), deadline=None)
def test_no_day_grants_its_budget_twice(steps: list[tuple[int, int]]) -> None:
    """Of a clock that is never more than a day wrong. On each day it says, as much is written as it
    may.
    """
    with tempfile.TemporaryDirectory(prefix="budget-") as name:
        now, spent = [20_000.0 * DAY], dict[int, int]()
        budget = DailyBudget(OsFiles(), Path(name), 100, lambda: now[0])
        highest = 0
        for days, n_bytes in steps:
            now[0] = max(now[0] + days * DAY, (highest - 1.0) * DAY)
            highest = max(highest, int(now[0] // DAY))
            if n_bytes <= budget.left():
                budget.spend(n_bytes)
                spent[highest] = spent.get(highest, 0) + n_bytes
        assert all(n_bytes <= 100 for n_bytes in spent.values())


def test_a_clock_that_was_years_ahead_stops_no_writes_for_years(tmp_path: Path) -> None:
    now = [22_000.0 * DAY]
    budget = DailyBudget(OsFiles(), tmp_path, 100, lambda: now[0])
    budget.spend(100)
    now[0] = 20_000.0 * DAY
    assert budget.left() == 0
    now[0] += DAY
    assert budget.left() == 0
    now[0] += DAY
    assert budget.left() == 100


def test_a_damaged_count_is_written_anew(tmp_path: Path) -> None:
    """However long the file was."""
    (tmp_path / "written").write_text("9 " * 200)
    budget = DailyBudget(OsFiles(), tmp_path, 100, lambda: 20_000.0 * DAY)
    budget.spend(30)
    assert budget.left() == 70
