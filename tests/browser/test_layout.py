"""Where the page puts what a snapshot has: its pure functions, asked in a browser."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from playwright.sync_api import Page

from engine.values.tree import TreeSnapshot
from server.schemas import CacheTree
from tests.cache_scenes import Scene, agent_beside_short_prompts, many_leaves

LAYOUT = """async ([snapshot, mostAlone, top]) => {
  const { layout } = await import("/dashboard/tree/layout.js");
  const { placeOf, ticks } = await import("/dashboard/tree/axis.js");
  const node = snapshot.nodes.find(({ id }) => id === top) ?? null;
  const { axis, rows, namespaces } = layout(snapshot, { top: node, mostAlone });
  const { bars, lanes, rests, folded } = namespaces[0];
  const placed = ({ from, to, ...rest }) => ({
    ...rest, from, to, start: placeOf(axis, from), end: placeOf(axis, to) });
  return { axis, rows, bars: bars.map(placed), lanes: lanes.map(placed), rests, folded,
           ticks: ticks(axis, 9) };
}"""

Laid = Callable[..., Any]
"""What `layout` makes of a picture."""


@pytest.fixture
def laid_out(lasting_page: Page) -> Laid:
    def laid(picture: TreeSnapshot, most_alone: int = 5, top: int | None = None) -> Any:
        snapshot = CacheTree.of(picture, "a/model").model_dump(mode="json")
        return lasting_page.evaluate(LAYOUT, [snapshot, most_alone, top])

    return laid


def test_what_fits_is_to_scale(laid_out: Laid) -> None:
    laid = laid_out(many_leaves())
    assert laid["axis"]["cuts"] == []
    assert all(bar["end"] - bar["start"] == bar["node"]["tokens"] for bar in laid["bars"])
    assert laid["ticks"] == [0, 50, 100, 150, 200, 250, 300, 350, 400]


def test_a_long_prompt_is_cut_and_short_ones_beside_it_are_not(laid_out: Laid) -> None:
    laid = laid_out(agent_beside_short_prompts())
    axis = laid["axis"]
    shared = next(bar for bar in laid["bars"] if bar["node"]["tokens"] == 84)
    assert shared["end"] - shared["start"] == 84 > axis["length"] / 16
    agent = max(laid["bars"], key=lambda bar: bar["node"]["tokens"])
    assert 84 < agent["end"] - agent["start"] < axis["length"] / 2
    assert axis["cuts"][-1]["to"] == 25_000
    assert laid["ticks"][0] == 0
    assert laid["ticks"][-1] == 25_000


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_drawn_out_of_order(laid_out: Laid, seed: int) -> None:
    """Where an axis is not cut it is to scale, and nothing begins or ends in a cut."""
    draw = Random(seed)
    scene = Scene()
    for i in range(60):
        parent = draw.choice([None, *range(max(1, i - 8), i + 1)]) if i else None
        scene.node(parent, int(10 ** draw.uniform(0, 4.5)), holders=draw.choice([0, 1]))
    laid = laid_out(scene.picture(), most_alone=1000)
    cuts = [(cut["from"], cut["to"]) for cut in laid["axis"]["cuts"]]
    assert len(laid["bars"]) == 60
    for bar in laid["bars"]:
        begins, ends = bar["from"], bar["to"]
        assert not any(cut[0] < token < cut[1] for cut in cuts for token in (begins, ends))
        inside = [to - from_ for from_, to in cuts if begins <= from_ and to <= ends]
        drawn = bar["end"] - bar["start"]
        assert 0 < drawn <= ends - begins
        if not inside:
            assert drawn == ends - begins
    places = sorted((bar["to"], bar["end"]) for bar in laid["bars"])
    assert [place for _, place in places] == sorted(place for _, place in places)
    assert max(place for _, place in places) <= laid["axis"]["length"]


def test_what_runs_comes_first(laid_out: Laid) -> None:
    scene = Scene()
    old, busy = scene.node(None, 40), scene.node(None, 60, holders=1)
    quiet = scene.node(busy, 10)
    spoken = scene.node(busy, 20, holders=1)
    scene.request(spoken, 90, 85)
    scene.request(None, 30, 0)
    scene.request(None, 35, 5)
    laid = laid_out(scene.picture())
    assert [bar["node"]["id"] for bar in laid["bars"]] == [busy, spoken, quiet, old]
    rows = {lane["request"]["id"]: lane["row"] for lane in laid["lanes"]}
    row_of = {bar["node"]["id"]: bar["row"] for bar in laid["bars"]}
    assert rows["r1"] < row_of[quiet] < rows["r3"] < row_of[old] < rows["r2"]


def test_a_queue_is_folded_with_its_count(laid_out: Laid) -> None:
    scene = Scene()
    shared = scene.node(None, 60, holders=1)
    for _ in range(6):
        scene.request(None, 30, 0)
    scene.request(shared, 90, 85)
    laid = laid_out(scene.picture())
    assert [lane["request"]["id"] for lane in laid["lanes"]] == ["r7", "r1", "r2"]
    assert [(rest["queued"], rest["from"]) for rest in laid["rests"]] == [(4, 0)]
    assert laid["rows"] == 4


def test_prompts_that_share_nothing_are_folded_but_the_longest(laid_out: Laid) -> None:
    scene = Scene()
    alone = [scene.node(None, 10 + i) for i in range(8)]
    longer = scene.node(scene.node(None, 50), 30)  # one prompt, of two runs
    shared = scene.node(None, 5)
    used = scene.node(None, 6, holders=1)
    behind = [scene.node(shared, 4), scene.node(shared, 3)]
    laid = laid_out(scene.picture(), most_alone=2)
    kept = {alone[-1], longer, longer - 1, shared, used, *behind}
    assert {bar["node"]["id"] for bar in laid["bars"]} == kept
    assert laid["folded"] == {"prompts": 7, "tokens": sum(range(10, 17))}
    whole = laid_out(scene.picture(), most_alone=8 + 1)
    assert len(whole["bars"]) == len(scene.picture().nodes)
    assert whole["folded"]["prompts"] == 0


def test_a_prompt_that_is_computed_does_not_move_the_axis(laid_out: Laid) -> None:
    def computed(n_tokens: int) -> Any:
        scene = Scene()
        shared = scene.node(None, 84, holders=1)
        for i in range(20):
            scene.node(shared, 30 + 5 * i)
        own = scene.node(None, n_tokens, holders=1)
        scene.request(own, 25_000, n_tokens + 40)
        return laid_out(scene.picture())

    axes = [computed(n_tokens)["axis"] for n_tokens in (1_024, 9_216, 24_576)]
    assert axes[0]["cuts"]
    assert axes[0] == axes[1] == axes[2]


def test_a_bar_alone_begins_its_own_axis(laid_out: Laid) -> None:
    scene = Scene()
    top = scene.node(scene.node(None, 20_000), 60)
    for i in range(6):
        scene.node(top, 20 + i)
    laid = laid_out(scene.picture(), top=top)
    assert laid["axis"]["from"] == 20_000
    assert laid["axis"]["cuts"] == []
    assert laid["ticks"][0] == 20_000


def test_a_conversation_of_any_depth_has_places(laid_out: Laid) -> None:
    scene = Scene()
    node = None
    for _ in range(2000):
        node = scene.node(node, 8)
    assert len(laid_out(scene.picture())["bars"]) == 2000
