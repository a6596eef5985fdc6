"""An arena that begins small, as on a Mac: nothing that is said depends on when it grows."""

from collections import defaultdict
from dataclasses import replace

from engine.mlx_backend.model.attention import Attention
from engine.values.request import Request, SamplingParams
from engine.values.tokens import pack
from tests.golden.compiling import Compiled, Outputs
from tests.golden.driving import random_tokens
from tests.offline import OfflineDaemon, Room, Served

ROOM = Room(n_blocks=96, block_size=8)


def scenario(daemon: OfflineDaemon) -> Outputs:
    """Rows decode while others come, forks copy a block, and a conversation goes on."""
    sampling = SamplingParams(temperature=1.0, seed=3)
    first = tuple(random_tokens(11, seed=80))
    said = defaultdict[tuple[str, int], list[int]](list)
    daemon.add(Request("first", pack(first), 40, sampling, ignore_eos=True))
    daemon.step(12, said)
    for index in range(4):
        prompt = tuple(random_tokens(36 + 9 * index, seed=81 + index))
        daemon.add(
            Request(f"later{index}", pack(prompt), 28, sampling, n=1 + index % 2, ignore_eos=True)
        )
    daemon.rest(said)
    following = (*first, *random_tokens(30, seed=90))
    again = daemon.serve(Request("again", pack(following), 10, sampling, ignore_eos=True))
    return {**said, **again}


def test_what_is_said_does_not_depend_on_when_the_arena_grows(
    served: Served, attention: Attention
) -> None:
    """It grows from one block, and from a fifth of all, with eager decodes and compiled ones."""
    whole = OfflineDaemon(served, attention, ROOM)
    expected = scenario(whole)
    for first_blocks in (1, 20):
        growing = replace(ROOM, first_blocks=first_blocks)
        eager = OfflineDaemon(served, attention, growing)
        assert scenario(eager) == expected, f"from {first_blocks} blocks"
        assert eager.usage["again"].cached_tokens == whole.usage["again"].cached_tokens
        if not served.execution.batching.int_offsets:
            compiled = Compiled(served, attention, growing)
            assert scenario(compiled.daemon) == expected, f"compiled, from {first_blocks} blocks"
            assert compiled.steps[""] > 20


def test_an_arena_that_is_nearly_full_grows_while_the_engine_is_idle(
    served: Served, attention: Attention
) -> None:
    room = replace(ROOM, first_blocks=20)
    daemon = OfflineDaemon(served, attention, room)
    full = daemon.storage.full
    few = Request("few", pack(random_tokens(8 * 10, seed=1)), 2, ignore_eos=True)
    more = Request("more", pack(random_tokens(8 * 5, seed=2)), 2, ignore_eos=True)
    daemon.serve(few)
    assert full.n_allocated == 20
    daemon.serve(more)  # 17 of 20 blocks have been written to, so no step had to wait
    assert full.n_allocated == 30
    again = replace(more, id="again")
    whole = OfflineDaemon(served, attention, ROOM)
    whole.serve(few)
    whole.serve(more)
    assert daemon.serve(again) == whole.serve(again)
    assert daemon.usage["again"].cached_tokens == whole.usage["again"].cached_tokens > 0
