"""Keys, restarts, and whom the page serves."""

import socket
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect
from pydantic import SecretStr

from server.settings import Settings
from tests.browser.conftest import Serve, Visit
from tests.browser.demo import DESKTOP, PHONE, say
from tests.browser.seen import grave
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine

KEY = "open-sesame"
MOST_PIXELS = 2_300
COLUMNS = ".watching", ".side"
END = """(selector) =>
  [...document.querySelectorAll(selector)].at(-1).getBoundingClientRect().bottom"""


def test_it_asks_for_the_key_and_sends_it_in_a_header_alone(visit: Visit, serve: Serve) -> None:
    url = serve(FakeEngine(), Settings(port=0, api_key=SecretStr(KEY)))
    page = visit(url, expected="401")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("alert")).to_have_text("The daemon does not know this key.")
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("status")).to_have_text("live")
    page.reload()
    expect(page.get_by_role("status")).to_have_text("live")
    assert asked
    assert not [address for address in asked if KEY in address]
    assert not page.context.cookies()
    assert page.evaluate("localStorage.length") == 0


def test_it_comes_back_when_the_daemon_does(visit: Visit) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with running(FakeEngine(), Settings(port=port)) as url:
        page = visit(url, expected="ERR_|Failed to load")
        expect(page.get_by_role("status")).to_have_text("live")
    expect(page.get_by_role("status")).to_contain_text("trying again")
    with running(FakeEngine(), Settings(port=port)):
        expect(page.get_by_role("status")).to_have_text("live")


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing_grave(
    visit: Visit, demo_url: str, daemon: httpx.Client, viewport: Any
) -> None:
    page = visit(demo_url, viewport=viewport, expected="404")  # of a bar split before the click
    expect(page.get_by_role("heading", name="Nothing is cached yet")).to_be_visible()
    assert not grave(page)
    usage = say(daemon, "Who are you?")
    page.get_by_label("Your message").fill("Who are you?")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator(".figures")).to_be_visible()
    page.locator(".bar").first.click()
    page.get_by_text("The same as tables").click()
    expect(page.get_by_role("table").first).to_be_visible()
    assert usage["prompt_tokens"]
    assert not grave(page)


@pytest.mark.parametrize("n_answers", [0, 6])
def test_both_columns_end_at_the_same_height(
    visit: Visit, demo_url: str, daemon: httpx.Client, n_answers: int
) -> None:
    for i in range(n_answers):
        say(daemon, f"Repeat: {i} boats.")
    page = visit(demo_url, viewport={"width": 1440, "height": 900})
    expect(page.locator("#daemon")).to_be_visible()
    expect(page.locator(".bar").nth(n_answers // 2)).to_be_attached(attached=n_answers > 0)
    ends = [
        page.evaluate(END, f"main > {column}{last}") for column in COLUMNS for last in ("", " > *")
    ]
    assert max(ends) - min(ends) < 1
    assert page.evaluate("document.documentElement.scrollHeight") < MOST_PIXELS


def test_on_a_phone_the_page_is_not_long_and_scrolls_in_one_direction(
    visit: Visit, demo_url: str, daemon: httpx.Client
) -> None:
    say(daemon, "Who are you?")
    page = visit(demo_url, viewport=PHONE)
    expect(page.locator("#daemon")).to_be_visible()
    expect(page.locator(".bar")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollHeight") < 2 * MOST_PIXELS
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
