"""What is counted of drafts, from the scheduler to what the server gets."""

from engine.core.metrics import LatencyTracker
from engine.core.scheduler import Scheduler
from engine.core.statistics import loop_stats
from engine.measuring.telemetry import SilentTelemetry
from engine.values.stats import DraftCounts, DraftSource, HitRecord, LoopStats
from kvstore.sizes import StorageBytes
from tests.unit.engine_harness import Harness


def stats_of(scheduler: Scheduler) -> LoopStats:
    latency = LatencyTracker(lambda: 0.0, SilentTelemetry())
    return loop_stats(scheduler, latency, StorageBytes(1024, (), 0), HitRecord(), 0)


def test_every_source_is_counted_from_the_start() -> None:
    assert stats_of(Harness().scheduler).drafts == dict.fromkeys(DraftSource, DraftCounts())


def test_drafts_add_up_by_their_source_and_what_was_published_stays() -> None:
    scheduler = Harness().scheduler
    before = stats_of(scheduler)
    scheduler.counters.count_draft(DraftSource.TREE, 8, 8)
    scheduler.counters.count_draft(DraftSource.TREE, 4, 0)
    scheduler.counters.count_draft(DraftSource.OWN, 2, 1)
    drafts = stats_of(scheduler).drafts
    assert drafts[DraftSource.TREE] == DraftCounts(drafts=2, drafted_tokens=12, accepted_tokens=8)
    assert drafts[DraftSource.OWN] == DraftCounts(drafts=1, drafted_tokens=2, accepted_tokens=1)
    assert drafts[DraftSource.GRAMMAR] == DraftCounts()
    assert before.drafts[DraftSource.TREE] == DraftCounts()
