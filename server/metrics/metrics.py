"""Renders `/metrics` in Prometheus' text format, and counts HTTP responses for it.

A scrape never waits for the end of a step.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from server.budget import Budget
from server.metrics.rows import Table
from server.models.model import Model

HTTP_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"  # the label's value for routes and methods that do not exist


class HttpAnswers:
    """Counts HTTP requests when they end. A client cannot make the number of series grow."""

    def __init__(self) -> None:
        self._answers = Counter(
            "rootstock_http_requests",
            "HTTP requests that are over; status 499 where the client left before the answer.",
            ["route", "method", "status"],
            registry=None,
        )

    def count(self, route: str | None, method: str, status: int) -> None:
        """`route` is the template that the path matched, None if there was none."""
        known_method = method if method in HTTP_METHODS else OTHER
        self._answers.labels(route or OTHER, known_method, status).inc()

    def collect(self) -> Iterator[Metric]:
        """The counts without the `_created` samples, which few scrapers understand."""
        for metric in self._answers.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


class Metrics:
    """Everything that `/metrics` shows."""

    def __init__(
        self,
        answers: HttpAnswers,
        output: Budget,
        refusals: Mapping[tuple[str, str], int],
        tables: Sequence[Table[Any]],
    ) -> None:
        """`refusals` are counts by reason and API key, `tables` those of the models."""
        self._answers = answers
        self._output = output
        self._refusals = refusals
        self._tables = tables

    def render(self, models: Collection[Model]) -> bytes:
        """Everything in the text format, with each model's statistics as last read."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(self._families(models)))
        return generate_latest(registry)

    def _families(self, models: Collection[Model]) -> Iterator[Metric]:
        yield from self._answers.collect()
        yield self._refused()
        yield CounterMetricFamily(
            "rootstock_answers_cut_off",
            "Answers ended because too much of them waited to be sent.",
            self._output.n_evicted,
        )
        for table in self._tables:
            yield from table.families(models)

    def _refused(self) -> Metric:
        family = CounterMetricFamily(
            "rootstock_access_refused",
            "HTTP requests that were not let in, by reason and by the name of their API key.",
            labels=["reason", "key"],
        )
        for labels, count in self._refusals.items():
            family.add_metric(labels, count)
        return family


class _Collected(Collector):
    """Gives a registry metrics that have been collected already."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics
