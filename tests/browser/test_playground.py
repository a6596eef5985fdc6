"""The chat in the page."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest
from playwright.sync_api import Page, expect

from engine.api import QueueFull
from engine.values.request import Request
from server.settings import Settings
from tests.browser.conftest import Serve, Visit
from tests.browser.seen import bars, grave
from tests.contract.fake_engine import ByteTokenizer, FakeEngine, Gate, Script

MARKDOWN = """# Title

*One* [link](https://example.org), `code`, and

- a list

> a quotation

```python
print(1)
```

| a | b |
|---|---|
| 1 | 2 |
"""
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
    expect(answer.locator(".figures")).to_contain_text(re.compile(r"\d+ tokens generated"))
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


def test_an_answer_has_a_rate_unless_all_of_it_came_at_once(page: Page, engine: FakeEngine) -> None:
    gate = Gate()
    engine.script = Script(answers=("Hello, and more",), gate=gate, gate_after_tokens=5)
    send(page, "Hi")
    expect(page.locator(".message.assistant .text")).to_have_text("Hello")
    page.wait_for_timeout(50)
    gate.open()
    expect(page.locator(".figures")).to_contain_text(re.compile(r"\d+ tokens/s"))
    chunk = {"choices": [{"index": 0, "delta": {"content": "All."}, "finish_reason": "stop"}]}
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )
    send(page, "Hi")
    expect(page.locator(".message.assistant").last).to_have_attribute("data-state", "done")
    expect(page.locator(".figures").last).not_to_contain_text("tokens/s")


@pytest.mark.parametrize("focused", ["Your message", "The conversation", None])
def test_escape_stops_it_as_well(page: Page, engine: FakeEngine, focused: str | None) -> None:
    engine.script = Script(answers=("Hello, and more",), gate=Gate(), gate_after_tokens=5)
    send(page, "Hi")
    expect(page.locator(".message.assistant .text")).to_have_text("Hello")
    if focused is not None:
        page.get_by_label(focused).focus()
    page.keyboard.press("Escape")
    expect(page.locator(".figures")).to_have_text("stopped")
    assert engine.aborted.get(timeout=10)


def test_escape_elsewhere_is_not_for_the_chat(page: Page, engine: FakeEngine) -> None:
    gate = Gate()
    engine.script = Script(answers=("Hello, and more",), gate=gate, gate_after_tokens=5)
    send(page, "Hi")
    expect(page.locator(".message.assistant .text")).to_have_text("Hello")
    page.locator(".bar").first.press("Escape")
    gate.open()
    expect(page.locator(".message.assistant")).to_have_attribute("data-state", "done")


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


def test_an_answer_says_how_many_tokens_were_drafted(page: Page, engine: FakeEngine) -> None:
    send(page, "plain")
    figures = page.locator(".message.assistant .figures")
    expect(figures).to_contain_text("tokens generated")
    expect(figures).not_to_contain_text("draft")
    engine.script.expected = engine.script.answers[0][:5]
    send(page, "again")
    expect(figures.last).to_contain_text("5 from drafts")


def test_eight_at_once_share_their_prompt(
    visit: Visit, demo_url: str, daemon: httpx.Client
) -> None:
    page = visit(demo_url)
    send(page, "How does the cache work?", "Send to 8 at once")
    answer = page.locator(".message.assistant")
    expect(answer.locator(".branches")).to_contain_text("1 of 8")
    expect(answer.locator(".figures")).to_contain_text("tokens generated in 8 answers together")
    answer.get_by_role("button", name="Next branch").click()
    expect(answer.locator(".branches")).to_contain_text("2 of 8")
    expect(answer.locator(".text")).not_to_be_empty()
    expect(page.locator(".bar").first).to_be_visible()
    assert len([bar for bar in bars(page) if bar.x == 0]) == 1


def test_what_failed_is_sent_once_more(page: Page, engine: FakeEngine) -> None:
    engine.script = Script(fails_after_tokens=3)
    send(page, "Hi")
    answer = page.locator(".message.assistant")
    expect(answer).to_have_attribute("data-state", "failed")
    expect(page.get_by_role("alert")).to_contain_text("it broke")
    engine.script = Script()
    page.get_by_role("button", name="Retry").click()
    expect(answer).to_have_attribute("data-state", "done")
    expect(answer.locator(".text")).to_have_text("Hello, wörld!")
    expect(answer.locator(".branches")).to_contain_text("2 of 2")  # the other had begun
    expect(page.get_by_role("button", name="Retry")).to_have_count(0)
    first, again = (engine.submitted.get(timeout=10) for _ in range(2))
    assert first.prompt == again.prompt


def test_what_was_refused_leaves_no_branch(
    visit: Visit, scripted_url: str, engine: FakeEngine
) -> None:
    page = visit(scripted_url, expected="429")
    engine.script = Script(refusal=QueueFull("The queue is full.", 1))
    send(page, "Hi", "Send to 8 at once")
    answer = page.locator(".message.assistant")
    expect(answer).to_have_attribute("data-state", "failed")
    expect(page.get_by_role("alert")).to_contain_text("queue is full")
    engine.script = Script()
    page.get_by_role("button", name="Retry").click()
    expect(answer).to_have_attribute("data-state", "done")
    expect(answer.locator(".branches")).to_contain_text("1 of 8")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_temperature_and_max_tokens_go_with_the_message(page: Page, engine: FakeEngine) -> None:
    send(page, "Hi")
    expect(page.locator(".message.assistant")).to_have_attribute("data-state", "done")
    page.get_by_text("Sampling and a tool").click()
    expect(page.get_by_label("Temperature")).to_have_attribute("placeholder", "1 by default")
    page.get_by_label("Temperature").fill("0.3")
    page.get_by_label("Max tokens").fill("5")
    send(page, "Hi")
    expect(page.locator(".message.assistant").last.locator(".text")).to_have_text("Hello")
    expect(page.locator(".figures").last).to_contain_text("5 tokens generated")
    expect(page.locator(".figures").last).to_contain_text("stopped at max tokens")
    expect(
        page.get_by_text("Sampling and a tool: temperature 0.3, at most 5 tokens")
    ).to_be_visible()
    silent, said = (engine.submitted.get(timeout=10) for _ in range(2))
    assert (silent.sampling.temperature, said.sampling.temperature) == (1.0, 0.3)
    assert silent.max_tokens > said.max_tokens == 5


def test_a_field_keeps_to_what_the_daemon_takes(page: Page, engine: FakeEngine) -> None:
    page.get_by_text("Sampling and a tool").click()
    for name, typed, taken in (("Temperature", "5", "2"), ("Max tokens", "-3", "1")):
        page.get_by_label(name).fill(typed)
        page.get_by_label(name).blur()
        expect(page.get_by_label(name)).to_have_value(taken)
    send(page, "Hi")
    expect(page.locator(".message.assistant")).to_have_attribute("data-state", "done")
    assert engine.submitted.get(timeout=10).sampling.temperature == 2


def test_what_the_daemon_does_not_take_is_told_and_can_be_mended(
    visit: Visit, scripted_url: str
) -> None:
    page = visit(scripted_url, expected="400")
    page.get_by_text("System prompt").click()
    page.get_by_label("System prompt").fill("x" * 600)
    send(page, "Hi")
    expect(page.get_by_role("alert")).to_contain_text("context")
    expect(page.get_by_label("System prompt")).to_be_hidden()  # folded, so that the chat has room
    page.get_by_text("System prompt").click()
    page.get_by_label("System prompt").fill("")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".message.assistant")).to_have_attribute("data-state", "done")


def test_an_answer_is_markdown_and_its_code_can_be_copied(
    visit: Visit, serve: Serve, engine: FakeEngine
) -> None:
    engine.script = Script(answers=("Try *this*:\n\n```python\nprint(1)\n```\n",))
    url = serve(engine, Settings(port=0))
    page = visit(url, permissions=["clipboard-read", "clipboard-write"])
    send(page, "Hi")
    answer = page.locator(".message.assistant")
    expect(answer.locator("em")).to_have_text("this")
    answer.get_by_role("button", name="Copy: python").click()
    expect(answer.get_by_role("button", name="Copied: python")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "print(1)"


def test_code_can_be_copied_where_browsers_have_no_clipboard(
    page: Page, engine: FakeEngine
) -> None:
    """As for a page that comes unencrypted from another machine."""
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    engine.script = Script(answers=("```\nprint(1)\n```\n",))
    send(page, "Hi")
    page.locator(".message").get_by_role("button", name="Copy").click()
    expect(page.locator(".message").get_by_role("button", name="Copied")).to_be_visible()
    page.get_by_label("Your message").focus()
    page.keyboard.press("ControlOrMeta+V")
    expect(page.get_by_label("Your message")).to_have_value("print(1)")


@dataclass
class CallingEngine(FakeEngine):
    """Calls a tool until its answers say something else, an answer for each request."""

    said: Iterator[str] = field(default_factory=lambda: iter(()))
    tokenizer: ByteTokenizer = field(
        default_factory=lambda: ByteTokenizer(chat_template="<tool_call>")
    )

    def _answer(self, request: Request, index: int) -> bytes:
        return next(self.said).encode()


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def offer_tool(page: Page) -> None:
    page.get_by_text("Sampling and a tool").click()
    page.get_by_label("Offer a tool").check()


def test_a_tool_is_called_answered_by_the_page_and_the_model_goes_on(
    visit: Visit, serve: Serve
) -> None:
    engine = CallingEngine(said=iter((call("get_time", timezone="Asia/Tokyo"), "It is late.")))
    url = serve(engine, Settings(port=0, tool_parser="hermes"))
    page = visit(url)
    offer_tool(page)
    send(page, "What time is it in Tokyo?")
    answer = page.locator(".message.assistant")
    expect(answer).to_have_count(2)
    expect(answer.first.locator(".call")).to_have_text('calls get_time({"timezone": "Asia/Tokyo"})')
    expect(page.locator(".message.tool")).to_contain_text("get_time says")
    expect(page.locator(".message.tool")).to_contain_text(re.compile(r"20\d\d .*GMT\+9"))
    expect(answer.last.locator(".text")).to_have_text("It is late.")
    expect(answer.last.locator(".figures")).to_contain_text("tokens generated")
    told = page.locator(".message.tool code").inner_text()
    engine.submitted.get(timeout=10)
    assert told.encode() in bytes(engine.submitted.get(timeout=10).prompt)


def test_the_embedded_model_can_try_the_tool(
    visit: Visit, demo_url: str, daemon: httpx.Client
) -> None:
    page = visit(demo_url)
    offer_tool(page)
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Get the time in Paris.").click()
    expect(page.locator(".message.tool")).to_contain_text(re.compile("CES?T"))
    answer = page.locator(".message.assistant").last
    expect(answer).to_have_attribute("data-state", "done")
    expect(answer.locator(".figures b").first).not_to_have_text("0")  # the first leg's prompt


def test_axe_finds_nothing_grave_in_what_was_said(visit: Visit, serve: Serve) -> None:
    engine = CallingEngine(said=iter((call("get_time"), MARKDOWN)))
    url = serve(engine, Settings(port=0, tool_parser="hermes"))
    page = visit(url)
    offer_tool(page)
    send(page, "Hi")
    expect(page.locator(".message.assistant table")).to_be_visible()
    expect(page.locator(".message.assistant").last).to_have_attribute("data-state", "done")
    assert not grave(page)


def test_a_tool_that_is_called_wrongly_says_so_and_no_model_calls_for_ever(
    visit: Visit, serve: Serve
) -> None:
    wrong = (call("get_time", timezone="Mars/North"), call("rm", path="/"))
    said = (*wrong, *[call("get_time")] * 3, "I give up.")
    engine = CallingEngine(said=iter(said))
    url = serve(engine, Settings(port=0, tool_parser="hermes"))
    page = visit(url)
    offer_tool(page)
    send(page, "Hi")
    results = page.locator(".message.tool")
    expect(page.locator(".message.assistant .text").last).to_have_text("I give up.")
    expect(results).to_have_count(5)
    expect(results.nth(0)).to_contain_text("Error: Invalid time zone specified: Mars/North")
    expect(results.nth(1)).to_contain_text("Error: there is no tool rm")
    asked = [engine.submitted.get(timeout=10) for _ in said]
    assert engine.submitted.empty()
    assert len(asked) == 6


def test_hostile_text_in_the_cache_is_shown_as_text(
    visit: Visit, serve: Serve, engine: FakeEngine
) -> None:
    engine.node_tokens = {1: tuple(HOSTILE.encode())}
    url = serve(engine, Settings(port=0, dashboard_text=True))
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
