"""The picture shows what the cache of a real daemon holds."""

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Visit
from tests.browser.demo import QUESTIONS, SYSTEM, say
from tests.browser.seen import GAP, bars


@pytest.fixture
def page(visit: Visit, demo_url: str, daemon: httpx.Client) -> Page:
    page = visit(demo_url)
    expect(page.get_by_role("heading", name="Nothing is cached yet")).to_be_visible()
    return page


@pytest.fixture
def shared(page: Page, daemon: httpx.Client) -> Page:
    """The page, with the bars of three requests with one system prompt."""
    for question in QUESTIONS:
        say(daemon, question, SYSTEM)
    expect(page.locator(".bar")).to_have_count(len(QUESTIONS) + 1)
    return page


def test_three_requests_are_one_bar_with_three_behind_it_each_as_wide_as_its_tokens_are_many(
    shared: Page,
) -> None:
    first, *others = sorted(bars(shared), key=lambda bar: bar.x)
    assert all(bar.is_behind(first) for bar in others)
    assert len({bar.tokens for bar in (first, *others)}) > 1
    widths = [(bar.width + GAP) / bar.tokens for bar in (first, *others)]
    assert max(widths) - min(widths) < 0.01 * max(widths)


def test_bar_tables_and_numbers_have_every_token_that_was_computed_and_kept(
    page: Page, daemon: httpx.Client
) -> None:
    usage = say(daemon, QUESTIONS[0])
    kept = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    expect(page.locator(".bar")).to_have_count(1)
    (bar,) = bars(page)
    assert (bar.tokens, bar.holders) == (kept, 0)
    page.get_by_text("The same as tables").click()
    row = page.get_by_role("row").filter(has_text="the beginning")
    expect(row.get_by_role("cell").nth(4)).to_have_text(str(kept))
    expect(page.locator(".numbers")).to_contain_text("%")
    expect(page.locator(".memory li").filter(has_text="cached")).not_to_contain_text("cached 0 ")


def test_after_a_clear_it_is_empty(page: Page, daemon: httpx.Client) -> None:
    say(daemon, QUESTIONS[0])
    expect(page.locator(".bar")).to_have_count(1)
    page.get_by_role("button", name="Clear the cache").click()
    expect(page.locator(".bar")).to_have_count(1)  # it asks first
    page.get_by_role("dialog").get_by_role("button", name="Clear", exact=True).click()
    expect(page.get_by_role("heading", name="Nothing is cached yet")).to_be_visible()
    assert daemon.get("/admin/cache/stats").json()["blocks_cached"] == 0


def test_a_resend_lights_up_what_it_adopts_and_nothing_else(
    shared: Page, daemon: httpx.Client
) -> None:
    found = shared.locator(".bar .found")
    expect(found).to_have_count(0)  # any more
    cached = say(daemon, QUESTIONS[0], SYSTEM)["prompt_tokens_details"]["cached_tokens"]
    expect(found).to_have_count(2)
    first, question = sorted((bar for bar in bars(shared) if bar.found), key=lambda bar: bar.x)
    assert first.x == 0
    assert question.is_behind(first)
    assert first.found == first.tokens
    assert question.found == cached - first.tokens < question.tokens
    expect(found).to_have_count(0)


def test_one_namespace_is_cleared_alone(page: Page, daemon: httpx.Client) -> None:
    for salt in ("", "mine"):
        messages = [{"role": "user", "content": QUESTIONS[0]}]
        body = {"messages": messages, "max_tokens": 4, "cache_salt": salt}
        daemon.post("/v1/chat/completions", json=body).raise_for_status()
    salted = page.locator(".namespace").filter(has_text="salted")
    expect(salted).to_have_count(1)
    salted.get_by_role("button", name="Clear this namespace").click()
    expect(page.get_by_role("dialog")).to_contain_text("salted")
    expect(page.get_by_role("dialog")).not_to_contain_text("responses")
    page.get_by_role("dialog").get_by_role("button", name="Clear", exact=True).click()
    expect(page.locator(".bar")).to_have_count(1)
    expect(salted).to_have_count(0)


def test_a_click_tells_of_a_bar_and_the_keyboard_does_too(shared: Page) -> None:
    first = min(bars(shared), key=lambda bar: bar.x)
    details = shared.get_by_role("region", name="The selected run of tokens")
    shared.locator(f".bar[data-tokens='{first.tokens}']").click()
    expect(details).to_contain_text(f"Tokens 0 to {first.tokens}")
    expect(details).to_contain_text("--dashboard-text")
    shared.keyboard.press("ArrowRight")
    shared.keyboard.press("Enter")
    expect(details).to_contain_text(f"Tokens {first.tokens} to")
    shared.get_by_role("button", name="Close the details").click()
    expect(details).to_have_count(0)


def test_a_click_fills_the_width_with_a_bar_and_what_is_behind_it(shared: Page) -> None:
    whole = bars(shared)
    first, one, *_ = whole
    shared.locator(".bar").first.click()
    trail = shared.get_by_role("navigation", name="Where the picture begins")
    expect(trail).to_contain_text(f"0 to {first.tokens}")
    end = max(bar.x + bar.width for bar in bars(shared))
    assert end > max(bar.x + bar.width for bar in whole)
    shared.locator(".bar").nth(1).click()
    expect(shared.locator(".bar")).to_have_count(1)
    (alone,) = bars(shared)
    assert (alone.x, alone.tokens) == (0, one.tokens)
    assert alone.width == pytest.approx(end, abs=1)
    trail.get_by_role("button", name=f"0 to {first.tokens}").click()
    expect(shared.locator(".bar")).to_have_count(4)
    trail.get_by_role("button", name="All tokens").click()
    expect(trail).to_have_count(0)
    assert bars(shared) == whole


def test_the_keyboard_goes_in_and_out(shared: Page) -> None:
    shared.locator(".bar[tabindex='0']").focus()
    shared.keyboard.press("ArrowRight")
    shared.keyboard.press("Enter")
    expect(shared.locator(".bar")).to_have_count(1)
    inner = shared.locator(".bar")
    expect(inner).to_be_focused()
    inner_id = inner.get_attribute("data-node")
    shared.keyboard.press("Escape")
    expect(shared.locator(".bar")).to_have_count(4)
    expect(shared.locator(f".bar[data-node='{inner_id}']")).to_be_focused()
    shared.keyboard.press("Enter")
    shared.get_by_role("button", name="All tokens").press("Enter")
    expect(shared.locator(".bar")).to_have_count(4)
    expect(shared.locator(f".bar[data-node='{inner_id}']")).to_be_focused()


def test_what_fills_the_width_may_be_cleared(page: Page, daemon: httpx.Client) -> None:
    say(daemon, QUESTIONS[0])
    with page.expect_response("**/admin/cache/nodes/*"):  # its text, which is gone with it
        page.locator(".bar").click()
    daemon.post("/admin/cache/clear").raise_for_status()
    expect(page.get_by_role("heading", name="Nothing is cached yet")).to_be_visible()
    expect(page.get_by_text("No longer in the cache")).to_be_visible()
    say(daemon, QUESTIONS[1])
    expect(page.locator(".bar")).to_have_count(1)
