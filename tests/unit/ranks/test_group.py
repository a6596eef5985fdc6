"""Ranks agree on numbers, and a step that takes too long ends them. Without collectives."""

import math
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import ModelError
from engine.mlx_backend.assembly import open_checkpoint
from engine.mlx_backend.ranks import group
from engine.mlx_backend.ranks.group import Ranks
from engine.mlx_backend.ranks.link import Link, RankLost
from engine.mlx_backend.ranks.start import Facts, compare_facts, facts_of
from engine.process.child import REPORTED_STATUS
from engine.values.settings import EngineConfig
from tests.checkpoints import FAMILIES, write_family

N = 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Ranks]]:
    """Three ranks in this process."""
    made = [Ranks(rank, N, N, lambda line: None) for rank in range(N)]
    lost, sockets = Queue[RankLost](), list[socket.socket]()
    for rank in range(1, N):
        pair = socket.socketpair()
        sockets += pair
        for own, connection, other in zip((0, rank), pair, (rank, 0), strict=True):
            made[own].links.append(Link(connection, f"rank {other}", lost.put))
    yield made
    for each in made:
        each.close()
    for _ in sockets:
        lost.get(timeout=60)
    for connection in sockets:
        connection.close()


def agreed(ranks: list[Ranks], *numbers: tuple[float, ...]) -> list[tuple[float, ...]]:
    with ThreadPoolExecutor(N) as threads:
        calls = zip(ranks, numbers, strict=True)
        found = [threads.submit(each.agree, "it", *own) for each, own in calls]
        return [each.result(timeout=60) for each in found]


@given(
    st.lists(st.tuples(st.floats(allow_nan=False), st.integers(0, 1 << 50)), min_size=N, max_size=N)
)
def test_the_least_is_agreed(ranks: list[Ranks], numbers: list[tuple[float, int]]) -> None:
    least = tuple(map(min, zip(*numbers, strict=True)))
    assert agreed(ranks, *numbers) == [least] * N


@pytest.mark.parametrize(
    ("numbers", "worst"), [((0.1, 0.3, 0.2), 0.3), ((0.1, math.nan, 0.2), math.inf)]
)
def test_the_worst(ranks: list[Ranks], numbers: tuple[float, ...], worst: float) -> None:
    with ThreadPoolExecutor(N) as threads:
        assert [*threads.map(Ranks.worst, ranks, numbers, timeout=60)] == [worst] * N


def test_sizes_of_storage(ranks: list[Ranks], tmp_path: Path) -> None:
    """All have the least number of blocks, and of saved states, that one has memory for."""
    checkpoint = write_family(FAMILIES["qwen3_5"], tmp_path)
    config = EngineConfig(model=str(checkpoint), ranks=2, memory_bytes=2 << 30)
    opened = open_checkpoint(config, checkpoint)
    plans = [
        opened.plan(replace(config, kv_cache_bytes=kv_bytes << 10, state_cache_bytes=saved << 10))
        for kv_bytes, saved in ((900, 200), (700, 300), (800, 400))
    ]
    with ThreadPoolExecutor(N) as threads:
        found = [*threads.map(Ranks.planned, ranks, plans, timeout=60)]
    (first, second, third), states = plans, [plan.sizes.states for plan in plans]
    assert second.sizes.n_blocks < third.sizes.n_blocks < first.sizes.n_blocks
    assert states[0] is not None
    assert states[1] is not None
    assert states[0].saved < states[1].saved
    expected = replace(second.sizes, states=states[0])
    for each in found:
        assert each.sizes == expected
        assert each.context_tokens == min(plan.context_tokens for plan in plans)
        assert each.most_keys == min(plan.most_keys for plan in plans)


def test_facts(tmp_path: Path) -> None:
    """A copy of a model is the same; another is not."""
    first, copy = (write_family(FAMILIES["llama"], tmp_path / name) for name in ("a", "b"))
    other = write_family(FAMILIES["qwen3"], tmp_path)
    own = facts_of(first)
    compare_facts(own, facts_of(copy), "rank 1")
    with pytest.raises(ModelError, match=r"rank 1 cannot join: its weights is \w+, and rank 0's"):
        compare_facts(own, facts_of(other), "rank 1")


@pytest.mark.parametrize("field", Facts._fields)
def test_another_fact(field: str, tmp_path: Path) -> None:
    own = facts_of(write_family(FAMILIES["llama"], tmp_path))
    changed: dict[str, Any] = {field: "another"}
    its = own._replace(**changed)
    with pytest.raises(ModelError, match=f"its {field.replace('_', '-')} is another"):
        compare_facts(own, its, "rank 2")


class Child:
    def __init__(self) -> None:
        self.is_killed = False

    def wait(self, timeout: float | None = None) -> int:
        return -9

    def kill(self) -> None:
        self.is_killed = True


def test_a_step_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has a limit of its own; the first that exceeds it ends the process."""
    monkeypatch.setattr(group, "BEAT_SECONDS", 0.02)
    ended, said = list[int](), list[str]()
    monkeypatch.setattr(group, "end_process", ended.append)
    child = Child()
    ranks = Ranks(0, 2, 2, said.append)
    ranks.children.append(child)
    with ThreadPoolExecutor(1) as thread:
        watching = thread.submit(ranks._watch)
        for _ in range(10):
            ranks._expect(0.5)
            time.sleep(0.05)
        ranks._expect(None)
        time.sleep(0.6)
        assert not watching.done()
        ranks._expect(0.4)
        watching.result(timeout=60)
    assert ended == [REPORTED_STATUS]
    assert said == ["a step has taken more than 0.4 s: a rank is lost"]
    assert child.is_killed


def test_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, said = list[int](), list[str]()
    monkeypatch.setattr(group, "end_process", ended.append)
    ranks = Ranks(0, 2, 2, said.append)
    child = Child()
    ranks.children.append(child)
    ranks.lose(RankLost("rank 1 has ended"))
    ranks.lose(RankLost("rank 2 has ended"))
    assert (said, ended) == (["rank 1 has ended"], [REPORTED_STATUS])
    assert child.is_killed
