"""Prometheus metrics: the statistics of the engines, and counts of HTTP responses.

A scrape never waits for the end of a step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.values.model import ModelCard
from engine.values.stats import CacheStats, DecodeStats, EngineStats, Latencies, SequenceCounts
from server.access.refusals import Refusals
from server.metrics.disk import disk_families
from server.metrics.drafts import draft_families
from server.metrics.histograms import histogram_families
from server.metrics.models import ModelFigures, joined, labelled, state_families
from server.transport.unsent import UnsentBudget

HTTP_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"  # the label's value for routes and methods that do not exist

Alias = Callable[[Latencies, EngineStats, str], Iterable[Metric]]
"""Other names for the same figures, from the model's latencies, its stats and its name."""


class HttpAnswers:
    """Counts HTTP requests once they are over. A client cannot make the labels grow."""

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
        """Without the `_created` samples, which few scrapers understand."""
        for metric in self._answers.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


class Metrics:
    """Everything `/metrics` shows."""

    def __init__(
        self,
        answers: HttpAnswers,
        unsent: UnsentBudget,
        refusals: Refusals,
        aliases: Sequence[Alias],
    ) -> None:
        self._answers = answers
        self._unsent = unsent
        self._refusals = refusals
        self._aliases = aliases

    def render(self, models: Sequence[ModelFigures]) -> bytes:
        """Everything in the text format. Counters of a dead engine stand as last read."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Fixed(self._families(models)))
        return generate_latest(registry)

    def _families(self, models: Sequence[ModelFigures]) -> Iterator[Metric]:
        yield from self._answers.collect()
        yield from self._refusals.collect()
        yield CounterMetricFamily(
            "rootstock_answers_cut_off",
            "Answers ended because too much of them waited to be sent.",
            self._unsent.n_ended,
        )
        yield from state_families(models)
        yield from labelled(
            (model.name, family) for model in models for family in _model_families(model)
        )
        for alias in self._aliases:
            yield from joined(family for model in models for family in _aliased(alias, model))


def _model_families(model: ModelFigures) -> Iterator[Metric]:
    yield GaugeMetricFamily("rootstock_up", "1 while the engine's loop turns.", float(model.is_up))
    yield from histogram_families(model.latencies)
    card, stats = model.card, model.stats
    if card is None or stats is None:
        return
    yield _model_info(card, model.name)
    yield from sequence_families(stats.sequences)
    yield from loop_families(stats)
    yield from draft_families(stats.drafts)
    yield from cache_families(stats.cache)
    yield from group_families(stats.cache)
    yield from memory_families(stats)
    if stats.decode is not None:
        yield decode_family(stats.decode)
    if stats.cache.disk is not None:
        yield from disk_families(stats.cache.disk)


def _aliased(alias: Alias, model: ModelFigures) -> Iterable[Metric]:
    if model.stats is None:
        return ()
    return alias(model.latencies, model.stats, model.name)


class _Fixed(Collector):
    """Gives a registry metrics that have been collected already."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def sequence_families(counts: SequenceCounts) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "rootstock_requests_received",
        "Sequences asked of the engine: those refused, finished and live.",
        counts.received,
    )
    refused = CounterMetricFamily(
        "rootstock_requests_refused", "Sequences not taken in, by reason.", labels=["reason"]
    )
    for refusal, count in counts.refused.items():
        refused.add_metric([refusal.value], count)
    yield refused
    finished = CounterMetricFamily(
        "rootstock_requests_finished", "Sequences that ended, by reason.", labels=["reason"]
    )
    for reason, count in counts.finished.items():
        finished.add_metric([reason.value], count)
    yield finished


def loop_families(stats: EngineStats) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "rootstock_requests_running", "Sequences that are computed.", stats.running
    )
    yield GaugeMetricFamily(
        "rootstock_requests_waiting", "Sequences that wait for admission.", stats.waiting
    )
    prompt = CounterMetricFamily(
        "rootstock_prompt_tokens",
        "Prompt tokens, computed or adopted from the cache.",
        labels=["source"],
    )
    prompt.add_metric(["computed"], stats.computed_prompt_tokens)
    prompt.add_metric(["cached"], stats.cache.hit_tokens)
    yield prompt
    yield CounterMetricFamily(
        "rootstock_generated_tokens", "Tokens sampled.", stats.generated_tokens
    )
    yield CounterMetricFamily(
        "rootstock_preemptions",
        "Sequences sent back to the queue for lack of blocks.",
        stats.preemptions,
    )
    yield CounterMetricFamily(
        "rootstock_gave_way",
        "Sequences sent back to the queue for another client's.",
        stats.client_preemptions,
    )
    yield CounterMetricFamily(
        "rootstock_rows_sat_out",
        "Rows that were not sampled in a step because nobody knew yet what their grammar allows.",
        stats.late_rows,
    )
    yield CounterMetricFamily("rootstock_steps", "Steps of the engine's loop.", stats.steps)
    yield CounterMetricFamily(
        "rootstock_kv_contradictions",
        "Counts of the KV store that a recount, while the engine was idle, found to be wrong.",
        stats.contradictions,
    )


def cache_families(cache: CacheStats) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "rootstock_kv_blocks",
        "Blocks by state: free, cached (only the tree holds them), held (by sequences).",
        labels=["state"],
    )
    blocks.add_metric(["free"], cache.blocks_free)
    blocks.add_metric(["cached"], cache.blocks_cached)
    blocks.add_metric(["held"], cache.blocks_held)
    yield blocks
    yield GaugeMetricFamily(
        "rootstock_kv_shared_blocks", "Blocks in two tables or more.", cache.blocks_shared
    )
    yield GaugeMetricFamily(
        "rootstock_kv_saved_blocks",
        "Blocks that there would be besides if each sequence had copies of its own.",
        cache.blocks_saved,
    )
    yield GaugeMetricFamily(
        "rootstock_kv_saved_bytes",
        "Bytes of these blocks, and of what sliding windows share.",
        cache.saved_bytes,
    )
    yield GaugeMetricFamily("rootstock_kv_arena_bytes", "Size of the arena.", cache.arena_bytes)
    yield GaugeMetricFamily("rootstock_kv_tree_nodes", "Nodes of the prefix tree.", cache.nodes)
    yield CounterMetricFamily(
        "rootstock_prefix_queried_tokens",
        "Prompt tokens looked up, counted once per admission.",
        cache.queried_tokens,
    )
    yield CounterMetricFamily(
        "rootstock_prefix_hit_tokens",
        "Prompt tokens found, counted once per admission.",
        cache.hit_tokens,
    )
    recent = GaugeMetricFamily(
        "rootstock_prefix_hit_ratio",
        "Of the prompt tokens looked up in the last minutes those found; none where none were.",
        labels=["window"],
    )
    for hits in cache.recent_hits:
        if hits.share is not None:
            recent.add_metric([f"{hits.seconds // 60}m"], hits.share)
    yield recent
    yield CounterMetricFamily(
        "rootstock_kv_evicted_blocks", "Blocks taken back from the tree.", cache.evictions
    )
    yield CounterMetricFamily(
        "rootstock_prefix_tail_hit_tokens",
        "Prompt tokens found beyond whole blocks, at every admission.",
        cache.tail_hit_tokens,
    )
    copied = CounterMetricFamily(
        "rootstock_kv_copied_blocks",
        "Blocks copied before a write: adopted in part from a prefix, or shared by forked outputs.",
        labels=["cause"],
    )
    copied.add_metric(["prefix"], cache.prefix_copies)
    copied.add_metric(["fork"], cache.fork_copies)
    yield copied


def group_families(cache: CacheStats) -> Iterator[Metric]:
    slots = GaugeMetricFamily(
        "rootstock_group_slots",
        "Slots of sliding windows (blocks) and recurrent layers (states), by state.",
        labels=["group", "state"],
    )
    evicted = CounterMetricFamily(
        "rootstock_group_evicted_slots",
        "Slots that were kept for later and went for want of room.",
        labels=["group"],
    )
    unresumable = CounterMetricFamily(
        "rootstock_group_unresumable_tokens",
        "Prompt tokens found in the tree, and computed for want of a slot of the group.",
        labels=["group"],
    )
    for group in cache.groups:
        slots.add_metric([group.name, "free"], group.free)
        slots.add_metric([group.name, "cached"], group.cached)
        slots.add_metric([group.name, "held"], group.held)
        evicted.add_metric([group.name], group.evictions)
        unresumable.add_metric([group.name], group.unresumable_tokens)
    yield from (slots, evicted, unresumable)


def decode_family(decode: DecodeStats) -> Metric:
    steps = CounterMetricFamily(
        "rootstock_computed_steps",
        "Steps that the model computed: compiled are steady decodes, replayed as one function.",
        labels=["path"],
    )
    steps.add_metric(["compiled"], decode.compiled_steps)
    steps.add_metric(["eager"], decode.steps - decode.compiled_steps)
    return steps


def memory_families(stats: EngineStats) -> Iterator[Metric]:
    memory = stats.memory
    allocated = GaugeMetricFamily(
        "rootstock_mlx_memory_bytes",
        "Of MLX's allocator: in use, kept for the next step, and the most there was in use.",
        labels=["kind"],
    )
    allocated.add_metric(["active"], memory.active)
    allocated.add_metric(["cached"], memory.cached)
    allocated.add_metric(["peak"], memory.peak)
    yield allocated
    yield GaugeMetricFamily(
        "rootstock_resident_memory_bytes",
        "Of the whole process, as the system counts.",
        memory.resident,
    )
    promised = GaugeMetricFamily(
        "rootstock_promised_memory_bytes",
        "What was reckoned with when the model was found to fit.",
        labels=["part"],
    )
    promised.add_metric(["weights"], memory.promise.weights)
    promised.add_metric(["storage"], memory.promise.storage)
    promised.add_metric(["workspace"], memory.promise.workspace)
    promised.add_metric(["cache"], memory.promise.cache)
    yield promised


def _model_info(card: ModelCard, name: str) -> Metric:
    return InfoMetricFamily(
        "rootstock_model",
        "A model that is loaded.",
        {
            "model_name": name,
            "fingerprint": card.fingerprint,
            "device": card.device,
            "dtype": card.dtype,
        },
    )
