"""What `rootstock top` makes of pictures."""

import random
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from engine.values.tree import HiddenRequests, TreeSnapshot
from server.admin_schema import CacheTree
from server.terminal.top import Frame, Rates, Size, Watch, drawn, heaviest
from tests.cache_scenes import agent_beside_short_prompts, many_leaves
from tests.cache_trees import cache_tree, counted, node
from tests.contract.fake_engine import PICTURE


def picture(*nodes: tuple[int, int | None, int], **counts: int) -> CacheTree:
    """Nodes as (id, parent, tokens)."""
    return cache_tree(nodes=[node(*one) for one in nodes], counters=counted(**counts))


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def rates_of(watch: Watch) -> Rates:
    rates = watch.frame().rates
    assert rates is not None
    return rates


def test_rates_are_of_the_last_seconds_and_fall_in_a_silence() -> None:
    clock = Clock()
    watch = Watch(picture(), clock)
    assert rates_of(watch).generated == 0
    clock.seconds += 2
    watch.take(picture(generated_tokens=20, prompt_tokens=300, cached_tokens=200))
    rates = rates_of(watch)
    assert (rates.generated, rates.computed, rates.cached) == (10, 50, 100)
    clock.seconds += 2
    assert rates_of(watch).generated == 5
    clock.seconds += 600
    assert rates_of(watch).generated == 0
    watch.take(picture(generated_tokens=30))  # what the silence before it has not moved
    assert rates_of(watch).generated == 2
    clock.seconds += 4
    watch.take(picture(generated_tokens=70))
    clock.seconds += 3
    assert rates_of(watch).generated == 8  # of the seconds since that silence, none


def test_a_daemon_that_was_started_anew_has_no_rates_below_zero() -> None:
    clock = Clock()
    watch = Watch(picture(generated_tokens=500, prompt_tokens=9, cached_tokens=9), clock)
    clock.seconds += 1
    watch.take(picture(generated_tokens=2))
    rates = rates_of(watch)
    assert (rates.generated, rates.computed, rates.cached) == (0, 0, 0)


def test_the_heaviest_come_first_and_never_without_their_parents() -> None:
    found = heaviest(
        picture((1, None, 10), (2, None, 50), (3, 1, 5), (4, 1, 70), (5, 4, 30), (6, 4, 1)), 4
    )
    assert [(row.guide, row.node.id, row.weight) for row in found.rows] == [
        *(("", 1, 116), ("├ ", 4, 101), ("│ └ ", 5, 30), ("└ ", 3, 5))
    ]
    assert (found.folded_prompts, found.folded_tokens) == (1, 50)
    assert (found.left_nodes, found.left_tokens) == (1, 1)


def test_held_nodes_come_before_heavier_ones_that_nobody_uses() -> None:
    nodes = [
        *(node(1, None, 900), node(2, 1, 5), node(3, 1, 6)),
        *(node(4, None, 50, holders=8), node(5, 4, 10), node(6, 4, 3, holders=2)),
    ]
    rows = heaviest(cache_tree(nodes=nodes), 4).rows
    assert [row.node.id for row in rows] == [4, 6, 5, 1]
    assert [row.node.id for row in heaviest(cache_tree(nodes=nodes), 2).rows] == [4, 6]


def test_prompts_that_share_nothing_are_folded_but_the_longest() -> None:
    alone = [(n, None, 10 + n) for n in range(10, 18)]
    shared = [(1, None, 5), (2, 1, 4), (3, 1, 3), (4, None, 50), (5, 4, 1)]
    found = heaviest(picture(*shared, *alone), 20, most_alone=2)
    assert [row.node.id for row in found.rows] == [4, 5, 17, 1, 2, 3]
    assert (found.folded_prompts, found.folded_tokens) == (7, sum(range(20, 27)))
    assert (found.left_nodes, found.left_tokens) == (0, 0)


def crowded() -> TreeSnapshot:
    """Long names and large numbers, and more of all than a low terminal has lines for."""
    scene = agent_beside_short_prompts()
    nodes = tuple(replace(node, tokens=node.tokens * 1000) for node in scene.nodes)
    requests = tuple(
        replace(request, request_id=f"{i:032x}", index=1, prompt_tokens=10**7, cached_tokens=10**7)
        for i, request in enumerate(scene.requests)
    )
    waiting = HiddenRequests(12, 3)
    return replace(
        scene, nodes=nodes, requests=requests, hidden_requests=waiting, disk=PICTURE.disk
    )


@pytest.mark.parametrize("scene", [agent_beside_short_prompts(), many_leaves(), crowded()])
@pytest.mark.parametrize("size", [Size(60, 15), Size(80, 24), Size(200, 60)])
def test_it_fits_the_terminal(scene: TreeSnapshot, size: Size) -> None:
    frame = Frame(
        CacheTree.of(scene, "a/model-with-a-long-name"), 3.0, Rates(123.4, 56_789, 43_210)
    )
    console = Console(width=size.columns, height=size.lines, file=StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(drawn(frame, "http://127.0.0.1:8000/v1", size))
    lines = captured.get().splitlines()
    assert len(lines) <= size.lines
    assert max(map(len, lines)) <= size.columns
    said = "\n".join(lines)
    assert scene.requests[0].id[:8] in said
    assert "running" in said
    assert "0 to " in said
    assert "more nodes of" in said or size.lines > 24


@pytest.mark.parametrize(
    ("memory", "facts"),
    [
        ("", ("requests ", "tokens/s ", "hits ")),
        ("requests are refused", ("memory    is short: requests are refused", "requests ")),
    ],
)
def test_a_low_terminal_says_what_matters_most(memory: str, facts: tuple[str, ...]) -> None:
    scene = agent_beside_short_prompts()
    frame = Frame(CacheTree.of(scene, "a/model"), 3.0, Rates(1, 2, 3), memory)
    console = Console(width=60, height=15, file=StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(drawn(frame, "http://127.0.0.1:8000/v1", Size(60, 15)))
    said = captured.get()
    for what in (*facts, "held 8", "0 to 18,304", "+40 that share nothing"):
        assert what in said


@pytest.mark.parametrize("seed", range(20))
def test_rows_and_what_is_left_are_all_there_is(seed: int) -> None:
    draw = random.Random(seed)
    nodes = [(n, draw.choice([None, *range(n)]), draw.randint(1, 99)) for n in range(60)]
    whole = heaviest(picture(*nodes), 1000, most_alone=1000)
    assert (whole.left_nodes, whole.left_tokens) == (0, 0)
    some = heaviest(picture(*nodes), draw.randint(1, 59))
    shown = {row.node.id for row in some.rows}
    assert len(shown) == len(some.rows)
    assert all(row.node.parent is None or row.node.parent in shown for row in some.rows)
    left_tokens = some.folded_tokens + some.left_tokens
    assert sum(row.node.tokens for row in some.rows) + left_tokens == sum(n[2] for n in nodes)


def test_a_tree_of_any_depth_is_drawn() -> None:
    chain = [(n, n - 1 if n else None, 1) for n in range(2000)]
    assert len(heaviest(picture(*chain), 2000).rows) == 2000
