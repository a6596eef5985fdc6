"""Metrics of several models, each labelled with its model's name."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric

from engine.values.model import ModelCard
from engine.values.stats import EngineStats, Latencies
from server.pool.states import ModelState, State


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """What `/metrics` shows of one model, which may or may not be loaded."""

    name: str
    state: ModelState
    latencies: Latencies  # of all its engines together
    is_up: bool
    card: ModelCard | None  # None before the model is first loaded
    stats: EngineStats | None  # the last ones if it is not loaded any more


def labelled(families: Iterable[tuple[str, Metric]]) -> Iterator[Metric]:
    """Families of several models, given with the model's name. Families with the same name are
    joined, and the label `model` says to which model a sample belongs.
    """
    return joined(_labelled(family, model) for model, family in families)


def joined(families: Iterable[Metric]) -> Iterator[Metric]:
    """Join families with the same name into one family."""
    by_name: dict[str, Metric] = {}
    for family in families:
        whole = by_name.setdefault(
            family.name, Metric(family.name, family.documentation, family.type)
        )
        whole.samples += family.samples
    yield from by_name.values()


def _labelled(family: Metric, model: str) -> Metric:
    named = Metric(family.name, family.documentation, family.type)
    named.samples = [
        sample._replace(labels={"model": model, **sample.labels}) for sample in family.samples
    ]
    return named


def state_families(models: Iterable[ModelFigures]) -> Iterator[Metric]:
    states = GaugeMetricFamily(
        "rootstock_model_state", "1 for the state that a model is in.", labels=["model", "state"]
    )
    needs = GaugeMetricFamily(
        "rootstock_model_memory_bytes",
        "What a model takes of the budget while it is loaded.",
        labels=["model"],
    )
    for model in models:
        for state in State:
            states.add_metric([model.name, state.value], float(model.state.state is state))
        needs.add_metric([model.name], model.state.need_bytes)
    yield states
    yield needs
