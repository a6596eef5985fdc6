"""Tables of metrics. Each row makes one Prometheus family of what it reads from its sources."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Generic, TypeAlias, TypeVar

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

from engine.values.stats import Histogram
from server.models.model import Model

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
