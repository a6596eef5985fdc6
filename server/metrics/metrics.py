"""Renders `/metrics` in Prometheus' text format, from tables of the models' metrics.

A scrape never waits for the end of a step.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.values.pressure import Reading
from engine.values.stats import Histogram
from server.batches.runner import BatchRunner
from server.fairness import Budget
from server.images.preparation import Images
from server.models.model import Model
from server.pressure.guard import MemoryGuard
from server.pressure.policy import NAMES

HTTP_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"  # the label's value for routes and methods that do not exist

Source = TypeVar("Source")
Number: TypeAlias = int | float
Series: TypeAlias = Iterable[tuple[str | Number, ...]]
"""Of a family with labels: for each series the labels' values, followed by its number."""

SAMPLE_SUFFIXES = {"counter": "_total", "gauge": "", "info": "_info"}


@dataclass(frozen=True, slots=True)
class Row(Generic[Source]):
    """A metric family of Prometheus' type `kind`.

    Labels other than the model's follow the name: `rootstock_kv_blocks{state}`. `read` gives a
    number, a histogram, or with such labels any number of series.
    """

    name: str
    documentation: str
    read: Callable[[Source], Number | Histogram | Series]
    kind: ClassVar[str] = ""

    def family(self, sources: Iterable[tuple[dict[str, str], Source]]) -> Metric:
        """The family with the samples of all sources, each with its model's label."""
        name, _, own_labels = self.name.rstrip("}").partition("{")
        family = Metric(name, self.documentation, self.kind)
        for labels, source in sources:
            figures = self.read(source)
            if isinstance(figures, Histogram):
                _add_histogram(family, labels, figures)
                continue
            for *values, number in [(figures,)] if isinstance(figures, Number) else figures:
                own = zip(filter(None, own_labels.split(",")), map(str, values), strict=True)
                family.add_sample(
                    name + SAMPLE_SUFFIXES[self.kind], labels | dict(own), float(number)
                )
        return family


@dataclass(frozen=True, slots=True)
class Table(Generic[Source]):
    """Families that read the same source of each model. Models without it have no samples."""

    rows: Sequence[Row[Source]]
    source: Callable[[Model], Source | None]
    label: str = "model"  # of the model's name

    def families(self, models: Iterable[Model]) -> Iterator[Metric]:
        """One family for each row, or none if no model has the source."""
        sources = [({self.label: model.name}, self.source(model)) for model in models]
        found = [(labels, source) for labels, source in sources if source is not None]
        if found:
            yield from (row.family(found) for row in self.rows)


class Counter(Row[Source]):
    kind = "counter"


class Gauge(Row[Source]):
    kind = "gauge"


class Distribution(Row[Source]):
    kind = "histogram"


class Info(Row[Source]):
    kind = "info"


def _add_histogram(family: Metric, labels: dict[str, str], histogram: Histogram) -> None:
    """Add a histogram's samples. Prometheus' buckets are cumulative."""
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    for bound, count in zip(bounds, accumulate(histogram.counts), strict=True):
        family.add_sample(f"{family.name}_bucket", labels | {"le": bound}, count)
    family.add_sample(f"{family.name}_count", labels, histogram.count)
    family.add_sample(f"{family.name}_sum", labels, histogram.total)


class HttpAnswers:
    """Counts HTTP requests when they end, by route, method and status. A client cannot make the
    number of series grow. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, int], int] = {}

    def count(self, route: str | None, method: str, status: int) -> None:
        """`route` is the template that the path matched, None if there was none."""
        series = (route or OTHER, method if method in HTTP_METHODS else OTHER, status)
        self.counts[series] = self.counts.get(series, 0) + 1


@dataclass(frozen=True, slots=True)
class HttpCounts:
    """Counts of HTTP requests for all models together."""

    answers: HttpAnswers
    output: Budget  # of what waits to be sent
    refusals: Mapping[tuple[str, str], int]  # by reason and API key
    images: Images
    batches: BatchRunner | None


HTTP: tuple[Row[HttpCounts], ...] = (
    Counter(
        "rootstock_http_requests{route,method,status}",
        "Completed HTTP requests; status 499 if the client left before the answer began.",
        lambda h: [(*series, n) for series, n in h.answers.counts.items()],
    ),
    Counter(
        "rootstock_access_refused{reason,key}",
        "HTTP requests refused for their key, its limits, their Host or Origin, by reason and key.",
        lambda h: [(*series, n) for series, n in h.refusals.items()],
    ),
    Counter(
        "rootstock_answers_cut_off",
        "Answers ended because too much of them was unread by the client.",
        lambda h: h.output.n_evicted,
    ),
    Counter(
        "rootstock_images{outcome}",
        "Images of requests: shown to a model, refused as none, or failed (busy, or no room).",
        lambda h: h.images.outcomes.items(),
    ),
    Counter(
        "rootstock_image_fetches{outcome}",
        "Images named by a URL: fetched, refused for it, or failed.",
        lambda h: h.images.fetcher.outcomes.items(),
    ),
    Gauge(
        "rootstock_image_store_bytes",
        "Bytes of images on disk, as they were sent and as models read them.",
        lambda h: h.images.store.total_bytes,
    ),
    Counter(
        "rootstock_image_store_evictions",
        "Files of images that were removed for others.",
        lambda h: h.images.store.n_evicted,
    ),
)
"""The families of the daemon, which have no label of a model."""


BATCHES: tuple[Row[BatchRunner], ...] = (
    Counter(
        "rootstock_batch_lines{result}",
        "Lines of batches that have a result: completed, failed, expired or cancelled.",
        lambda b: b.counts.items(),
    ),
    Gauge(
        "rootstock_batches{state}",
        "Batches that are kept: live ones, and those that have ended.",
        lambda b: b.store.by_state().items(),
    ),
    Gauge(
        "rootstock_batch_files_bytes",
        "Bytes of the files of clients, results of batches included.",
        lambda b: b.store.n_bytes,
    ),
)
"""The families of a daemon that keeps batches."""

GUARD: tuple[Row[MemoryGuard], ...] = (
    Gauge(
        "rootstock_memory_share{source}",
        "How much of the machine's memory is in use, or of the time tasks wait for it; 1 is all.",
        lambda g: [(each.source, each.share) for each in _worst(g.readings)],
    ),
    Gauge(
        "rootstock_memory_guard_step",
        "What is done for lack of memory: 0 nothing, 1 buffers, 2 prefixes, 3 admission, 4 models, "
        "5 requests.",
        lambda g: int(g.state.step),
    ),
    Counter(
        "rootstock_memory_guard_actions{step}",
        "How often buffers were given back and prefixes evicted, admission was stopped, and models "
        "and requests were ended, for lack of memory.",
        lambda g: [(NAMES[step], n) for step, n in g.actions.items()],
    ),
    Counter(
        "rootstock_memory_guard_evicted_blocks",
        "Blocks of prefixes evicted for lack of memory.",
        lambda g: g.blocks_evicted,
    ),
)
"""The families of a daemon that watches the machine's memory."""


def _worst(readings: Iterable[Reading]) -> Iterable[Reading]:
    """The highest reading of each source: of buffers each model has one."""
    by_source = {each.source: each for each in sorted(readings, key=lambda one: one.share)}
    return by_source.values()


class Metrics:
    """Everything that `/metrics` shows."""

    def __init__(
        self, counts: HttpCounts, tables: Sequence[Table[Any]], guard: MemoryGuard | None = None
    ) -> None:
        """`tables` are those of the models."""
        self._counts = counts
        self._tables = tables
        self._guard = guard

    def render(self, models: Collection[Model]) -> bytes:
        """Everything in the text format, with each model's statistics as last read."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(self._families(models)))
        return generate_latest(registry)

    def _families(self, models: Collection[Model]) -> Iterator[Metric]:
        yield from (row.family([({}, self._counts)]) for row in HTTP)
        if self._counts.batches is not None:
            yield from (row.family([({}, self._counts.batches)]) for row in BATCHES)
        if self._guard is not None:
            yield from (row.family([({}, self._guard)]) for row in GUARD)
        for table in self._tables:
            yield from table.families(models)


class _Collected(Collector):
    """Gives a registry metrics that have been collected already."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics
