"""What a visitor sees of caches that are hard to draw."""

import re
import socket
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from engine.values.tree import TreeSnapshot
from server.settings import Settings
from tests.browser.conftest import Serve, Visit
from tests.browser.demo import DESKTOP, PHONE
from tests.browser.seen import bars, grave, in_each_scheme
from tests.cache_scenes import LEAF, SHARED, Scene, agent_beside_short_prompts, many_leaves
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine

LEAST_CONTRAST = 3.0  # of what must be seen with what is around it
SEEN_PIXELS = 48  # a tenth of the width at least, on a desktop

COLOURS = """(names) => names.map(([selector, property]) =>
  getComputedStyle(document.querySelector(selector))[property].match(/\\d+/g).map(Number))"""
PARTS = [
    [".picture", "backgroundColor"],
    [".bar.cached .body", "stroke"],
    [".bar.held .body", "fill"],
    [".lane .done", "fill"],
    [".bar .found .outline", "stroke"],
]
SWATCHES = [[".swatch.found", "borderTopColor"], [".swatch.done", "backgroundColor"]]

LOOK = """() => {
  const far = (body, name) => Math.abs(body.getBBox()[name] - body.getAttribute(name));
  window.moved = new Promise((resolve) => {
    const look = () => {
      const bodies = [...document.querySelectorAll(".bar .body")];
      if (bodies.length < 3) return requestAnimationFrame(look);
      resolve(bodies.map((body) => far(body, "x") + far(body, "width")));
    };
    look();
  });
}"""


@pytest.fixture
def agent(visit: Visit, scripted_url: str, engine: FakeEngine) -> Page:
    engine.picture = agent_beside_short_prompts()
    engine.node_tokens = {node.id: (72, 105) for node in engine.picture.nodes}
    return visit(scripted_url)


@pytest.fixture
def leaves(visit: Visit, scripted_url: str, engine: FakeEngine) -> Page:
    engine.picture = many_leaves()
    return visit(scripted_url)


def test_an_agent_leaves_room_for_short_prompts_and_the_axis_says_how(agent: Page) -> None:
    expect(agent.locator(".picture > p").first).to_contain_text("zigzag")
    expect(agent.locator(".axis .cut").first).to_be_visible()
    expect(agent.locator(".axis")).to_contain_text("25,000")
    shared = next(bar for bar in bars(agent) if bar.tokens == SHARED)
    assert shared.width > SEEN_PIXELS
    longest = max(bars(agent), key=lambda bar: bar.tokens)
    torn = agent.locator(f".bar[data-tokens='{longest.tokens}'] .tear")
    expect(torn).to_have_count(1)
    expect(agent.locator(f".bar[data-tokens='{SHARED}'] .tear")).to_have_count(0)


def test_where_all_fits_nothing_is_said_of_cuts(leaves: Page) -> None:
    expect(leaves.locator(".bar")).to_have_count(241)
    expect(leaves.locator(".picture > p").first).not_to_contain_text("zigzag")
    expect(leaves.locator(".axis .cut, .tear")).to_have_count(0)


def test_a_click_shows_the_agent_alone(agent: Page) -> None:
    agent.locator(".bar[data-tokens='18304']").click()
    expect(agent.locator(".bar")).to_have_count(7)
    expect(agent.locator(".fold")).to_have_count(0)


def test_what_runs_is_on_top(leaves: Page) -> None:
    expect(leaves.locator(".bar")).to_have_count(241)
    shown = bars(leaves)
    lowest_used = max(bar.y for bar in shown if bar.holders)
    assert lowest_used < min(bar.y for bar in shown if not bar.holders)
    assert all(lane.is_visible() for lane in leaves.locator(".lane").all())


def test_what_shares_nothing_is_folded_until_one_asks(agent: Page) -> None:
    fold = agent.get_by_role("button", name="+35 that share nothing")
    expect(fold).to_contain_text("2,559 tokens")
    expect(agent.locator(".bar")).to_have_count(33)
    fold.click()
    expect(agent.locator(".bar")).to_have_count(33 + 35)
    agent.get_by_role("button", name="Fold prompts that share nothing").click()
    expect(agent.locator(".bar")).to_have_count(33)


def test_more_below_is_said(leaves: Page) -> None:
    below = leaves.locator("button.below")
    expect(below).to_contain_text("more runs below")
    told = int((below.text_content() or "").split()[1])
    assert 0 < told < 241
    below.click()
    expect(below).not_to_contain_text(f"{told} more")
    leaves.locator(".namespaces").evaluate("(box) => box.scrollTo(0, box.scrollHeight)")
    expect(below).to_have_count(0)


def test_nothing_is_said_of_below_where_all_is_seen(visit: Visit, scripted_url: str) -> None:
    page = visit(scripted_url)
    expect(page.locator(".bar")).to_have_count(2)
    expect(page.locator("button.below")).to_have_count(0)


def test_a_bar_says_how_its_prompt_begins_where_texts_are_shown(
    visit: Visit, serve: Serve, engine: FakeEngine
) -> None:
    engine.node_tokens = {1: tuple(b"<|im_start|>You answer questions about Rootstock, shortly.")}
    page = visit(serve(engine, Settings(port=0, dashboard_text=True)))
    bar = page.locator(".bar[data-tokens='64']")
    expect(bar).to_have_accessible_name(re.compile("^“You answer", re.IGNORECASE))
    expect(bar.locator("text")).to_contain_text("“You answer")
    expect(bar.locator("text")).not_to_contain_text("im_start")
    expect(page.locator(".bar[data-tokens='40'] text")).to_have_text("40 tokens")
    assert not grave(page)


def test_no_bar_says_how_its_prompt_begins_where_texts_are_not_shown(
    visit: Visit, scripted_url: str
) -> None:
    page = visit(scripted_url)
    with page.expect_response("**/admin/cache/nodes?*") as answer:
        expect(page.locator(".bar[data-tokens='64']")).to_be_visible()
    assert answer.value.json() == {"shows_text": False, "beginnings": {}}
    expect(page.locator(".bar[data-tokens='64'] text")).to_contain_text("64 tokens")


def test_what_is_evicted_next_is_marked_while_memory_is_short(
    visit: Visit, scripted_url: str, engine: FakeEngine
) -> None:
    page = visit(scripted_url)
    expect(page.locator(".bar")).to_have_count(2)
    expect(page.locator(".bar.next")).to_have_count(0)
    expect(page.locator(".legend")).not_to_contain_text("evicted")
    picture = engine.picture
    short = replace(picture.arena, free=5, cached=picture.arena.cached + picture.arena.free - 5)
    engine.picture = replace(picture, version=2, arena=short)
    expect(page.locator(".bar.next")).to_have_count(1)
    expect(page.locator(".legend")).to_contain_text("next to be evicted")


def test_a_leaf_lights_up_as_far_as_it_was_found(leaves: Page) -> None:
    expect(leaves.locator(".bar .found")).to_have_count(2)
    shared, leaf = sorted((bar for bar in bars(leaves) if bar.found), key=lambda bar: bar.x)
    assert shared.found == shared.tokens
    assert (leaf.tokens, leaf.found) == (LEAF, 10)
    lit = leaves.locator(f".bar[data-tokens='{LEAF}'] .outline").bounding_box()
    assert lit is not None
    assert lit["width"] < leaf.width / 20


def test_colours_are_told_apart_and_old_bars_seen(
    visit: Visit, scripted_url: str, engine: FakeEngine
) -> None:
    engine.picture = agent_beside_short_prompts()
    page = visit(scripted_url)
    expect(page.locator(".bar .found").first).to_be_visible()
    expect(page.locator(".legend")).to_contain_text("found by a prompt just now")
    panels = []
    for scheme in in_each_scheme(page):
        panel, old, held, computed, found = page.evaluate(COLOURS, PARTS)
        panels.append(panel)
        assert found != computed, scheme
        for colour in (old, held, computed, found):
            assert contrast(colour, panel) >= LEAST_CONTRAST, scheme
        assert page.evaluate(COLOURS, SWATCHES) == [found, computed], scheme
    assert panels[0] != panels[1]


def contrast(one: list[int], other: list[int]) -> float:
    """As WCAG defines it."""
    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: list[int]) -> float:
    red, green, blue = (
        (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
        for part in (value / 255 for value in colour)
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_bars_stand_where_they_belong_at_once(
    visit: Visit, scripted_url: str, engine: FakeEngine
) -> None:
    scene = Scene()
    shared = scene.node(None, SHARED)
    scene.node(shared, 40)
    engine.picture = scene.picture(version=2)
    page = visit(scripted_url, reduced_motion="no-preference")
    expect(page.locator(".bar")).to_have_count(2)
    page.evaluate(LOOK)  # at the first frame with a third
    scene.node(shared, 4_000)
    engine.picture = scene.picture(version=3)
    assert page.evaluate("window.moved") == [pytest.approx(0, abs=0.1)] * 3


def test_a_bar_that_moves_looks_as_it_is_used(
    visit: Visit, scripted_url: str, engine: FakeEngine
) -> None:
    def of_two(used: int, version: int) -> TreeSnapshot:
        scene = Scene()
        for i in range(2):
            scene.node(None, 100 + i, holders=int(i == used))
        return scene.picture(version)

    engine.picture = of_two(0, version=2)
    page = visit(scripted_url)
    first, second = (page.locator(f".bar[data-tokens='{tokens}']") for tokens in (100, 101))
    for version, (used, kept) in enumerate([(second, first), (first, second)] * 3, start=3):
        engine.picture = of_two(int(used is second), version)
        expect(used.locator("text")).to_have_css("fill", "rgb(255, 255, 255)")
        expect(kept.locator("text")).not_to_have_css("fill", "rgb(255, 255, 255)")


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_daemon_that_is_gone_dims_what_it_said(visit: Visit, port: int, viewport: Any) -> None:
    with running(FakeEngine(), Settings(port=port)) as url:
        page = visit(url, expected="ERR_|Failed to load", viewport=viewport)
        expect(page.locator(".bar").first).to_be_visible()
        expect(page.locator(".picture")).to_have_css("opacity", "1")
    for part in (".picture", ".overview"):
        expect(page.locator(part)).to_have_css("opacity", "0.5")
    expect(page.locator(".notice")).to_contain_text("Below is its state at")
    with running(FakeEngine(), Settings(port=port)):
        expect(page.locator(".picture")).to_have_css("opacity", "1")
        expect(page.locator(".notice")).to_have_count(0)


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing_grave_and_a_phone_scrolls_in_one_direction(
    visit: Visit, scripted_url: str, engine: FakeEngine, viewport: Any
) -> None:
    engine.picture = agent_beside_short_prompts()
    page = visit(scripted_url, viewport=viewport)
    expect(page.locator(".bar")).to_have_count(33)
    assert not grave(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
