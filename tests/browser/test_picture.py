"""The picture shows what the cache of a real daemon holds."""

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Visit
from tests.browser.demo import QUESTIONS, SYSTEM, say
from tests.browser.picture import GAP, bars


@pytest.fixture
def page(visit: Visit, demo_url: str, daemon: httpx.Client) -> Page:
    page = visit(demo_url)
    expect(page.get_by_role("heading", name="Nothing is cached yet")).to_be_visible()
    return page


def test_three_requests_with_one_system_prompt_are_one_bar_with_three_behind_it(
    page: Page, daemon: httpx.Client
) -> None:
    for question in QUESTIONS:
        say(daemon, question, SYSTEM)
    expect(page.locator(".bar")).to_have_count(4)
    shared, *others = sorted(bars(page), key=lambda bar: bar.x)
    assert all(bar.is_behind(shared) for bar in others)


def test_bars_are_as_wide_as_their_tokens_are_many(page: Page, daemon: httpx.Client) -> None:
    for question in QUESTIONS:
        say(daemon, question, SYSTEM)
    expect(page.locator(".bar")).to_have_count(4)
    shown = bars(page)
    assert len({bar.tokens for bar in shown}) > 1
    widths = [(bar.width + GAP) / bar.tokens for bar in shown]
    assert max(widths) - min(widths) < 0.01 * max(widths)


def test_it_has_every_token_that_was_computed_and_kept(page: Page, daemon: httpx.Client) -> None:
    usage = say(daemon, QUESTIONS[0])
    expect(page.locator(".bar")).to_have_count(1)
    (bar,) = bars(page)
    assert bar.tokens == usage["prompt_tokens"] + usage["completion_tokens"] - 1
    assert bar.holders == 0


def test_after_a_clear_it_is_empty(page: Page, daemon: httpx.Client) -> None:
    say(daemon, QUESTIONS[0])
    expect(page.locator(".bar")).to_have_count(1)
    page.get_by_role("button", name="Clear the cache").click()
    expect(page.locator(".bar")).to_have_count(1)  # it asks first
    page.get_by_role("dialog").get_by_role("button", name="Clear", exact=True).click()
    expect(page.get_by_role("heading", name="Nothing is cached yet")).to_be_visible()
    assert daemon.get("/admin/cache/stats").json()["blocks_cached"] == 0


def test_a_resend_lights_up_what_it_adopts_and_nothing_else(
    page: Page, daemon: httpx.Client
) -> None:
    for text in QUESTIONS:
        say(daemon, text, SYSTEM)
    expect(page.locator(".bar")).to_have_count(4)
    expect(page.locator(".bar .found")).to_have_count(0)  # any more
    cached = say(daemon, QUESTIONS[0], SYSTEM)["prompt_tokens_details"]["cached_tokens"]
    expect(page.locator(".bar .found")).to_have_count(2)
    shared, question = sorted((bar for bar in bars(page) if bar.found), key=lambda bar: bar.x)
    assert shared.x == 0
    assert question.is_behind(shared)
    assert shared.found == shared.tokens
    assert question.found == cached - shared.tokens < question.tokens
    expect(page.locator(".bar .found")).to_have_count(0)


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


def test_a_click_tells_of_a_bar_and_the_keyboard_does_too(page: Page, daemon: httpx.Client) -> None:
    for question in QUESTIONS:
        say(daemon, question, SYSTEM)
    expect(page.locator(".bar")).to_have_count(4)
    shared = min(bars(page), key=lambda bar: bar.x)
    details = page.get_by_role("region", name="The selected run of tokens")
    page.locator(f".bar[data-tokens='{shared.tokens}']").click()
    expect(details).to_contain_text(f"Tokens 0 to {shared.tokens}")
    expect(details).to_contain_text("--dashboard-text")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(details).to_contain_text(f"Tokens {shared.tokens} to")
    page.get_by_role("button", name="Close the details").click()
    expect(details).to_have_count(0)


def test_a_click_fills_the_width_with_a_bar_and_what_is_behind_it(
    page: Page, daemon: httpx.Client
) -> None:
    for question in QUESTIONS:
        say(daemon, question, SYSTEM)
    expect(page.locator(".bar")).to_have_count(4)
    whole = bars(page)
    shared, one, *_ = whole
    page.locator(".bar").first.click()
    trail = page.get_by_role("navigation", name="Where the picture begins")
    expect(trail).to_contain_text(f"0 to {shared.tokens}")
    end = max(bar.x + bar.width for bar in bars(page))
    assert end > max(bar.x + bar.width for bar in whole)
    page.locator(".bar").nth(1).click()
    expect(page.locator(".bar")).to_have_count(1)
    (alone,) = bars(page)
    assert (alone.x, alone.tokens) == (0, one.tokens)
    assert alone.width == pytest.approx(end, abs=1)
    trail.get_by_role("button", name=f"0 to {shared.tokens}").click()
    expect(page.locator(".bar")).to_have_count(4)
    trail.get_by_role("button", name="All tokens").click()
    expect(trail).to_have_count(0)
    assert bars(page) == whole


def test_the_keyboard_goes_in_and_out(page: Page, daemon: httpx.Client) -> None:
    for question in QUESTIONS:
        say(daemon, question, SYSTEM)
    expect(page.locator(".bar")).to_have_count(4)
    page.locator(".bar[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator(".bar")).to_have_count(1)
    inner = page.locator(".bar")
    expect(inner).to_be_focused()
    inner_id = inner.get_attribute("data-node")
    page.keyboard.press("Escape")
    expect(page.locator(".bar")).to_have_count(4)
    expect(page.locator(f".bar[data-node='{inner_id}']")).to_be_focused()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="All tokens").press("Enter")
    expect(page.locator(".bar")).to_have_count(4)
    expect(page.locator(f".bar[data-node='{inner_id}']")).to_be_focused()


def test_what_fills_the_width_may_be_cleared(page: Page, daemon: httpx.Client) -> None:
    say(daemon, QUESTIONS[0])
    with page.expect_response("**/admin/cache/nodes/*"):  # its text, which is gone with it
        page.locator(".bar").click()
    daemon.post("/admin/cache/clear").raise_for_status()
    expect(page.get_by_role("heading", name="Nothing is cached yet")).to_be_visible()
    expect(page.get_by_text("No longer in the cache")).to_be_visible()
    say(daemon, QUESTIONS[1])
    expect(page.locator(".bar")).to_have_count(1)


def test_the_tables_say_the_same(page: Page, daemon: httpx.Client) -> None:
    usage = say(daemon, QUESTIONS[0])
    expect(page.locator(".bar")).to_have_count(1)
    page.get_by_text("The same as tables").click()
    row = page.get_by_role("row").filter(has_text="the beginning")
    kept = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    expect(row.get_by_role("cell").nth(4)).to_have_text(str(kept))


def test_the_numbers_count(page: Page, daemon: httpx.Client) -> None:
    say(daemon, QUESTIONS[0])
    say(daemon, QUESTIONS[0])
    expect(page.locator(".numbers")).to_contain_text("%")
    expect(page.locator(".memory li").filter(has_text="cached")).not_to_contain_text("cached 0 ")
