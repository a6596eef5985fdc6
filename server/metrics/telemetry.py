"""Histograms of durations, which an engine's connection fills."""

from collections.abc import Iterable, Iterator

from prometheus_client import Histogram
from prometheus_client.core import Metric

REQUEST_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class EngineTelemetry:
    """The engine's Telemetry: each duration goes into one histogram. Safe from any thread."""

    def __init__(self) -> None:
        self.first_token_seconds = Histogram(
            "rootstock_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=REQUEST_BUCKETS,
            registry=None,
        )
        self.token_gap_seconds = Histogram(
            "rootstock_time_between_tokens_seconds",
            "Between two consecutive tokens of a sequence.",
            buckets=STEP_BUCKETS,
            registry=None,
        )
        self.request_seconds = Histogram(
            "rootstock_request_seconds",
            "From a request's arrival to its end.",
            buckets=REQUEST_BUCKETS,
            registry=None,
        )
        self.queue_wait_seconds = Histogram(
            "rootstock_queue_wait_seconds",
            "From a request's arrival to its admission.",
            buckets=REQUEST_BUCKETS,
            registry=None,
        )
        self.step_seconds = Histogram(
            "rootstock_step_seconds",
            "One step of the engine's loop.",
            buckets=STEP_BUCKETS,
            registry=None,
        )

        self.mask_seconds = Histogram(
            "rootstock_mask_seconds",
            "What may follow a token of an answer that a grammar holds: until it was known.",
            buckets=STEP_BUCKETS,
            registry=None,
        )

    def step(self, seconds: float) -> None:
        self.step_seconds.observe(seconds)

    def queue_wait(self, seconds: float) -> None:
        self.queue_wait_seconds.observe(seconds)

    def first_token(self, seconds: float) -> None:
        self.first_token_seconds.observe(seconds)

    def token_gap(self, seconds: float) -> None:
        self.token_gap_seconds.observe(seconds)

    def finished(self, seconds: float) -> None:
        self.request_seconds.observe(seconds)

    def mask(self, seconds: float) -> None:
        self.mask_seconds.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        for histogram in (
            self.first_token_seconds,
            self.token_gap_seconds,
            self.request_seconds,
            self.queue_wait_seconds,
            self.step_seconds,
            self.mask_seconds,
        ):
            yield from without_created(histogram.collect())


def without_created(metrics: Iterable[Metric]) -> Iterator[Metric]:
    """Without the `_created` samples, which few scrapers understand."""
    for metric in metrics:
        metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
        yield metric
