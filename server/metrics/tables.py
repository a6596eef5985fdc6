"""The metric families that each model has: one row per family, in the order of `/metrics`."""

from collections.abc import Mapping
from typing import Any

from engine.values.model import ModelCard, Place, facts_of
from engine.values.output import FinishReason
from engine.values.stats import (
    DISK_FAULTS,
    DecodeStats,
    DiskCacheStats,
    EngineStats,
    Latencies,
    Latency,
)
from server.activity import FinishedSequences
from server.admin_schema import State
from server.metrics.metrics import Counter, Distribution, Gauge, Info, Row, Table
from server.metrics.optional import DRAFT_MODEL, IMAGES, KV_EVENTS, RANKS
from server.models.model import Model
from server.models.policy import need_of

VLLM_FINISH_REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)


LATENCIES = {
    Latency.FIRST_TOKEN: "From a request's arrival to its first token.",
    Latency.TOKEN_GAP: "Between two consecutive tokens of a sequence.",
    Latency.REQUEST: "From a request's arrival to its end.",
    Latency.QUEUE_WAIT: "From a request's arrival to its admission.",
    Latency.STEP: "One step of the engine's loop.",
    Latency.MASK: "From a token of an answer with a grammar until the mask of the next is known.",
}


def _latency(name: str, latency: Latency) -> Row[Latencies]:
    return Distribution(name, LATENCIES[latency], lambda latencies: latencies[latency])


def _memory_bytes(model: Model) -> int:
    need = need_of(model.state)
    return 0 if need is None else need.bytes


_LABELS = tuple(facts_of(ModelCard, Place.METRIC))


MODEL: tuple[Row[Model], ...] = (
    Gauge(
        "rootstock_model_state{state}",
        "1 for the model's state: unloaded, loading, ready, draining or failed.",
        lambda m: [(state, m.public_state is state) for state in State],
    ),
    Gauge(
        "rootstock_model_memory_bytes",
        "Memory that a loaded model takes of memory_budget; 0 without a budget.",
        _memory_bytes,
    ),
    Gauge(
        "rootstock_up",
        "1 while the engine's loop runs.",
        lambda m: m.loaded is not None and m.loaded.engine.is_alive(),
    ),
)

LATENCY: tuple[Row[Latencies], ...] = (
    _latency("rootstock_time_to_first_token_seconds", Latency.FIRST_TOKEN),
    _latency("rootstock_time_between_tokens_seconds", Latency.TOKEN_GAP),
    _latency("rootstock_request_seconds", Latency.REQUEST),
    _latency("rootstock_queue_wait_seconds", Latency.QUEUE_WAIT),
    _latency("rootstock_step_seconds", Latency.STEP),
    _latency("rootstock_mask_seconds", Latency.MASK),
)

INFO: tuple[Row[tuple[str, ModelCard]], ...] = (
    Info(
        f"rootstock_model{{{','.join(('model_name', *_LABELS))}}}",
        "1 for each loaded model.",
        lambda named: [(named[0], *(getattr(named[1], label) for label in _LABELS), 1)],
    ),
)

ENGINE: tuple[Row[EngineStats], ...] = (
    Counter(
        "rootstock_requests_received",
        "Requested sequences, refused ones included; a request with n: 4 is four.",
        lambda s: s.sequences.received,
    ),
    Counter(
        "rootstock_requests_refused{reason}",
        "Sequences that were refused: queue_full, invalid or stopped.",
        lambda s: s.sequences.refused.items(),
    ),
    Counter(
        "rootstock_requests_finished{reason}",
        "Sequences that ended: stop, length, repetition, abort (the client left) or error.",
        lambda s: s.sequences.finished.items(),
    ),
    Gauge("rootstock_requests_running", "Running sequences.", lambda s: s.running),
    Gauge("rootstock_requests_waiting", "Queued sequences.", lambda s: s.waiting),
    Counter(
        "rootstock_prompt_tokens{source}",
        "Prompt tokens, computed or found in the cache.",
        lambda s: [("computed", s.computed_prompt_tokens), ("cached", s.cache.hit_tokens)],
    ),
    Counter("rootstock_generated_tokens", "Tokens sampled.", lambda s: s.generated_tokens),
    Counter(
        "rootstock_warmed_tokens",
        "Prompt tokens computed in the background, before a client asks; included in computed.",
        lambda s: s.cache.warmed_tokens,
    ),
    Counter(
        "rootstock_preemptions",
        "Sequences sent back to the queue for lack of blocks.",
        lambda s: s.preemptions,
    ),
    Counter(
        "rootstock_fairness_preemptions",
        "Sequences sent back to the queue so that another client's could be admitted.",
        lambda s: s.client_preemptions,
    ),
    Counter(
        "rootstock_recomputed_sequences",
        "Sequences sent back to the queue, and computed again, because an attention or a compiled "
        "step failed on the device.",
        lambda s: s.recomputed_sequences,
    ),
    Counter(
        "rootstock_grammar_stalls",
        "Rows that were not sampled in a step because the mask of their grammar was late.",
        lambda s: s.late_rows,
    ),
    Counter("rootstock_steps", "Steps of the engine's loop.", lambda s: s.steps),
    Counter(
        "rootstock_kv_contradictions",
        "Counts of the KV store that a recount, while the engine was idle, found to be wrong.",
        lambda s: s.contradictions,
    ),
    Counter(
        "rootstock_drafts{source}",
        "Verified drafts, each of one row in a step.",
        lambda s: [(source, counts.drafts) for source, counts in s.drafts.items()],
    ),
    Counter(
        "rootstock_draft_tokens{source}",
        "Tokens of verified drafts.",
        lambda s: [(source, counts.drafted_tokens) for source, counts in s.drafts.items()],
    ),
    Counter(
        "rootstock_draft_accepted_tokens{source}",
        "Draft tokens that were accepted: each saves its sequence a step.",
        lambda s: [(source, counts.accepted_tokens) for source, counts in s.drafts.items()],
    ),
    Gauge(
        "rootstock_kv_blocks{state}",
        "Blocks by state: free, cached (only the tree holds them), held (by sequences).",
        lambda s: [
            ("free", s.cache.blocks_free),
            ("cached", s.cache.blocks_cached),
            ("held", s.cache.blocks_held),
        ],
    ),
    Gauge(
        "rootstock_kv_pinned_blocks",
        "Held blocks that are pinned: kept from eviction until a clear.",
        lambda s: s.cache.blocks_pinned,
    ),
    Gauge(
        "rootstock_kv_shared_blocks",
        "Blocks that two or more sequences share.",
        lambda s: s.cache.blocks_shared,
    ),
    Gauge(
        "rootstock_kv_saved_blocks",
        "Additional blocks that would be needed if no sequences shared any.",
        lambda s: s.cache.blocks_saved,
    ),
    Gauge(
        "rootstock_kv_saved_bytes",
        "Bytes of the blocks saved by sharing, and of what sliding windows share.",
        lambda s: s.cache.saved_bytes,
    ),
    Gauge("rootstock_kv_arena_bytes", "Size of the arena.", lambda s: s.cache.arena_bytes),
    Gauge("rootstock_kv_tree_nodes", "Nodes of the prefix tree.", lambda s: s.cache.nodes),
    Counter(
        "rootstock_prefix_queried_tokens",
        "Prompt tokens looked up, counted once per admission.",
        lambda s: s.cache.queried_tokens,
    ),
    Counter(
        "rootstock_prefix_hit_tokens",
        "Prompt tokens found, counted once per admission.",
        lambda s: s.cache.hit_tokens,
    ),
    Gauge(
        "rootstock_prefix_hit_ratio{window}",
        "Share of the prompt tokens looked up in the last 1, 5 and 15 minutes that was found.",
        lambda s: [
            (f"{hits.seconds // 60}m", hits.share)
            for hits in s.cache.recent_hits
            if hits.share is not None
        ],
    ),
    Counter(
        "rootstock_kv_evicted_blocks",
        "Blocks evicted from the tree.",
        lambda s: s.cache.evictions,
    ),
    Counter(
        "rootstock_prefix_tail_hit_tokens",
        "Prompt tokens found beyond whole blocks, at every admission.",
        lambda s: s.cache.tail_hit_tokens,
    ),
    Counter(
        "rootstock_kv_copied_blocks{cause}",
        "Blocks copied before a write: prefix, a partly shared block; fork, outputs of one prompt.",
        lambda s: [("prefix", s.cache.prefix_copies), ("fork", s.cache.fork_copies)],
    ),
    Gauge(
        "rootstock_group_slots{group,state}",
        "Slots of sliding windows (blocks) and recurrent layers (states), by state.",
        lambda s: [
            (group.name, state, getattr(group, state))
            for group in s.cache.groups
            for state in ("free", "cached", "held")
        ],
    ),
    Counter(
        "rootstock_group_evicted_slots{group}",
        "Cached slots that were evicted.",
        lambda s: [(group.name, group.evictions) for group in s.cache.groups],
    ),
    Counter(
        "rootstock_group_unresumable_tokens{group}",
        "Prompt tokens found in the tree but computed again, because the group had no slot.",
        lambda s: [(group.name, group.unresumable_tokens) for group in s.cache.groups],
    ),
    Gauge(
        "rootstock_mlx_memory_bytes{kind}",
        "Memory of MLX's allocator: active (in use), cached, and the peak of active.",
        lambda s: [
            ("active", s.memory.active),
            ("cached", s.memory.cached),
            ("peak", s.memory.peak),
        ],
    ),
    Gauge(
        "rootstock_state_bytes",
        "Bytes of the recurrent states that are kept, running and saved.",
        lambda s: s.memory.states,
    ),
    Gauge(
        "rootstock_kept_arrays",
        "Arrays that are kept between steps, each in a buffer, of which Metal allows a number.",
        lambda s: s.memory.arrays,
    ),
    Gauge(
        "rootstock_resident_memory_bytes",
        "Memory of the engine's process: its resident set, on macOS its footprint.",
        lambda s: s.memory.model.process_bytes,
    ),
    Gauge(
        "rootstock_planned_memory_bytes{part}",
        "Bytes planned at load: weights, kv, states, workspace for the largest step, and events: "
        "what publishing KV events keeps.",
        lambda s: [
            ("weights", s.memory.model.weights_bytes),
            ("kv", s.memory.model.kv_bytes),
            ("states", s.memory.model.states_bytes),
            ("workspace", s.memory.model.workspace_bytes),
            ("events", s.memory.model.events_bytes),
        ],
    ),
)

DECODE: tuple[Row[DecodeStats], ...] = (
    Counter(
        "rootstock_computed_steps{path}",
        "Steps that the model computed: compiled, a replayed decode; eager, any other.",
        lambda d: [("compiled", d.compiled_steps), ("eager", d.steps - d.compiled_steps)],
    ),
    Counter(
        "rootstock_attention_fallbacks",
        "Forwards and steps computed again with gather, which serves since, because another "
        "attention failed.",
        lambda d: d.attention_fallbacks,
    ),
)

DISK: tuple[Row[DiskCacheStats], ...] = (
    Gauge(
        "rootstock_disk_entries",
        "Entries of the disk cache: blocks, and ends of prompts within a block.",
        lambda d: d.entries,
    ),
    Gauge(
        "rootstock_disk_used_bytes",
        "Size of the model's files in the disk cache.",
        lambda d: d.used_bytes,
    ),
    Gauge(
        "rootstock_disk_shared_bytes",
        "Size of the files of all models in the disk cache.",
        lambda d: d.shared_bytes,
    ),
    Gauge(
        "rootstock_disk_limit_bytes",
        "Limit of the files of all models.",
        lambda d: d.limit_bytes,
    ),
    Gauge(
        "rootstock_disk_buffered_bytes",
        "Bytes queued for the disk cache.",
        lambda d: d.buffered_bytes,
    ),
    Counter("rootstock_disk_read_bytes", "Bytes read from the disk cache.", lambda d: d.read_bytes),
    Counter(
        "rootstock_disk_written_bytes",
        "Bytes written to the disk cache.",
        lambda d: d.written_bytes,
    ),
    Counter(
        "rootstock_disk_hits",
        "Loads from the disk cache that found at least part of a prefix.",
        lambda d: d.hits,
    ),
    Counter(
        "rootstock_disk_loaded_tokens",
        "Prompt tokens loaded from the disk cache.",
        lambda d: d.loaded_tokens,
    ),
    Counter(
        "rootstock_disk_load_seconds",
        "Time from the decision to load a prefix to its last block, summed.",
        lambda d: d.load_seconds,
    ),
    Counter(
        "rootstock_disk_given_up_loads",
        "Loads given up because the disk delivered nothing for seconds.",
        lambda d: d.given_up_loads,
    ),
    Counter(
        "rootstock_disk_evicted_entries",
        "Entries evicted from the disk cache.",
        lambda d: d.evicted_entries,
    ),
    Counter(
        "rootstock_disk_refused_entries",
        "Entries not written for lack of space or of daily budget.",
        lambda d: d.refused_entries,
    ),
    Gauge(
        "rootstock_disk_day_spent",
        "1 while nothing is written because the daily budget is spent.",
        lambda d: d.is_day_spent,
    ),
    Counter(
        "rootstock_disk_failures{fault}",
        "Failed reads and writes of the disk cache, by fault; internal is a bug.",
        # All faults from the start: Prometheus' rates need a value to rise from.
        lambda d: [(fault, d.failures.get(fault, 0)) for fault in DISK_FAULTS],
    ),
)


def _held_share(stats: EngineStats) -> float:
    cache = stats.cache
    return cache.blocks_held / cache.blocks_total if cache.blocks_total else 0.0


VLLM_LATENCY: tuple[Row[Latencies], ...] = (
    _latency("vllm:time_to_first_token_seconds", Latency.FIRST_TOKEN),
    _latency("vllm:inter_token_latency_seconds", Latency.TOKEN_GAP),
    _latency("vllm:e2e_request_latency_seconds", Latency.REQUEST),
    _latency("vllm:request_queue_time_seconds", Latency.QUEUE_WAIT),
)

VLLM_SEQUENCES: tuple[Row[FinishedSequences], ...] = (
    Distribution(
        "vllm:request_prompt_tokens", "Prompt tokens of a sequence.", lambda s: s.prompt_tokens
    ),
    Distribution(
        "vllm:request_generation_tokens",
        "Output tokens of a sequence.",
        lambda s: s.output_tokens,
    ),
    Distribution(
        "vllm:request_max_num_generation_tokens",
        "Output tokens of the longest of a request's n sequences.",
        lambda s: s.longest_output_tokens,
    ),
    Distribution(
        "vllm:request_prefill_time_seconds",
        "From a sequence's admission to its first token.",
        lambda s: s.prefill_seconds,
    ),
    Distribution(
        "vllm:request_decode_time_seconds",
        "From a sequence's first token to its last.",
        lambda s: s.decode_seconds,
    ),
    Distribution(
        "vllm:request_time_per_output_token_seconds",
        "Mean time between the tokens of a sequence.",
        lambda s: s.seconds_per_token,
    ),
)
"""Of sequences that ended with a stop or with their length."""

VLLM: tuple[Row[EngineStats], ...] = (
    Gauge("vllm:num_requests_running", "Running sequences.", lambda s: s.running),
    Gauge("vllm:num_requests_waiting", "Queued sequences.", lambda s: s.waiting),
    Gauge("vllm:kv_cache_usage_perc", "Share of blocks held by sequences; 1 is all.", _held_share),
    Counter(
        "vllm:prefix_cache_queries", "Prompt tokens looked up.", lambda s: s.cache.queried_tokens
    ),
    Counter("vllm:prefix_cache_hits", "Prompt tokens found.", lambda s: s.cache.hit_tokens),
    Counter(
        "vllm:prompt_tokens",
        "Prompt tokens processed.",
        lambda s: s.computed_prompt_tokens + s.cache.hit_tokens,
    ),
    Counter("vllm:generation_tokens", "Tokens sampled.", lambda s: s.generated_tokens),
    Counter(
        "vllm:num_preemptions",
        "Sequences sent back to the queue.",
        lambda s: s.preemptions + s.client_preemptions + s.recomputed_sequences,
    ),
    Counter(
        "vllm:spec_decode_num_drafts",
        "Drafts verified.",
        lambda s: sum(each.drafts for each in s.drafts.values()),
    ),
    Counter(
        "vllm:spec_decode_num_draft_tokens",
        "Tokens drafted.",
        lambda s: sum(each.drafted_tokens for each in s.drafts.values()),
    ),
    Counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Drafted tokens accepted.",
        lambda s: sum(each.accepted_tokens for each in s.drafts.values()),
    ),
    Counter(
        "vllm:request_success{finished_reason}",
        "Sequences that ended.",
        lambda s: [(reason, s.sequences.finished[reason]) for reason in VLLM_FINISH_REASONS],
    ),
)
"""vLLM's names and types, over the same figures:
https://docs.vllm.ai/en/latest/usage/metrics.html. Prometheus advises against colons in names
(`promtool check metrics` warns), but vLLM's names have them.
"""


TABLES: tuple[Table[Any], ...] = (
    Table(MODEL, lambda m: m),
    Table(LATENCY, lambda m: m.latencies),
    Table(INFO, lambda m: None if m.card is None else (m.name, m.card)),
    Table(ENGINE, lambda m: m.last_stats),
    Table(DECODE, lambda m: None if m.last_stats is None else m.last_stats.decode),
    Table(DISK, lambda m: None if m.last_stats is None else m.last_stats.cache.disk),
    Table(KV_EVENTS, lambda m: None if m.last_stats is None else m.last_stats.kv_events),
    Table(DRAFT_MODEL, lambda m: None if m.last_stats is None else m.last_stats.draft_model),
    Table(IMAGES, lambda m: None if m.last_stats is None else m.last_stats.images),
    Table(RANKS, lambda m: None if m.last_stats is None else m.last_stats.ranks),
)
"""The families under their own names. The counters of an engine that has ended are those last
read.
"""


def vllm_tables(sequences: Mapping[str, FinishedSequences]) -> tuple[Table[Any], ...]:
    """The families under vLLM's names, of models that have been loaded. `sequences` are by model
    name.
    """
    label = "model_name"
    return (
        Table(VLLM_LATENCY, lambda m: None if m.last_stats is None else m.latencies, label),
        Table(VLLM_SEQUENCES, lambda m: None if m.last_stats is None else sequences[m.name], label),
        Table(VLLM, lambda m: m.last_stats, label),
    )
