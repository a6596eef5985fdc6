"""Metrics of speculative decoding."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from engine.values.stats import DraftCounts, DraftSource


def draft_families(counts: Mapping[DraftSource, DraftCounts]) -> Iterator[Metric]:
    drafts = _by_source("rootstock_drafts", "Drafts that were verified, each of one row in a step.")
    tokens = _by_source("rootstock_draft_tokens", "Tokens of these drafts.")
    accepted = _by_source(
        "rootstock_draft_accepted_tokens",
        "Of these tokens, those that came into an answer: each saves its sequence a step.",
    )
    for source, count in counts.items():
        drafts.add_metric([source.value], count.drafts)
        tokens.add_metric([source.value], count.drafted_tokens)
        accepted.add_metric([source.value], count.accepted_tokens)
    yield from (drafts, tokens, accepted)


def _by_source(name: str, documentation: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, documentation, labels=["source"])
