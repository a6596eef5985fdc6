"""Live requests with what they wait for, the log, and the series."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from playwright.sync_api import Locator, Page, Route, expect
from pydantic import SecretStr

from engine.values.request import WaitReason
from server.admin.activity import INTERVAL_SECONDS
from server.settings import Settings
from tests.browser.conftest import Serve, Visit
from tests.browser.demo import CLIENT_SECONDS, DESKTOP, PHONE, QUESTIONS, SYSTEM, say
from tests.browser.seen import grave
from tests.contract.fake_engine import FakeEngine, Gate, Script

WAIT_SECONDS = 20
SECRET_TEXT = "<b>nobody may read this</b>"
WRITTEN = 5
QUEUED = 7
WAITS = {
    WaitReason.SLOTS: "waits for a slot",
    WaitReason.MEMORY: "waits for memory",
    WaitReason.TWIN: "waits for its twin",
    WaitReason.DISK: "waits for the disk",
    WaitReason.TURN: "waits for its turn",
}


@pytest.fixture
def asker(scripted_url: str) -> Iterator[ThreadPoolExecutor]:
    """Asks the scripted daemon, in threads of its own."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def gate(engine: FakeEngine, asker: ThreadPoolExecutor) -> Iterator[Gate]:
    """Closed behind a few tokens; opened before the asker waits for its answers."""
    engine.script = Script(gate=(gate := Gate()), gate_after_tokens=WRITTEN)
    yield gate
    if not gate.is_open:
        gate.open()


def ask(url: str, engine: FakeEngine, asker: ThreadPoolExecutor, **fields: object) -> None:
    """Returns when it waits at the gate."""
    body = {"prompt": SECRET_TEXT, **fields}
    asker.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=CLIENT_SECONDS)
    engine.at_gate.get(timeout=WAIT_SECONDS)


def live(page: Page) -> Locator:
    return page.get_by_role("table", name="Requests that are being answered").locator("tbody tr")


def finished(page: Page) -> Locator:
    return page.get_by_role("table", name="Requests that are over").locator("tbody tr")


def test_a_live_request_is_a_row(
    visit: Visit, scripted_url: str, engine: FakeEngine, gate: Gate, asker: ThreadPoolExecutor
) -> None:
    page = visit(scripted_url)
    section = page.locator("section.requests")
    expect(page.get_by_text("none is being answered")).to_be_visible()
    ask(scripted_url, engine, asker, n=2)
    row = live(page)
    expect(row).to_have_count(1)
    expect(row.locator(".who")).to_contain_text("python-httpx ×2")
    expect(row.locator(".who")).to_contain_text("/v1/completions, 127.0.0.1")
    expect(row).to_contain_text("generating")
    expect(row.locator("[data-head='Prompt']")).to_contain_text(str(len(SECRET_TEXT)))
    expect(row.locator("[data-head='Output']")).to_contain_text(str(2 * WRITTEN))
    expect(row.locator("[data-head='Output']")).to_contain_text("tokens/s")
    expect(page.get_by_text("1 request being answered")).to_be_visible()
    assert not grave(page)
    gate.open()
    expect(row).to_have_count(0)
    expect(finished(page)).to_have_count(1)
    expect(section).not_to_contain_text("nobody may read")


def test_a_row_says_how_many_tokens_were_drafted_where_any_were(
    visit: Visit, scripted_url: str, engine: FakeEngine, gate: Gate, asker: ThreadPoolExecutor
) -> None:
    httpx.post(f"{scripted_url}/v1/completions", json={"prompt": "Hi", "max_tokens": WRITTEN - 1})
    engine.script.expected = engine.script.answers[0][: WRITTEN + 1]
    ask(scripted_url, engine, asker)
    page = visit(scripted_url)
    expect(finished(page).locator("[data-head='Output']")).to_contain_text(str(WRITTEN - 1))
    expect(finished(page).locator("[data-head='Output']")).not_to_contain_text("draft")
    drafted = live(page).locator("[data-head='Output'] [title*='draft']")
    expect(drafted).to_have_text(f"{WRITTEN} from drafts")
    gate.open()
    drafted = finished(page).first.locator("[data-head='Output'] [title*='draft']")
    expect(drafted).to_have_text(f"{WRITTEN + 1} from drafts")


def test_who_waits_says_why(
    visit: Visit, scripted_url: str, engine: FakeEngine, gate: Gate, asker: ThreadPoolExecutor
) -> None:
    engine.script.gate_after_tokens = 0
    ask(scripted_url, engine, asker)
    page = visit(scripted_url)
    for reason, words in WAITS.items():
        engine.waits_for = reason
        expect(live(page).locator(".state")).to_contain_text(words)


def test_agents_are_named_and_requests_for_no_model_are_in_the_log(
    visit: Visit, scripted_url: str
) -> None:
    headers = {"User-Agent": "claude-cli/2.0.14 (external, cli)"}
    httpx.post(f"{scripted_url}/v1/completions", json={"prompt": "Hi"}, headers=headers)
    httpx.post(f"{scripted_url}/v1/completions", json={"prompt": "Hi", "model": "nope"})
    last, first = (finished(visit(scripted_url)).nth(i) for i in range(2))
    expect(first.locator(".who")).to_contain_text("Claude Code")
    expect(last.locator(".outcome")).to_have_text("404 model not found")
    expect(last).not_to_contain_text("NaN")


def test_a_long_queue_is_folded_with_its_count(
    visit: Visit, scripted_url: str, engine: FakeEngine, gate: Gate
) -> None:
    engine.script.gate_after_tokens = 0
    engine.waits_for = WaitReason.SLOTS
    with ThreadPoolExecutor(QUEUED) as pool:
        for _ in range(QUEUED):
            ask(scripted_url, engine, pool)
        page = visit(scripted_url)
        fold = page.get_by_role("button", name="queued")
        expect(fold).to_have_text(f"+{QUEUED - 2} queued: {QUEUED - 2} for a slot")
        expect(live(page)).to_have_count(2)
        fold.click()
        expect(live(page)).to_have_count(QUEUED)
        page.get_by_role("button", name="Fold the queue").click()
        expect(live(page)).to_have_count(2)
        gate.open()


def test_a_button_ends_one_after_it_was_asked_twice(
    visit: Visit, scripted_url: str, engine: FakeEngine, gate: Gate, asker: ThreadPoolExecutor
) -> None:
    ask(scripted_url, engine, asker)
    page = visit(scripted_url)
    live(page).get_by_role("button", name="End").click()
    expect(live(page)).to_have_count(1)
    live(page).get_by_role("button", name="Really?").click()
    assert engine.aborted.get(timeout=WAIT_SECONDS)
    expect(live(page)).to_have_count(0)
    expect(finished(page).locator(".outcome")).to_have_text("410 ended by admin")


def test_who_has_just_ended_cannot_be_ended_and_the_page_says_so(
    visit: Visit, scripted_url: str, engine: FakeEngine, gate: Gate, asker: ThreadPoolExecutor
) -> None:
    ask(scripted_url, engine, asker)
    page = visit(scripted_url, expected="404")
    live(page).get_by_role("button", name="End").click()

    def late(route: Route) -> None:
        gate.open()
        asker.shutdown()  # when all is answered
        route.continue_()

    page.route("**/cancel", late)
    live(page).get_by_role("button", name="Really?").click()
    expect(page.get_by_role("alert")).to_contain_text("There is no request")


def test_the_log_has_what_was_before_the_page(
    visit: Visit, demo_url: str, daemon: httpx.Client
) -> None:
    for question in QUESTIONS[:2]:
        say(daemon, question, SYSTEM)
    usage = say(daemon, QUESTIONS[0], SYSTEM)
    page = visit(demo_url)
    latest = finished(page).first
    expect(latest).to_contain_text("/v1/chat/completions")
    expect(latest.locator(".outcome")).to_have_text("200")
    prompt = latest.locator("[data-head='Prompt']")
    expect(prompt).to_contain_text(str(usage["prompt_tokens"]))
    share = usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]
    expect(prompt).to_contain_text(f"{share:.0%} cached")
    expect(latest.locator("[data-head='Output']")).to_contain_text("4")
    expect(latest.locator("[data-head='First token']")).to_contain_text("ms")
    number = finished(page).count()
    say(daemon, QUESTIONS[2])
    expect(finished(page)).to_have_count(number + 1)


def test_the_key_is_named(visit: Visit, serve: Serve) -> None:
    engine = FakeEngine()
    url = serve(engine, Settings(port=0, api_key=SecretStr("open-sesame")))
    headers = {"Authorization": "Bearer open-sesame"}
    httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=headers)
    page = visit(url, expected="401")
    page.get_by_label("API key").fill("open-sesame")
    page.get_by_role("button", name="Open").click()
    expect(finished(page).locator(".who")).to_contain_text("key ")
    page.close()  # before its daemon ends


def test_the_series_do_not_begin_with_the_page(
    visit: Visit, demo_url: str, daemon: httpx.Client
) -> None:
    say(daemon, QUESTIONS[0])
    page = visit(demo_url)
    expect(page.locator(".uplot")).to_have_count(6)
    page.wait_for_timeout(INTERVAL_SECONDS * 1000)  # till a point has the answer
    page.reload()
    share = page.locator("figure").filter(has_text="Hit share").locator(".now")
    expect(share).to_contain_text("%")


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_nothing_is_cut_off(
    visit: Visit,
    scripted_url: str,
    engine: FakeEngine,
    gate: Gate,
    asker: ThreadPoolExecutor,
    viewport: dict[str, int],
) -> None:
    engine.waits_for = WaitReason.MEMORY
    httpx.post(f"{scripted_url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
    ask(scripted_url, engine, asker, n=2)
    page = visit(scripted_url, viewport=viewport)
    expect(live(page)).to_have_count(1)
    live(page).get_by_role("button", name="End").click()
    expect(live(page).get_by_role("button", name="Really?")).to_be_visible()
    for region in ("Live requests", "Finished requests"):
        box = page.get_by_role("region", name=region)
        assert box.evaluate("box => box.scrollWidth <= box.clientWidth"), region
    assert not grave(page)
