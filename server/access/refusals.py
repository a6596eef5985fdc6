"""Counts refused requests, by reason."""

from collections.abc import Iterable
from enum import StrEnum

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily


class Reason(StrEnum):
    HOST = "foreign_host"
    ORIGIN = "foreign_origin"
    NO_KEY = "invalid_key"
    ROLE = "role"
    CONCURRENCY = "concurrency"
    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"


class Refusals:
    """Counts by reason and by the key's name, which the operator chose: clients add no labels."""

    def __init__(self) -> None:
        # Those without a key are there from the start: a rate needs a value to rise from.
        self._counts = {(reason, ""): 0 for reason in (Reason.HOST, Reason.ORIGIN, Reason.NO_KEY)}

    def count(self, reason: Reason, key: str = "") -> None:
        """`key` is empty where none was found or asked for."""
        self._counts[reason, key] = self._counts.get((reason, key), 0) + 1

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "rootstock_access_refused",
            "HTTP requests that were not let in, by reason and by the name of their API key.",
            labels=["reason", "key"],
        )
        for (reason, key), count in self._counts.items():
            family.add_metric([reason.value, key], count)
        yield family
