"""What is refused because it does not fit into memory, and what is said to fit instead."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ByteSize, TypeAdapter

from engine.api import ModelError
from engine.mlx_backend.loading.budget import Footprint
from engine.mlx_backend.loading.fit import Room, fit, storage_bytes
from engine.mlx_backend.loading.working import working_bytes
from engine.mlx_backend.loading.workspace import Workspace
from engine.values.settings import EngineConfig

GIB = 1 << 30
CONFIG = EngineConfig(model="", max_running=4)
PLAIN = Footprint(block_bytes=1 << 20)
HYBRID = Footprint(block_bytes=1 << 20, state_bytes=1 << 26)
CONTEXT = 1 << 20
NOTHING = Workspace(rows=0, tokens=0, key_bytes=0, copies=0, heads=0)
ROOM = Room(
    left=24 * GIB, most=24 * GIB, weights=4 * GIB, working=GIB, workspace=NOTHING, share=0.5
)


def refusal(config: EngineConfig, footprint: Footprint = PLAIN, room: Room = ROOM) -> str:
    with pytest.raises(ModelError) as refused:
        fit(config, footprint, CONTEXT, room)
    return str(refused.value)


def test_the_figures_and_what_would_fit_are_said() -> None:
    assert refusal(replace(CONFIG, kv_cache_bytes=900 * GIB)) == (
        "kv_cache_bytes of 900.0 GiB does not fit: of 24.0 GiB of free memory the weights take "
        "4.0 GiB and computing takes 1.0 GiB, 1.0 GiB with a sequence of 1,048,576 tokens; at most "
        "19GiB would fit"
    )
    assert fit(replace(CONFIG, kv_cache_bytes=19 * GIB), PLAIN, CONTEXT, ROOM).n_blocks == 19 << 10


@given(left_bytes=st.integers(6 * GIB, 200 * GIB))
def test_what_is_said_to_fit_together_does(left_bytes: int) -> None:
    room = replace(ROOM, left=left_bytes, most=left_bytes)
    asked = replace(CONFIG, kv_cache_bytes=900 * GIB, state_cache_bytes=0)
    said = refusal(asked, HYBRID, room)
    found = re.search(r"at most (\w+) together", said)
    assert found is not None
    largest = int(TypeAdapter(ByteSize).validate_python(found[1]))
    fit(replace(asked, kv_cache_bytes=largest), HYBRID, CONTEXT, room)


@given(left_bytes=st.integers(6 * GIB, 200 * GIB), prefix_cache=st.booleans())
def test_saved_states_fit_beside_the_largest_cache(left_bytes: int, prefix_cache: bool) -> None:
    room = replace(ROOM, left=left_bytes, most=left_bytes)
    config = replace(CONFIG, prefix_cache=prefix_cache)
    found = re.search(
        r"at most (\w+)", refusal(replace(config, kv_cache_bytes=900 * GIB), HYBRID, room)
    )
    assert found is not None
    largest = int(TypeAdapter(ByteSize).validate_python(found[1]))
    assert largest > (room.storage - 5 * 4 * HYBRID.state_bytes) * 0.75
    fit(replace(config, kv_cache_bytes=largest), HYBRID, CONTEXT, room)


def test_saved_states_can_be_too_many() -> None:
    told = replace(CONFIG, kv_cache_bytes=GIB, state_cache_bytes=900 * GIB)
    assert "kv_cache_bytes of 1.0 GiB with state_cache_bytes of 900.0 GiB" in refusal(told, HYBRID)
    alone = refusal(replace(CONFIG, state_cache_bytes=900 * GIB), HYBRID)
    assert alone.startswith("state_cache_bytes of 900.0 GiB does not fit")
    assert alone.endswith("at most 18GiB would fit")


def test_settings_that_nothing_is_allocated_for_are_not_counted() -> None:
    asked = replace(CONFIG, kv_cache_bytes=900 * GIB, state_cache_bytes=0)
    recurrent = Footprint(block_bytes=0, state_bytes=1 << 20)
    assert fit(asked, recurrent, CONTEXT, ROOM).states is not None
    asked = replace(CONFIG, kv_cache_bytes=GIB, state_cache_bytes=900 * GIB)
    assert fit(asked, PLAIN, CONTEXT, ROOM).states is None


def test_a_model_larger_than_memory_is_refused() -> None:
    said = refusal(CONFIG, room=replace(ROOM, weights=61 * GIB))
    assert said.startswith("the model does not fit: of 24.0 GiB of free memory the weights take 61")


def test_where_not_even_the_least_fits_other_settings_are_named() -> None:
    said = refusal(replace(CONFIG, kv_cache_bytes=GIB), room=replace(ROOM, weights=23 * GIB - 1))
    assert "4 running sequences need 4 MiB of KV cache" in said
    assert "lower max_running" in said


def test_others_give_way_to_what_is_asked_for_but_not_to_the_default() -> None:
    metal = replace(ROOM, left=9 * GIB, most=48 * GIB)
    default = storage_bytes(PLAIN, fit(CONFIG, PLAIN, CONTEXT, metal))
    assert default.arenas == 2 * GIB
    assert fit(replace(CONFIG, kv_cache_bytes=32 * GIB), PLAIN, CONTEXT, metal).n_blocks == 32 << 10


def test_many_rows_of_a_large_vocabulary_need_more_to_work_with() -> None:
    sampled = replace(CONFIG, max_running=64, step_tokens=64)
    assert working_bytes(sampled, 151_936) - working_bytes(sampled, 0) > 470 * 10**6


HUNGRY = Workspace(rows=4, tokens=512, key_bytes=4096, copies=2, heads=32)


@given(left_bytes=st.integers(6 * GIB, 200 * GIB), share=st.floats(0.1, 1))
def test_the_longest_sequence_of_the_default_has_room_to_attend(
    left_bytes: int, share: float
) -> None:
    room = replace(ROOM, left=left_bytes, most=left_bytes, workspace=HUNGRY, share=share)
    sizes = fit(CONFIG, PLAIN, CONTEXT, room)
    longest = min(CONTEXT, sizes.n_blocks * CONFIG.block_size)
    arenas = storage_bytes(PLAIN, sizes).arenas
    assert arenas + HUNGRY.bytes(longest) <= room.storage


@given(left_bytes=st.integers(6 * GIB, 200 * GIB))
def test_what_is_said_to_fit_leaves_room_to_attend(left_bytes: int) -> None:
    room = replace(ROOM, left=left_bytes, most=left_bytes, workspace=HUNGRY)
    found = re.search(
        r"at most (\w+) would", refusal(replace(CONFIG, kv_cache_bytes=900 * GIB), PLAIN, room)
    )
    assert found is not None
    largest = int(TypeAdapter(ByteSize).validate_python(found[1]))
    sizes = fit(replace(CONFIG, kv_cache_bytes=largest), PLAIN, CONTEXT, room)
    longest = min(CONTEXT, sizes.n_blocks * CONFIG.block_size)
    assert largest + HUNGRY.bytes(longest) <= room.storage
    with pytest.raises(ModelError):
        fit(replace(CONFIG, kv_cache_bytes=largest * 5 // 4), PLAIN, CONTEXT, room)
