"""Metrics of the disk cache, for models that have one."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.values.stats import DISK_FAULTS, DiskCacheStats


def disk_families(disk: DiskCacheStats) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "rootstock_disk_entries",
        "Blocks, and ends of prompts within one, in the disk cache.",
        disk.entries,
    )
    for state, about, n_bytes in (
        ("used", "Size of the model's files in the disk cache.", disk.used_bytes),
        ("shared", "Size of the files of all models in the disk cache.", disk.shared_bytes),
        ("limit", "The most that the files of all models may take.", disk.limit_bytes),
        ("buffered", "On their way to the disk cache.", disk.buffered_bytes),
    ):
        yield GaugeMetricFamily(f"rootstock_disk_{state}_bytes", about, n_bytes)
    yield CounterMetricFamily(
        "rootstock_disk_read_bytes", "Read from the disk cache.", disk.read_bytes
    )
    yield CounterMetricFamily(
        "rootstock_disk_written_bytes", "Written to the disk cache.", disk.written_bytes
    )
    yield CounterMetricFamily(
        "rootstock_disk_hits", "Prompts of which the disk cache had something.", disk.hits
    )
    yield CounterMetricFamily(
        "rootstock_disk_loaded_tokens",
        "Prompt tokens loaded from the disk cache.",
        disk.loaded_tokens,
    )
    yield CounterMetricFamily(
        "rootstock_disk_load_seconds",
        "From the decision to load a prefix to its last block, added up.",
        disk.load_seconds,
    )
    for name, about, count in (
        ("given_up_loads", "Loads given up: the disk delivered nothing.", disk.given_up_loads),
        ("evicted_entries", "Entries evicted from the disk cache.", disk.evicted_entries),
        (
            "refused_entries",
            "Entries not written for lack of room.",
            disk.refused_entries,
        ),
    ):
        yield CounterMetricFamily(f"rootstock_disk_{name}", about, count)
    yield GaugeMetricFamily(
        "rootstock_disk_day_spent",
        "1 while nothing is written because the daily budget has been.",
        disk.is_day_spent,
    )
    failures = CounterMetricFamily(
        "rootstock_disk_failures",
        "What could not be read or written, by fault; it is computed instead.",
        labels=["fault"],
    )
    for fault in DISK_FAULTS:  # all from the start, or Prometheus has no rate of the first one
        failures.add_metric([fault], disk.failures.get(fault, 0))
    yield failures
