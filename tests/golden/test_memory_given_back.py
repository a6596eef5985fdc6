"""Memory is given back between steps: no output changes, and the system gets the memory."""

from collections import defaultdict
from dataclasses import replace
from random import Random

import mlx.core as mx
import psutil
import pytest

from engine.mlx_backend.kv.arena import Arena
from engine.mlx_backend.kv.pages import can_release_pages, release_pages
from engine.mlx_backend.kv.shape import LayerShape
from engine.mlx_backend.model.attention import Attention
from engine.values.request import Request, SamplingParams
from engine.values.tokens import pack
from kvstore.types import BlockId
from tests.golden.compiling import Compiled, Outputs
from tests.golden.driving import random_tokens
from tests.offline import OfflineDaemon, Room, Served

ROOM = Room(n_blocks=96, block_size=8)


def give_back(daemon: OfflineDaemon, n_evicted: int) -> None:
    """As `EngineThread.give_back` does it."""
    daemon.loop.evict(n_evicted)
    first: int | None = 0
    while first is not None:
        first = daemon.loop.give_back(first)


def scenario(daemon: OfflineDaemon, random: Random | None) -> Outputs:
    """Rows decode while others come, forks copy a block, and conversations go on. Memory is given
    back at random between all of that, or never.
    """
    sampling = SamplingParams(temperature=1.0, seed=3)
    said = defaultdict[tuple[str, int], list[int]](list)
    tokens = {name: tuple(random_tokens(30 + 9 * name, seed=80 + name)) for name in range(4)}
    for turn in range(3):
        for name, prompt in tokens.items():
            id = f"{name}-{turn}"
            daemon.add(Request(id, pack(prompt), 20, sampling, n=1 + name % 2, ignore_eos=True))
            daemon.step(4, said)
            if random is not None:
                give_back(daemon, random.choice([0, 3, 96]))
        while not daemon.loop.is_idle:
            daemon.step(1, said)
            if random is not None and random.random() < 0.3:
                give_back(daemon, random.choice([0, 1, 40]))
        for name in tokens:
            tokens[name] += (*said[f"{name}-{turn}", 0], *random_tokens(5, seed=turn))
        if random is not None:
            give_back(daemon, random.choice([0, 20]))
    return said


@pytest.mark.parametrize("seed", range(2))
def test_what_is_said_does_not_depend_on_memory_that_was_given_back(
    served: Served, attention: Attention, seed: int
) -> None:
    """With an arena that is whole from the start, and one that grows; eager and compiled."""
    expected = scenario(OfflineDaemon(served, attention, ROOM), None)
    for room in (ROOM, replace(ROOM, first_blocks=20)):
        daemon = OfflineDaemon(served, attention, room)
        assert scenario(daemon, Random(seed)) == expected, (room, seed)
        if not served.execution.batching.int_offsets:
            compiled = Compiled(served, attention, room)
            assert scenario(compiled.daemon, Random(seed)) == expected, (room, seed)


def test_an_arena_that_grows_shrinks_when_its_end_is_free(
    served: Served, attention: Attention
) -> None:
    daemon = OfflineDaemon(served, attention, replace(ROOM, first_blocks=8))
    full = daemon.storage.full
    if not full.layers:
        pytest.skip("no layer keeps every token")
    long = Request("long", pack(random_tokens(8 * 60, seed=1)), 2, ignore_eos=True)
    short = Request("short", pack(random_tokens(8 * 3, seed=2)), 2, ignore_eos=True)
    daemon.serve(short)
    daemon.serve(long)
    n_before = full.n_allocated
    bytes_before = sum(plane.nbytes for plane in full.planes())
    give_back(daemon, 61)
    again = daemon.serve(replace(short, id="again"))
    assert full.n_allocated < n_before / 2
    assert sum(plane.nbytes for plane in full.planes()) < bytes_before / 2
    assert daemon.usage["again"].cached_tokens == 0, "it was the first to be evicted"
    assert again == OfflineDaemon(served, attention, ROOM).serve(replace(short, id="again"))


def test_states_that_nobody_uses_take_no_memory(served: Served, attention: Attention) -> None:
    daemon = OfflineDaemon(served, attention, ROOM)
    states = daemon.storage.states
    if not states.shapes:
        pytest.skip("no layer is recurrent")
    for index in range(3):
        prompt = pack(random_tokens(40, seed=index))
        daemon.serve(Request(f"{index}", prompt, 4, ignore_eos=True))
    kept = daemon.storage.kept(5)
    assert (kept.n_arrays, kept.state_bytes) != daemon.storage.kept(0)
    assert kept.state_bytes == sum(
        array.nbytes for batch in set(states._batches.values()) for array in batch.arrays
    )
    give_back(daemon, 96)
    left = daemon.storage.kept(5)
    assert left.state_bytes < kept.state_bytes / 2
    assert left.n_arrays < kept.n_arrays


@pytest.mark.skipif(not can_release_pages(), reason="pages are given back on a CPU of Linux alone")
def test_the_system_has_the_pages_of_free_blocks() -> None:
    """Half of the blocks are given back, every other pair; the others keep what they hold."""
    n_blocks = 512
    arena = Arena(
        [LayerShape(4, 64, dim, mx.float32, mx.float32) for dim in (64, 32)], n_blocks, 64
    )
    for layer in arena.layers:
        layer.planes = tuple(plane + 3 for plane in layer.planes)
        mx.eval(layer.planes)
    n_bytes = sum(plane.nbytes for plane in arena.planes())
    mx.clear_cache()
    process = psutil.Process()
    before = process.memory_info().rss
    free = [BlockId(block) for block in range(n_blocks) if block % 4 < 2]
    release_pages(arena, free)
    given_bytes = before - process.memory_info().rss
    assert n_bytes * 0.3 < given_bytes < n_bytes * 0.55
    for layer in arena.layers:
        kept = [block for block in range(n_blocks) if block % 4 >= 2]
        for contents in layer.blocks(mx.array(kept)):
            assert mx.all(contents == 3).item()
        for contents in layer.blocks(mx.array(free)):
            assert mx.all((contents == 0) | (contents == 3)).item()
    release_pages(arena, free)
    arena.layers[0].put_blocks(0, *arena.layers[0].blocks(mx.array([2])))
    mx.eval(arena.planes())
    assert mx.all(arena.layers[0].blocks(mx.array([0]))[0] == 3).item(), "they can be used again"
