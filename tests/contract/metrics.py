"""What /metrics says."""

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families


def metric_families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(text: str, name: str, **labels: str) -> float:
    """Of the only sample with that name and at least those labels."""
    (found,) = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return found
