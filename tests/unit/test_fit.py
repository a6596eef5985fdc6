"""What fits into memory, and what is said where it does not."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ByteSize, TypeAdapter

from engine.api import ModelError
from engine.kv_events.memory import REPLAY_BYTES, published_block_bytes
from engine.mlx_backend import assembly, host
from engine.mlx_backend.attentions import UNSTATED_TOKENS
from engine.mlx_backend.blas import Blas
from engine.mlx_backend.gpu.paged import PagedAttention, as_it_is
from engine.mlx_backend.host import FusedAttention, Machine
from engine.mlx_backend.kv.layout import KVCacheSpec, Layout
from engine.mlx_backend.kv.shape import LayerShape
from engine.mlx_backend.kv.states import StateBytes
from engine.mlx_backend.loading.memory import Footprint, MemoryPlan, activation_bytes, footprint
from engine.mlx_backend.loading.workspace import (
    GATHERED_BYTES,
    AttentionWorkspace,
    attention_workspace,
)
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.tuning.chosen import ChosenAttention
from engine.values.attention import GATHER, TimedCell
from engine.values.settings import EngineConfig
from engine.values.stats import ModelMemory, readable_bytes
from kvstore.sizes import StateCounts
from kvstore.window import lease_slots
from tests.checkpoints import FAMILIES, SHALLOW, write_family

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
CONFIG = EngineConfig(model="", max_running=4, decode="eager")
PLAIN = Footprint(block_bytes=MIB)
HYBRID = Footprint(block_bytes=MIB, state=StateBytes(1 << 26, 1 << 26))
CONTEXT = 1 << 20
LOGITS_BYTES = CONFIG.max_running * 50
VOCABULARY = 1 + (GIB - 256 * MIB - CONFIG.step_tokens * 64 * KIB) // LOGITS_BYTES
"""So large that computing takes 1 GiB, and less than another token's logits."""

NOTHING = AttentionWorkspace(
    rows=0, tokens=0, key_bytes=0, gathered_bytes=GIB, copies=0, pair_bytes=0
)
MACHINE = Machine("gpu (fake)", 24 * GIB, left_bytes=24 * GIB, most_bytes=24 * GIB, kv_share=0.5)
PLAN = MemoryPlan(CONFIG, MACHINE, 4 * GIB - LOGITS_BYTES, PLAIN, NOTHING, VOCABULARY, CONTEXT)
ROOM_BYTES = 19 * GIB
"""What the plan has for storage."""


def with_memory(plan: MemoryPlan, n_bytes: int) -> MemoryPlan:
    return replace(plan, machine=replace(MACHINE, left_bytes=n_bytes, most_bytes=n_bytes))


def configured(plan: MemoryPlan, **settings: int | bool) -> MemoryPlan:
    return replace(plan, config=replace(plan.config, **settings))  # type: ignore[arg-type]


def refusal(plan: MemoryPlan) -> str:
    with pytest.raises(ModelError) as refused:
        _ = plan.sizes
    return str(refused.value)


def most_of(plan: MemoryPlan, words: str) -> int:
    """The bytes that the plan's refusal says would fit, before these words."""
    found = re.search(rf"at most (\w+){words}", refusal(plan))
    assert found is not None
    return int(TypeAdapter(ByteSize).validate_python(found[1]))


def test_the_figures_and_what_would_fit_are_said() -> None:
    assert refusal(configured(PLAN, kv_cache_bytes=900 * GIB)) == (
        "kv_cache_bytes of 900.0 GiB does not fit: of 24.0 GiB of free memory the weights take "
        "4.0 GiB and computing takes 1.0 GiB, 1.0 GiB with a sequence of 1,048,576 tokens; at most "
        "19GiB would fit"
    )
    assert configured(PLAN, kv_cache_bytes=19 * GIB).sizes.n_blocks == 19 << 10


@given(left_bytes=st.integers(6 * GIB, 200 * GIB))
def test_what_is_said_to_fit_together_does(left_bytes: int) -> None:
    plan = with_memory(replace(PLAN, footprint=HYBRID), left_bytes)
    plan = configured(plan, kv_cache_bytes=900 * GIB, state_cache_bytes=0)
    largest = most_of(plan, " together")
    assert configured(plan, kv_cache_bytes=largest).sizes.n_blocks == largest // MIB


@given(left_bytes=st.integers(6 * GIB, 200 * GIB), prefix_cache=st.booleans())
def test_saved_states_fit_beside_the_largest_cache(left_bytes: int, prefix_cache: bool) -> None:
    plan = with_memory(replace(PLAN, footprint=HYBRID), left_bytes)
    plan = configured(plan, prefix_cache=prefix_cache, kv_cache_bytes=900 * GIB)
    largest = most_of(plan, "")
    room_bytes = left_bytes - MACHINE.most_bytes + ROOM_BYTES
    assert largest > (room_bytes - 5 * 4 * (1 << 26)) * 0.75
    assert configured(plan, kv_cache_bytes=largest).sizes.states is not None


def test_saved_states_can_be_too_many() -> None:
    many = configured(replace(PLAN, footprint=HYBRID), state_cache_bytes=900 * GIB)
    both = refusal(configured(many, kv_cache_bytes=GIB))
    assert "kv_cache_bytes of 1.0 GiB with state_cache_bytes of 900.0 GiB" in both
    alone = refusal(many)
    assert alone.startswith("state_cache_bytes of 900.0 GiB does not fit")
    assert alone.endswith("at most 18GiB would fit")


def test_settings_that_nothing_is_allocated_for_are_not_counted() -> None:
    recurrent = replace(PLAN, footprint=Footprint(block_bytes=0, state=StateBytes(MIB, MIB)))
    large = configured(recurrent, kv_cache_bytes=900 * GIB, state_cache_bytes=0)
    assert large.sizes.states is not None
    large = configured(PLAN, kv_cache_bytes=GIB, state_cache_bytes=900 * GIB)
    assert large.sizes.states is None


def test_a_model_larger_than_memory_is_refused() -> None:
    said = refusal(replace(PLAN, weight_bytes=61 * GIB))
    assert said.startswith("the model does not fit: it needs at least 62.0 GiB (weights 61.0 GiB, ")
    assert "computing 1.0 GiB), and 24.0 GiB of memory is free: serve a smaller model" in said


def test_a_draft_model_that_takes_part_is_named() -> None:
    with_draft = replace(PLAN.config, draft_model="small")
    large = replace(PLAN, weight_bytes=61 * GIB, config=with_draft)
    said = refusal(large)
    assert said.startswith("the model and its draft model do not fit: they need at least 62.0 GiB")
    assert ": serve a smaller model, leave out draft_model, or lower max_running" in said
    alone = replace(large, config=replace(with_draft, speculate="off"))
    assert "draft" not in refusal(alone)


def test_a_budget_that_is_too_small_is_named_with_what_the_model_needs() -> None:
    budget = with_memory(configured(PLAN, memory_bytes=10 * MIB), 10 * MIB)
    assert refusal(replace(budget, weight_bytes=6 * MIB)) == (
        "the model does not fit: it needs at least 1.0 GiB (weights 6 MiB, KV cache 4 MiB, "
        "computing 1.0 GiB), and memory_budget leaves it 10 MiB: raise memory_budget, or lower "
        "max_running or step_tokens"
    )


def test_where_not_even_the_least_fits_other_settings_are_named() -> None:
    tight = replace(PLAN, weight_bytes=23 * GIB - LOGITS_BYTES)
    said = refusal(configured(tight, kv_cache_bytes=GIB))
    assert "4 running sequences need 4 MiB of KV cache" in said
    assert "lower max_running" in said


def test_others_give_way_to_what_is_asked_for_but_not_to_the_default() -> None:
    machine = replace(MACHINE, left_bytes=9 * GIB, most_bytes=48 * GIB)
    metal = replace(PLAN, machine=machine)
    assert metal.stored.arenas == pytest.approx(2 * GIB, abs=MIB)
    assert configured(metal, kv_cache_bytes=32 * GIB).sizes.n_blocks == 32 << 10


def test_many_rows_of_a_large_vocabulary_need_more_to_work_with() -> None:
    assert activation_bytes(64, 64, 151_936) - activation_bytes(64, 64, 0) > 470 * 10**6


SMALL = replace(CONFIG, block_size=8, step_tokens=32)
WINDOW_LEASE_SLOTS = lease_slots(24, SMALL.block_size, SMALL.step_tokens)


def sharing(n_bytes: int, footprint: Footprint, others_bytes: int = 0) -> MemoryPlan:
    """A plan with a share of so many bytes for storage, and a context of 80 tokens. On Metal it may
    also have the bytes that others use, if it is told to take them.
    """
    left_bytes = n_bytes + 256 * MIB + activation_bytes(SMALL.step_tokens, 0, 0)
    if footprint.state is not None:
        left_bytes += SMALL.max_running * footprint.state.replaced
    machine = Machine("gpu (fake)", GIB, left_bytes, left_bytes + others_bytes, kv_share=1.0)
    return MemoryPlan(SMALL, machine, 0, footprint, NOTHING, 0, 80)


def test_the_default_budget_is_a_share_but_no_more_than_useful() -> None:
    plain = Footprint(block_bytes=100)
    assert sharing(1000, plain).sizes.n_blocks == 10
    assert sharing(99_999, plain).sizes.n_blocks == 4 * 10
    assert "a KV cache of 0 bytes is too small" in refusal(sharing(-5, plain, others_bytes=9999))


def test_states_have_a_budget_of_their_own() -> None:
    def sizes(plan: MemoryPlan) -> tuple[int, int, int]:
        assert plan.sizes.states is not None
        return plan.sizes.n_blocks, plan.sizes.states.running, plan.sizes.states.saved

    hybrid = Footprint(block_bytes=100, state=StateBytes(50, 50))
    assert sizes(sharing(1000, hybrid)) == (6, 4, 4)
    assert sizes(sharing(99_999, hybrid)) == (40, 4, 4 * 4)
    told = configured(sharing(9999, hybrid), kv_cache_bytes=3000, state_cache_bytes=123)
    assert sizes(told) == (30, 4, 2)
    assert sizes(configured(sharing(1000, hybrid), prefix_cache=False)) == (8, 4, 0)
    assert "take 200 bytes of recurrent state" in refusal(sharing(199, hybrid))


def test_states_saved_in_half_precision_are_twice_as_many() -> None:
    """A running state is charged for its snapshot, too, which is larger than a saved state."""
    rounded = Footprint(block_bytes=100, state=StateBytes(computed=50, saved=25))
    plan = configured(sharing(9999, rounded), kv_cache_bytes=3000, state_cache_bytes=123)
    assert plan.sizes.states == StateCounts(running=4, saved=4, rounded_every=512)
    assert plan.stored.states == 4 * (50 + 25) + 4 * 25


def test_a_budget_without_a_block_for_each_sequence_is_refused() -> None:
    plan = sharing(9999, Footprint(block_bytes=100))
    assert configured(plan, kv_cache_bytes=400).sizes.n_blocks == 4
    assert "at least 400" in refusal(configured(plan, kv_cache_bytes=399))


def test_windows_get_twice_what_running_sequences_need_and_at_most_half() -> None:
    plan = sharing(200_000, Footprint(block_bytes=100, windows=((24, 10),)))
    lease_bytes = WINDOW_LEASE_SLOTS * 10
    rich = configured(plan, kv_cache_bytes=100_000).sizes
    assert rich.windows[0].n_slots == 2 * 4 * WINDOW_LEASE_SLOTS
    assert rich.n_blocks == (100_000 - 8 * lease_bytes) // 100
    poor = configured(plan, kv_cache_bytes=400 + lease_bytes).sizes
    assert poor.windows[0].n_slots == WINDOW_LEASE_SLOTS
    assert poor.n_blocks == SMALL.max_running
    assert f"at least {400 + lease_bytes}" in refusal(
        configured(plan, kv_cache_bytes=399 + lease_bytes)
    )


def test_where_there_are_windows_alone_they_get_all() -> None:
    plan = sharing(200_000, Footprint(block_bytes=0, windows=((24, 10),)))
    lease_bytes = WINDOW_LEASE_SLOTS * 10
    three = configured(plan, kv_cache_bytes=3 * lease_bytes).sizes
    assert three.windows[0].n_slots == 3 * WINDOW_LEASE_SLOTS
    rich = configured(plan, kv_cache_bytes=100_000, prefix_cache=False).sizes
    assert rich.windows[0].n_slots == 4 * WINDOW_LEASE_SLOTS


def test_where_no_layer_keeps_every_token_blocks_are_only_counted() -> None:
    plan = sharing(9999, Footprint(block_bytes=0, state=StateBytes(50, 50)))
    sizes = configured(plan, kv_cache_bytes=0, state_cache_bytes=130).sizes
    assert sizes.n_blocks == 2 * 4 * 10
    assert sizes.states is not None
    assert (sizes.states.running, sizes.states.saved) == (4, 2)
    assert replace(plan, context_tokens=1 << 24).sizes.n_blocks == (1 << 24) // 8


HUNGRY = AttentionWorkspace(
    rows=4, tokens=512, key_bytes=4096, gathered_bytes=GIB, copies=2, pair_bytes=32 * 4 + 1
)


@given(left_bytes=st.integers(6 * GIB, 200 * GIB), share=st.floats(0.1, 1))
def test_the_longest_sequence_of_the_default_has_room_to_attend(
    left_bytes: int, share: float
) -> None:
    plan = with_memory(replace(PLAN, workspace=HUNGRY), left_bytes)
    plan = replace(plan, machine=replace(plan.machine, kv_share=share))
    assert plan.memory.total_bytes <= left_bytes
    assert plan.memory.workspace_bytes >= HUNGRY.bytes(min(CONTEXT, plan.arena_tokens))


@given(left_bytes=st.integers(6 * GIB, 200 * GIB))
def test_what_is_said_to_fit_leaves_room_to_attend(left_bytes: int) -> None:
    plan = with_memory(replace(PLAN, workspace=HUNGRY), left_bytes)
    largest = most_of(configured(plan, kv_cache_bytes=900 * GIB), " would")
    assert configured(plan, kv_cache_bytes=largest).memory.total_bytes <= left_bytes
    refusal(configured(plan, kv_cache_bytes=largest * 5 // 4))


def test_a_rehearsal_that_takes_more_than_a_step_counts() -> None:
    eager = replace(PLAN, footprint=Footprint(block_bytes=64 * MIB))
    plan = replace(eager, config=replace(CONFIG, decode="auto"))
    assert plan.memory.workspace_bytes >= plan.rehearsal_bytes > 36 * 64 * MIB
    assert eager.memory.workspace_bytes < plan.memory.workspace_bytes
    assert plan.memory.total_bytes <= MACHINE.most_bytes
    largest = 17 * GIB
    assert configured(eager, kv_cache_bytes=largest).sizes.n_blocks == largest // (64 * MIB)
    assert "does not fit" in refusal(configured(plan, kv_cache_bytes=largest))


def test_the_check_at_load_needs_memory_beside_the_weights_alone() -> None:
    """It ends before storage is allocated."""
    assert replace(PLAN, check_bytes=20 * GIB).sizes == PLAN.sizes
    assert "at least 25.0 GiB" in refusal(replace(PLAN, check_bytes=21 * GIB))


SMALL_BLOCKS = Footprint(block_bytes=4 * KIB)
"""So small that what is kept of a published block counts."""


def publishing(plan: MemoryPlan) -> MemoryPlan:
    config = replace(plan.config, kv_events="5557", kv_events_replay="5558")
    return replace(plan, config=config)


@given(left_bytes=st.integers(6 * GIB, 200 * GIB), kv_bytes=st.none() | st.integers(GIB, 9 * GIB))
def test_what_kv_events_keep_is_planned(left_bytes: int, kv_bytes: int | None) -> None:
    silent = with_memory(replace(PLAN, footprint=SMALL_BLOCKS), left_bytes)
    plan = publishing(silent)
    plan = replace(plan, config=replace(plan.config, kv_cache_bytes=kv_bytes))
    try:
        memory = plan.memory
    except ModelError:
        return
    kept = memory.events_bytes - REPLAY_BYTES
    assert kept == plan.sizes.n_blocks * published_block_bytes(CONFIG.block_size)
    assert memory.total_bytes <= left_bytes
    assert f"KV events {readable_bytes(memory.events_bytes)}" in memory.words
    assert silent.memory.events_bytes == 0


def test_the_largest_cache_leaves_room_for_what_kv_events_keep() -> None:
    plan = publishing(replace(PLAN, footprint=SMALL_BLOCKS))
    too_large = configured(plan, kv_cache_bytes=900 * GIB)
    assert "KV events 64 MiB and for each block 1088 bytes, and computing" in refusal(too_large)
    fits = configured(plan, kv_cache_bytes=most_of(too_large, " would"))
    assert fits.memory.total_bytes <= MACHINE.most_bytes
    assert fits.memory.kv_bytes < ROOM_BYTES - fits.memory.events_bytes
    no_replays = replace(fits, config=replace(fits.config, kv_events_replay=None))
    assert fits.memory.events_bytes - no_replays.memory.events_bytes == REPLAY_BYTES
    no_cache = configured(fits, prefix_cache=False)
    assert no_cache.memory.events_bytes == 0, "nothing is published"


def test_the_partial_results_of_attention_in_place_are_planned() -> None:
    """Where they are more than what is gathered: many drafts of long rows."""
    layers = (KVCacheSpec(LayerShape(8, 128, 128, mx.bfloat16, mx.bfloat16)),) * 36
    layout, config = Layout(layers, mx.bfloat16, 151_936), EngineConfig(model="")
    gather = Attention()
    paged = PagedAttention(gather, as_it_is)
    times = [TimedCell(1, 1, {"paged": 0.0})]
    chosen = ChosenAttention({GATHER: gather, "paged": paged}, {None: times}, config.block_size)

    def taken(attention: Attention, query_heads: int, longest: int) -> int:
        fused = FusedAttention.METAL
        space = attention_workspace(config, layout, 16 * GIB, query_heads, attention, fused)
        return space.bytes(longest)

    for query_heads, longest in ((32, 8192), (64, CONTEXT_8B)):
        n_tokens = 16 * config.max_running
        partials = n_tokens * query_heads * longest // (64 * config.block_size)
        least = partials * (128 + 2) * 4
        assert taken(paged, query_heads, longest) >= max(least, taken(gather, query_heads, longest))
        assert taken(chosen, query_heads, longest) == taken(paged, query_heads, longest)
    assert taken(paged, 64, CONTEXT_8B) > taken(gather, 64, CONTEXT_8B) + GIB // 4
    assert taken(paged, 32, 8192) == taken(gather, 32, 8192)


CONTEXT_8B = 131_072
HEADS_8B = 32


def workspace_of(
    fused: FusedAttention,
    kv_heads: int = 8,
    key_dim: int = 128,
    value_dim: int = 128,
    dtype: mx.Dtype = mx.bfloat16,
    windows: tuple[int | None, ...] = (None,),
    max_running: int = 32,
) -> AttentionWorkspace:
    """Of a model like Qwen3 8B, but for what is given."""
    shape = LayerShape(kv_heads, key_dim, value_dim, dtype, dtype)
    layout = Layout(tuple(KVCacheSpec(shape, window) for window in windows) * 36, dtype, 151_936)
    config = EngineConfig(model="", max_running=max_running)
    return attention_workspace(config, layout, 16 * GIB, HEADS_8B, Attention(), fused)


PAIRS = (512 + 16 * 32) * CONTEXT_8B
"""Of a step's tokens, padding included, and all keys of the longest sequence."""

SCORES_BYTES = PAIRS * HEADS_8B * 4


def test_an_8b_model_on_cuda_reserves_no_scores_of_its_whole_context() -> None:
    """With scores of all tokens of a step, keys and heads it would be 17 GB."""
    layout = Layout(
        (KVCacheSpec(LayerShape(8, 128, 128, mx.bfloat16, mx.bfloat16)),) * 36, mx.bfloat16, 1
    )
    h100 = Machine("gpu (H100)", 80 * GIB, 79 * GIB, 79 * GIB, 0.8, FusedAttention.CUDA)
    config = EngineConfig(model="")
    workspace = workspace_of(FusedAttention.CUDA)
    kept = footprint(layout, config.block_size)
    plan = MemoryPlan(config, h100, 16 * GIB, kept, workspace, 151_936, CONTEXT_8B)
    assert plan.arena_tokens > 2 * CONTEXT_8B
    assert plan.memory.workspace_bytes < 3 * GIB
    of_decodes = workspace.forward_keys(CONTEXT_8B) * HEADS_8B * 4
    assert workspace.bytes(CONTEXT_8B) == GATHERED_BYTES + PAIRS + of_decodes
    unfused = replace(plan, workspace=workspace_of(FusedAttention.NONE))
    assert unfused.memory.workspace_bytes - plan.memory.workspace_bytes > 15 * 10**9


@pytest.mark.parametrize(
    "shape",
    [
        {"key_dim": 256, "value_dim": 256},
        {"key_dim": 124, "value_dim": 124},
        {"key_dim": 128, "value_dim": 64},
        {"dtype": mx.float32},
    ],
)
def test_a_shape_that_cudnn_does_not_take_reserves_its_scores(shape: dict[str, object]) -> None:
    cuda, plain = (
        workspace_of(fused, **shape)  # type: ignore[arg-type]
        for fused in (FusedAttention.CUDA, FusedAttention.NONE)
    )
    assert cuda == plain
    assert plain.bytes(CONTEXT_8B) - plain.copies * GATHERED_BYTES >= SCORES_BYTES


def test_on_cuda_a_mask_that_is_an_array_counts_for_each_head() -> None:
    """Rows of full attention have none and are attended one by one, but for those of one token;
    windows have one.
    """
    alone = workspace_of(FusedAttention.CUDA, max_running=1)
    assert alone.bytes(CONTEXT_8B) < GATHERED_BYTES + CONTEXT_8B * (512 + 16) * 2
    window = workspace_of(FusedAttention.CUDA, windows=(None, 1024), max_running=1)
    keys = 32 * lease_slots(1024, 32, 512)
    assert window.bytes(CONTEXT_8B) - alone.bytes(CONTEXT_8B) == (512 + 16) * keys * HEADS_8B * 4
    several = workspace_of(FusedAttention.CUDA)
    assert several.bytes(CONTEXT_8B) < GATHERED_BYTES + (512 + 16 * 32) * CONTEXT_8B * 2


@pytest.mark.parametrize("dim", [64, 72, 80, 96, 128, 192, 256])
def test_metal_keeps_scores_of_the_heads_without_a_kernel(dim: int) -> None:
    shape = {"key_dim": dim, "value_dim": dim, "kv_heads": 8}
    metal, plain = (
        workspace_of(fused, **shape).bytes(CONTEXT_8B)  # type: ignore[arg-type]
        for fused in (FusedAttention.METAL, FusedAttention.NONE)
    )
    keys = workspace_of(FusedAttention.METAL, **shape).forward_keys(CONTEXT_8B)  # type: ignore[arg-type]
    saved = {
        **dict.fromkeys((64, 96, 128), SCORES_BYTES),  # rows of any length are fused
        **dict.fromkeys((72, 80), SCORES_BYTES - 8 * keys * HEADS_8B * 4),  # those beyond 8 tokens
        **dict.fromkeys((192, 256), 0),
    }
    assert plain - metal == saved[dim]


def test_metal_keeps_scores_of_short_rows_with_many_queries_for_a_kv_head() -> None:
    few, many = (workspace_of(FusedAttention.METAL, kv_heads=kv_heads) for kv_heads in (8, 4))
    assert few.short_bytes == 0
    assert many.short_bytes == HEADS_8B * 4


LONG = AttentionWorkspace(
    rows=4, tokens=512, key_bytes=0, gathered_bytes=GIB, copies=0, pair_bytes=8
)
"""Attention that takes 4 KiB for each token of the longest sequence."""


def test_the_longest_context_that_fits_beside_the_cache_that_was_asked_for() -> None:
    asked = replace(configured(PLAN, kv_cache_bytes=17 * GIB), workspace=LONG)
    fitting = asked.fitting()
    assert (fitting.context_tokens, fitting.sizes.n_blocks) == (1 << 19, 17 * 1024)
    longer = replace(fitting, context_tokens=fitting.context_tokens + CONFIG.block_size)
    assert refusal(longer).startswith("kv_cache_bytes of 17.0 GiB does not fit")


@pytest.mark.parametrize("kv_cache_bytes", [None, 10 * GIB])
def test_a_context_that_fits_stays(kv_cache_bytes: int | None) -> None:
    plan = replace(PLAN, config=replace(CONFIG, kv_cache_bytes=kv_cache_bytes))
    assert plan.fitting() is plan


def test_where_no_context_fits_the_whole_one_is_explained() -> None:
    too_large = configured(PLAN, kv_cache_bytes=900 * GIB)
    assert refusal(too_large.fitting()) == refusal(too_large)


MIB = 1 << 20
MEMORY_BYTES = 4096 * MIB
USED_BYTES = 5 * MIB
FAKES = {
    name: Machine(f"{name} (fake)", MEMORY_BYTES, MEMORY_BYTES, MEMORY_BYTES, kv_share=0.5)
    for name in ("cpu", "gpu")
}


class Limits(NamedTuple):
    """What MLX's allocator is given."""

    memory: int
    cache: int


Plan = Callable[[str, int], tuple[Limits, ModelMemory]]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Load a model on a fake device, with a KV cache of that many bytes: the limits that MLX's
    allocator is given, and what is planned. Raises ModelError where it does not fit.
    """
    checkpoint = write_family(SHALLOW, tmp_path)
    config = EngineConfig(str(checkpoint), max_running=4, step_tokens=4096)

    def load(device: str, kv_cache_bytes: int) -> tuple[Limits, ModelMemory]:
        limits = list[Limits]()
        monkeypatch.setattr(host, "examine", lambda: FAKES[device])
        monkeypatch.setattr(host, "process_bytes", lambda: 0)  # other tests' memory is no plan's
        monkeypatch.setattr(host, "limit_allocator", lambda *given: limits.append(Limits(*given)))
        asked = replace(config, kv_cache_bytes=kv_cache_bytes)
        opened = replace(assembly.open_checkpoint(asked, checkpoint), used_bytes=USED_BYTES)
        backend = assembly.assemble_opened(asked, opened, Blas(), lambda line: None, None)
        return limits[-1], backend.memory().model

    return load


@pytest.mark.parametrize("family", ["mamba2", "rwkv7", "llama"])
def test_where_the_files_state_no_length_memory_and_the_user_decide(
    family: str, tmp_path: Path
) -> None:
    checkpoint = write_family(FAMILIES[family], tmp_path)
    config = json.loads((checkpoint / "config.json").read_text())
    del config["max_position_embeddings"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    settings = EngineConfig(str(checkpoint), max_running=4, decode="eager")
    opened = assembly.open_checkpoint(settings, checkpoint)
    assert opened.loaded.max_context_tokens is None
    plan = opened.plan(settings)
    assert 4096 < plan.context_tokens <= UNSTATED_TOKENS
    assert plan.arena_tokens > 4096
    assert opened.plan(replace(settings, max_model_len=32_768)).context_tokens == 32_768


@pytest.mark.parametrize("device", FAKES)
def test_between_steps_the_cache_and_what_is_kept_are_within_the_plan(
    plan: Plan, device: str
) -> None:
    limits, memory = plan(device, MIB)
    assert 256 * MIB <= limits.cache < memory.workspace_bytes
    assert memory.kept_bytes + limits.cache <= memory.total_bytes <= MEMORY_BYTES
    assert limits.memory == USED_BYTES + MEMORY_BYTES


def test_on_a_gpu_the_cache_shares_the_bytes_of_a_step(plan: Plan) -> None:
    """MLX frees it before cache and arrays exceed the memory limit: the KV cache loses nothing."""
    limits, memory = plan("gpu", MIB)
    assert memory.workspace_bytes == 256 * MIB + limits.cache


def test_on_a_cpu_the_cache_counts_in_addition_to_a_step(plan: Plan) -> None:
    """MLX frees none of it there for other arrays."""
    (limits, on_cpu), (_, on_gpu) = plan("cpu", MIB), plan("gpu", MIB)
    assert on_cpu.workspace_bytes == on_gpu.workspace_bytes + limits.cache


def test_a_kv_cache_that_leaves_no_room_for_the_buffer_cache_is_refused_on_a_cpu_alone(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, memory = plan("gpu", MIB)
    small = memory.kept_bytes + memory.workspace_bytes + limits.cache // 2
    for device, fake in FAKES.items():
        monkeypatch.setitem(FAKES, device, replace(fake, left_bytes=small, most_bytes=small))
    plan("gpu", MIB)
    with pytest.raises(ModelError, match="does not fit"):
        plan("cpu", MIB)
