"""The counts of drafts, from the scheduler to the statistics that the server gets."""

from engine.core.scheduler import Scheduler
from engine.core.statistics import snapshot
from engine.values.stats import DraftCounts, DraftSource, EngineStats
from tests.simulation.daemon import NO_BYTES, NO_DECODE, NO_MEMORY
from tests.unit.engine_harness import Harness


def stats_of(scheduler: Scheduler) -> EngineStats:
    return snapshot(scheduler, NO_BYTES, NO_MEMORY, NO_DECODE)


def test_every_source_is_counted_from_the_start() -> None:
    assert stats_of(Harness().scheduler).drafts == dict.fromkeys(DraftSource, DraftCounts())


def test_drafts_add_up_by_their_source_and_a_snapshot_stays_as_it_is() -> None:
    scheduler = Harness().scheduler
    before = stats_of(scheduler)
    scheduler.metrics.verified(DraftSource.TREE, 8, 8)
    scheduler.metrics.verified(DraftSource.TREE, 4, 0)
    scheduler.metrics.verified(DraftSource.OWN, 2, 1)
    drafts = stats_of(scheduler).drafts
    assert drafts[DraftSource.TREE] == DraftCounts(drafts=2, drafted_tokens=12, accepted_tokens=8)
    assert drafts[DraftSource.OWN] == DraftCounts(drafts=1, drafted_tokens=2, accepted_tokens=1)
    assert drafts[DraftSource.GRAMMAR] == DraftCounts()
    assert before.drafts[DraftSource.TREE] == DraftCounts()
