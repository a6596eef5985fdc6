"""Histograms of the durations that engines measure."""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from types import MappingProxyType

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from engine.values.stats import Histogram, Latencies, Latency

NAMES: Mapping[Latency, str] = MappingProxyType(
    {
        Latency.FIRST_TOKEN: "rootstock_time_to_first_token_seconds",
        Latency.TOKEN_GAP: "rootstock_time_between_tokens_seconds",
        Latency.REQUEST: "rootstock_request_seconds",
        Latency.QUEUE_WAIT: "rootstock_queue_wait_seconds",
        Latency.STEP: "rootstock_step_seconds",
        Latency.MASK: "rootstock_mask_seconds",
    }
)

ABOUT_LATENCIES: Mapping[Latency, str] = MappingProxyType(
    {
        Latency.FIRST_TOKEN: "From a request's arrival to its first token.",
        Latency.TOKEN_GAP: "Between two consecutive tokens of a sequence.",
        Latency.REQUEST: "From a request's arrival to its end.",
        Latency.QUEUE_WAIT: "From a request's arrival to its admission.",
        Latency.STEP: "One step of the engine's loop.",
        Latency.MASK: "What may follow a token of an answer that a grammar holds: "
        "until it was known.",
    }
)


def histogram_families(latencies: Latencies) -> Iterator[Metric]:
    for latency, name in NAMES.items():
        yield histogram(name, ABOUT_LATENCIES[latency], latencies[latency], {})


def histogram(name: str, documentation: str, stats: Histogram, labels: Mapping[str, str]) -> Metric:
    """A metric family with one histogram. Buckets are cumulative, as Prometheus expects."""
    bounds = [*map(floatToGoString, stats.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(stats.counts), strict=True))
    family = HistogramMetricFamily(name, documentation, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), buckets, stats.sum_seconds)
    return family
