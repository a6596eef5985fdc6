"""What `rootstock top` makes of pictures."""

import random

import pytest

from server.schemas.cache_tree import CacheTree
from server.terminal.top.prefixes import heaviest
from server.terminal.top.watch import Rates, Watch
from tests.cache_trees import cache_tree, counted, node


def picture(*nodes: tuple[int, int | None, int], **counts: int) -> CacheTree:
    """Nodes as (id, parent, tokens)."""
    return cache_tree(nodes=[node(*one) for one in nodes], counters=counted(**counts))


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def rates_of(watch: Watch) -> Rates:
    rates = watch.seen().rates
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
        *(("", 1, 116), ("└ ", 4, 101), ("  └ ", 5, 30), ("", 2, 50))
    ]
    assert (found.left_nodes, found.left_tokens) == (2, 6)


@pytest.mark.parametrize("seed", range(20))
def test_rows_and_what_is_left_are_all_there_is(seed: int) -> None:
    draw = random.Random(seed)
    nodes = [(n, draw.choice([None, *range(n)]), draw.randint(1, 99)) for n in range(60)]
    whole = heaviest(picture(*nodes), 1000)
    assert (whole.left_nodes, whole.left_tokens) == (0, 0)
    some = heaviest(picture(*nodes), draw.randint(1, 59))
    shown = {row.node.id for row in some.rows}
    assert len(shown) == len(some.rows)
    assert all(row.node.parent is None or row.node.parent in shown for row in some.rows)
    assert sum(row.node.tokens for row in some.rows) + some.left_tokens == sum(n[2] for n in nodes)


def test_a_tree_of_any_depth_is_drawn() -> None:
    chain = [(n, n - 1 if n else None, 1) for n in range(2000)]
    assert len(heaviest(picture(*chain), 2000).rows) == 2000
