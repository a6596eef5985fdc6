"""vLLM's metric names over Rootstock's figures, so that dashboards made for vLLM work.

Names and types: https://docs.vllm.ai/en/latest/usage/metrics.html. Prometheus advises against
colons in names (`promtool check metrics` warns), but vLLM's names have them.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.values.output import FinishReason
from engine.values.stats import EngineStats, Latencies, Latency, SequenceCounts
from server.metrics.histograms import ABOUT_LATENCIES, histogram

HISTOGRAMS = (
    (Latency.FIRST_TOKEN, "vllm:time_to_first_token_seconds"),
    (Latency.TOKEN_GAP, "vllm:inter_token_latency_seconds"),
    (Latency.REQUEST, "vllm:e2e_request_latency_seconds"),
    (Latency.QUEUE_WAIT, "vllm:request_queue_time_seconds"),
)
SUCCESSES = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)


def vllm_families(latencies: Latencies, stats: EngineStats, model: str) -> Iterator[Metric]:
    """The model's figures under vLLM's names and with its label. Implements `metrics.Alias`."""
    labels = {"model_name": model}
    for latency, name in HISTOGRAMS:
        yield histogram(name, ABOUT_LATENCIES[latency], latencies[latency], labels)
    yield from vllm_stats(stats, model)
    yield _successes(stats.sequences, model)


def vllm_stats(stats: EngineStats, model: str) -> Iterator[Metric]:
    cache = stats.cache
    held_share = cache.blocks_held / cache.blocks_total if cache.blocks_total else 0.0
    gauges = (
        ("num_requests_running", "Sequences that are computed.", stats.running),
        ("num_requests_waiting", "Sequences that wait for admission.", stats.waiting),
        ("kv_cache_usage_perc", "Share of blocks held by sequences; 1 is all.", held_share),
    )
    for name, documentation, value in gauges:
        gauge = GaugeMetricFamily(f"vllm:{name}", documentation, labels=["model_name"])
        gauge.add_metric([model], value)
        yield gauge
    prompt_tokens = stats.computed_prompt_tokens + cache.hit_tokens
    preemptions = stats.preemptions + stats.client_preemptions
    drafts = stats.drafts.values()
    counters = (
        ("prefix_cache_queries", "Prompt tokens looked up.", cache.queried_tokens),
        ("prefix_cache_hits", "Prompt tokens found.", cache.hit_tokens),
        ("prompt_tokens", "Prompt tokens processed.", prompt_tokens),
        ("generation_tokens", "Tokens sampled.", stats.generated_tokens),
        ("num_preemptions", "Sequences sent back to the queue.", preemptions),
        ("spec_decode_num_drafts", "Drafts verified.", sum(each.drafts for each in drafts)),
        (
            "spec_decode_num_draft_tokens",
            "Tokens drafted.",
            sum(each.drafted_tokens for each in drafts),
        ),
        (
            "spec_decode_num_accepted_tokens",
            "Drafted tokens accepted.",
            sum(each.accepted_tokens for each in drafts),
        ),
    )
    for name, documentation, value in counters:
        counter = CounterMetricFamily(f"vllm:{name}", documentation, labels=["model_name"])
        counter.add_metric([model], value)
        yield counter


def _successes(counts: SequenceCounts, model: str) -> Metric:
    labels = ["model_name", "finished_reason"]
    counter = CounterMetricFamily("vllm:request_success", "Sequences that ended.", labels=labels)
    for reason in SUCCESSES:
        counter.add_metric([model, reason.value], counts.finished[reason])
    return counter
