"""Compiled decodes by `paged`: how often they are traced, and their work listed."""

from collections import defaultdict
from collections.abc import Callable

import pytest

from engine.mlx_backend.gpu.paged import PagedAttention
from engine.mlx_backend.kv.arena import Arena
from engine.mlx_backend.model.attention import Attention, ListedWork, PrepareDecodeRows
from engine.mlx_backend.model.rows import BlockTable, Counts
from engine.values.request import Request
from engine.values.tokens import pack
from tests.golden.compiling import Compiled, Outputs, expect_same_outputs
from tests.golden.conftest import as_served
from tests.golden.driving import random_tokens
from tests.golden.test_compiled import DRAWN, request
from tests.offline import OfflineDaemon, Room, Served

ROOM = Room(n_blocks=256, max_running=9)


class CountingPaged(PagedAttention):
    """Counts traces and lists by window, and keeps the lists."""

    def __init__(self) -> None:
        super().__init__(Attention(), as_served, min_saved_blocks=1)
        self.traced = list[int | None]()
        self.listed = list[int | None]()
        self.lists = list[ListedWork | None]()

    def prepare_decode(
        self, rows: int, width: int, arena: Arena, window: int | None, sizes: tuple[int, ...]
    ) -> PrepareDecodeRows | None:
        self.traced.append(window)
        return super().prepare_decode(rows, width, arena, window, sizes)

    def list_work(
        self, table: BlockTable, n_blocks: Counts, arena: Arena, window: int | None
    ) -> ListedWork | None:
        self.listed.append(window)
        work = super().list_work(table, n_blocks, arena, window)
        self.lists.append(work)
        return work


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss"])
def test_rows_that_grow_within_a_width_take_one_trace_and_one_list(
    family: str, served_of: Callable[[str], Served]
) -> None:
    """Though they begin blocks in most of the steps, and pass their windows."""
    served, attention = served_of(family), CountingPaged()
    windows = [None, *served.layout.windows]
    room = Room(n_blocks=256, max_running=9, step_tokens=512)  # all prompts in one step
    # From 17 blocks of 8 tokens on, tables have 20 blocks.
    rows = [request(f"r{n}", n, 24) for n in (129, 20, 61, 66, 13)]
    compiled = Compiled(served, attention, room)
    for row in rows:
        compiled.daemon.add(row)
    said = defaultdict[tuple[str, int], list[int]](list)
    compiled.daemon.step(22, said)
    assert compiled.steps[""] >= 20
    assert attention.traced == windows
    assert attention.listed == windows
    assert None not in attention.lists
    found = compiled.daemon.rest(said)
    assert found == OfflineDaemon(served, Attention(), room).serve(*rows)


def test_rows_that_share_a_prefix_are_compiled(served_of: Callable[[str], Served]) -> None:
    """Their work is listed once for all of them."""
    attention = CountingPaged()
    prompt = random_tokens(40, seed=40)

    def scenario(daemon: OfflineDaemon) -> Outputs:
        daemon.serve(request("shared", 40, 1))
        return daemon.serve(*(Request(f"r{n}", pack((*prompt, n)), 20 * n, DRAWN) for n in (1, 2)))

    run = expect_same_outputs(served_of("qwen3"), attention, ROOM, scenario)
    assert run.steps.keys() == {""}
    shared = [work.shared.tolist() for work in attention.lists if work is not None]
    assert [5, 5] in shared


def test_rows_of_very_unlike_lengths_are_compiled(served_of: Callable[[str], Served]) -> None:
    """Nothing is read for the short ones beyond their ends."""
    room = Room(n_blocks=256, max_running=9, step_tokens=512)
    rows = [request(f"r{n}", n, 20) for n in (480, 5, 6, 7, 8, 9)]
    for attention, is_compiled in ((CountingPaged(), True), (Attention(16), False)):
        compiled = Compiled(served_of("qwen3"), attention, room)
        compiled.daemon.serve(*rows)
        assert ("rows of unlike lengths" in compiled.steps) is not is_compiled
