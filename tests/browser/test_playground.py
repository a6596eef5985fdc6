"""The chat in the page."""

import httpx
import pytest
from playwright.sync_api import Page, expect

from engine.api import QueueFull
from server.settings import Settings
from tests.browser.conftest import Visit
from tests.browser.picture import bars
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine, Gate, Script

HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


def send(page: Page, text: str, button: str = "Send") -> None:
    page.get_by_label("Your message").fill(text)
    page.get_by_role("button", name=button, exact=True).click()


@pytest.fixture
def page(visit: Visit, scripted_url: str) -> Page:
    return visit(scripted_url)


def test_an_answer_is_streamed_and_says_what_it_took(
    visit: Visit, demo_url: str, daemon: httpx.Client
) -> None:
    page = visit(demo_url)
    send(page, "Who are you?")
    answer = page.locator(".message.assistant")
    expect(answer).to_have_attribute("data-state", "done")
    expect(answer.locator(".text")).to_contain_text("Rootstock")
    expect(answer.locator(".figures")).to_contain_text("prompt tokens cached")
    expect(answer.locator(".figures")).to_contain_text("tokens/s")
    send(page, "How does the cache work?")
    expect(answer.last).to_have_attribute("data-state", "done")
    cached = answer.last.locator(".figures b").first.inner_text()
    assert int(cached) > 0


def test_text_appears_while_it_is_written_and_stop_ends_it(page: Page, engine: FakeEngine) -> None:
    engine.script = Script(answers=("Hello, and more",), gate=Gate(), gate_after_tokens=5)
    send(page, "Hi")
    answer = page.locator(".message.assistant")
    expect(answer.locator(".text")).to_have_text("Hello")
    expect(answer).to_have_attribute("data-state", "writing")
    page.get_by_role("button", name="Stop").click()
    expect(answer.locator(".figures")).to_have_text("stopped")
    assert engine.aborted.get(timeout=10)


def test_an_edited_message_begins_a_branch_and_the_old_one_stays(
    page: Page, engine: FakeEngine
) -> None:
    send(page, "first")
    expect(page.locator(".message.assistant")).to_have_attribute("data-state", "done")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("second")
    page.get_by_role("button", name="Send as a new branch").click()
    question = page.locator(".message.user")
    expect(question).to_contain_text("second")
    expect(question.locator(".branches")).to_contain_text("2 of 2")
    expect(page.locator(".message.assistant")).to_have_attribute("data-state", "done")
    question.get_by_role("button", name="Previous branch").click()
    expect(question).to_contain_text("first")
    assert engine.submitted.qsize() == 2


def test_eight_at_once_share_their_prompt(
    visit: Visit, demo_url: str, daemon: httpx.Client
) -> None:
    page = visit(demo_url)
    send(page, "How does the cache work?", "Send to 8 at once")
    answer = page.locator(".message.assistant")
    expect(answer.locator(".branches")).to_contain_text("1 of 8")
    expect(answer.locator(".figures")).to_contain_text("8 answers together")
    answer.get_by_role("button", name="Next branch").click()
    expect(answer.locator(".branches")).to_contain_text("2 of 8")
    expect(answer.locator(".text")).not_to_be_empty()
    expect(page.locator(".bar").first).to_be_visible()
    assert len([bar for bar in bars(page) if bar.x == 0]) == 1


def test_an_error_is_told_in_the_daemons_words(page: Page, engine: FakeEngine) -> None:
    engine.script = Script(fails_after_tokens=3)
    send(page, "Hi")
    expect(page.get_by_role("alert")).to_be_visible()


def test_a_refusal_is_told_in_the_daemons_words(
    visit: Visit, scripted_url: str, engine: FakeEngine
) -> None:
    page = visit(scripted_url, expected="429")
    engine.script = Script(refusal=QueueFull("The queue is full.", 1))
    send(page, "Hi")
    expect(page.get_by_role("alert")).to_contain_text("queue is full")


def test_hostile_text_in_the_cache_is_shown_as_text(visit: Visit, engine: FakeEngine) -> None:
    engine.node_tokens = {1: tuple(HOSTILE.encode())}
    with running(engine, Settings(port=0, dashboard_text=True)) as url:
        page = visit(url)
        page.locator(".bar[data-node='1']").click(position={"x": 5, "y": 5})
        expect(page.locator(".node-text")).to_have_text(HOSTILE)
        assert page.title() == "Rootstock"


def test_hostile_text_is_shown_as_text(page: Page, engine: FakeEngine) -> None:
    engine.script = Script(answers=(HOSTILE,))
    page.get_by_text("System prompt").click()
    page.get_by_label("System prompt").fill(HOSTILE)
    send(page, HOSTILE)
    expect(page.locator(".message.assistant")).to_have_attribute("data-state", "done")
    assert page.locator(".message.assistant .text").inner_text() == HOSTILE
    assert page.locator(".message.user .text").inner_text() == HOSTILE
    assert page.locator("#app img[onerror], #app script").count() == 0
    assert page.title() == "Rootstock"
