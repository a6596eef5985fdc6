"""Several models: which are in memory, what loads and unloads them, and what the page is about."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, Route, expect

from engine.api import Engine, ModelError, Progress
from engine.launch import fetch_repository
from engine.values.settings import EngineConfig
from engine.values.stats import ModelMemory
from server.models.registry import ModelRegistry
from server.pressure.guard import MemoryGuard
from server.settings import Settings
from tests.browser.conftest import Serve, Visit
from tests.browser.demo import DESKTOP, PHONE
from tests.browser.seen import grave
from tests.contract.access.helpers import key_file, secret_of
from tests.contract.daemon import registry_of, serving
from tests.contract.fake_engine import CARD, DISK, FakeEngine, Gate
from tests.contract.pressure import ScriptedSources

DEMO = "rootstock-demo"
BUDGET = "1600MiB"
NEED_BYTES = 400 << 20
LINE = "loading weights, 0.1 GB"
REPOSITORY = "some/repository"


class Engines:
    """Starts a fake engine each time, when the gate is open."""

    def __init__(self) -> None:
        self.gate: Gate | None = None
        self.failure = ""
        self.started: list[FakeEngine] = []

    async def __call__(self, config: EngineConfig, report: Callable[[str], None]) -> Engine:
        report(LINE)
        if self.gate is not None:
            await self.gate.passed()
        if self.failure:
            raise ModelError(self.failure)
        self.started.append(FakeEngine(card=replace(CARD, name=config.model)))
        return self.started[-1]


@pytest.fixture
def engines() -> Engines:
    return Engines()


def settings_of(*others: dict[str, Any], **settings: Any) -> Settings:
    """Of a daemon with a model that is there at start, and others that are not."""
    first = {"model": DEMO, "served_model_name": ["first", "alias"]}
    models = [first, *({"preload": False, **other} for other in others)]
    return Settings.model_validate(
        {"port": 0, "models": models, "memory_budget": BUDGET, **settings}
    )


SECOND = {"model": DEMO, "served_model_name": ["second"]}


def needed(config: EngineConfig, budget_bytes: int, storage_bytes: int) -> ModelMemory:
    kv_bytes = config.kv_cache_bytes or 0
    return ModelMemory(0, kv_bytes, 0, NEED_BYTES, 0, total_bytes=NEED_BYTES + kv_bytes)


Start = Callable[..., str]
"""Starts a daemon, and says where."""


@pytest.fixture
def start(engines: Engines, daemons: ExitStack) -> Iterator[Start]:
    yield lambda settings, fetch=fetch_repository: daemons.enter_context(
        serving(ModelRegistry(settings, engines, needed, fetch), settings)
    )
    if engines.gate is not None and not engines.gate.is_open:
        engines.gate.open()


@pytest.fixture
def two(start: Start) -> str:
    return start(settings_of(SECOND))


def row(page: Page, name: str) -> Locator:
    table = page.get_by_role("table", name="Models", exact=True)
    return table.locator("tbody tr").filter(has=page.locator(".who", has_text=name))


def choose(page: Page, name: str) -> None:
    page.get_by_role("combobox", name="Model").select_option(name)


def test_a_model_is_loaded_and_how_that_goes_is_seen(
    two: str, visit: Visit, engines: Engines
) -> None:
    page = visit(two)
    expect(row(page, "first").locator(".state")).to_contain_text("ready")
    expect(row(page, "first").locator(".who")).to_contain_text("also alias")
    expect(row(page, "second").locator(".state")).to_contain_text("not loaded")
    engines.gate = Gate()
    row(page, "second").get_by_role("button", name="Load").click()
    expect(row(page, "second").locator(".state")).to_contain_text("is being loaded")
    expect(row(page, "second")).to_contain_text(LINE)
    expect(page.get_by_role("progressbar", name="Loading second")).to_be_visible()
    expect(row(page, "second").get_by_role("button", name="Load")).to_be_disabled()
    assert not grave(page)
    engines.gate.open()
    expect(row(page, "second").locator(".state")).to_contain_text("ready")
    expect(page.get_by_role("progressbar")).to_have_count(0)
    bar = page.get_by_role("img", name="Memory of the models")
    for part in ("first ", "second ", "free"):
        assert part in (bar.get_attribute("aria-label") or "")


def test_the_page_is_about_the_model_that_is_chosen(
    two: str, visit: Visit, engines: Engines
) -> None:
    page = visit(two)
    expect(page.locator(".bar").first).to_be_visible()
    expect(page.locator("#daemon .facts")).to_contain_text("first")
    choose(page, "second")
    expect(page.get_by_role("heading", name="second is not in memory")).to_be_visible()
    expect(page.locator(".bar")).to_have_count(0)
    expect(page.locator("#daemon .facts")).to_contain_text("In memory")
    page.get_by_role("combobox", name="Client").select_option("curl")
    expect(page.locator("#connect")).to_contain_text('"model":"second"')
    page.get_by_role("combobox", name="Client").select_option("goose")
    expect(page.locator("#connect")).to_contain_text("--model second")
    page.get_by_role("button", name="Load second").click()
    expect(page.locator(".bar").first).to_be_visible()
    expect(page.locator("#daemon .facts")).to_contain_text(CARD.dtype)
    page.get_by_role("button", name="What is the capital of France?").click()
    expect(page.locator(".message.assistant[data-state='done']")).to_have_count(1)
    assert [engine.submitted.qsize() for engine in engines.started] == [0, 1]
    log = page.get_by_role("table", name="Requests that are over").locator("tbody tr")
    expect(log).to_contain_text("second, 127.0.0.1")


def test_an_adapter_is_chosen_as_its_model_is(start: Start, visit: Visit) -> None:
    page = visit(start(settings_of({**SECOND, "adapters": {"poet": "/no/such/adapter"}})))
    choose(page, "second:poet")
    expect(page.get_by_role("heading", name="second is not in memory")).to_be_visible()
    expect(page.locator("#daemon .facts")).to_contain_text("second")
    page.get_by_role("combobox", name="Client").select_option("curl")
    expect(page.locator("#connect")).to_contain_text('"model":"second:poet"')
    expect(page.get_by_role("combobox", name="Model").get_by_role("option")).to_have_text(
        ["first", "second", "second:poet"]
    )


def test_a_clear_is_of_the_model_that_is_chosen(two: str, visit: Visit, engines: Engines) -> None:
    page = visit(two)
    row(page, "second").get_by_role("button", name="Load").click()
    choose(page, "second")
    page.get_by_role("button", name="Clear the cache").click()
    page.get_by_role("dialog").get_by_role("button", name="Clear", exact=True).click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert [engine.cleared.qsize() for engine in engines.started] == [0, 1]


NOTE_WHAT_IS_GREY = """() => {
  window.noted = [];
  const note = () => {
    for (const section of document.querySelectorAll(".watching > section"))
      if (getComputedStyle(section).opacity !== "1") noted.push(section.className);
    for (const notice of document.querySelectorAll(".notice")) noted.push(notice.textContent);
  };
  const all = { subtree: true, childList: true, attributes: true };
  new MutationObserver(note).observe(document.body, all);
}"""
WAITING = {"Waiting for the daemon …", "Waiting for the first picture …"}


def noted(page: Page) -> set[str]:
    """Sections that have been grey, and notices, since NOTE_WHAT_IS_GREY began to note them."""
    found = set(page.evaluate("window.noted"))
    return found - WAITING


def test_a_model_is_unloaded_and_comes_back_and_the_page_is_not_grey_meanwhile(
    two: str, visit: Visit, engines: Engines
) -> None:
    page = visit(two)
    expect(page.locator(".bar").first).to_be_visible()
    page.evaluate(NOTE_WHAT_IS_GREY)
    row(page, "first").get_by_role("button", name="Unload").click()
    row(page, "first").get_by_role("button", name="Really?").click()
    expect(row(page, "first").locator(".state")).to_contain_text("not loaded")
    expect(page.get_by_role("heading", name="first is not in memory")).to_be_visible()
    assert engines.started[0].drained.qsize() == 1
    engines.gate = Gate()
    page.get_by_role("button", name="Load first").click()
    expect(page.get_by_role("heading", name="first is being loaded")).to_be_visible()
    assert not grave(page)
    engines.gate.open()
    expect(row(page, "first").locator(".state")).to_contain_text("ready")
    expect(page.locator(".bar").first).to_be_visible()
    assert len(engines.started) == 2
    assert noted(page) == set()


def test_the_page_is_not_grey_when_the_chosen_model_gives_its_memory_to_another(
    start: Start, visit: Visit
) -> None:
    large = {**SECOND, "kv_cache_bytes": "1GiB"}
    page = visit(start(settings_of(large)))
    expect(page.locator(".bar").first).to_be_visible()
    page.evaluate(NOTE_WHAT_IS_GREY)
    row(page, "second").get_by_role("button", name="Load").click()
    expect(row(page, "second").locator(".state")).to_contain_text("ready")
    expect(page.get_by_role("heading", name="first is not in memory")).to_be_visible()
    choose(page, "second")
    expect(page.locator(".bar").first).to_be_visible()
    assert noted(page) == set()


def test_only_the_cache_is_grey_when_a_ready_model_does_not_answer(two: str, visit: Visit) -> None:
    page = visit(two, expected="ERR_FAILED")
    picture = httpx.get(f"{two}/admin/cache/tree").text
    streams = iter([f"data: {picture}\n\n"])

    def answer(route: Route) -> None:
        """One picture, and nothing from then on."""
        body = next(streams, None)
        if body is None:
            route.abort()
        else:
            route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/admin/cache/tree/stream*", answer)
    page.reload()
    expect(page.locator(".notice")).to_contain_text("The model does not answer.")
    expect(page.locator("section.picture")).to_have_css("opacity", "0.5")
    for others in (".models", ".requests", ".series"):
        expect(page.locator(f"main section{others}")).to_have_css("opacity", "1")
    choose(page, "second")
    expect(page.get_by_role("heading", name="second is not in memory")).to_be_visible()
    expect(page.locator(".notice")).to_have_count(0)


def test_a_load_that_fails_says_why(
    start: Start, visit: Visit, tmp_path: Path, engines: Engines
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    settings = settings_of({"model": str(broken)})
    page = visit(start(settings), expected="503")
    row(page, "broken").get_by_role("button", name="Load").click()
    expect(row(page, "broken").locator(".state")).to_contain_text("has failed")
    expect(row(page, "broken").get_by_role("alert")).to_contain_text(str(broken))
    choose(page, "broken")
    expect(page.locator(".unloaded .problem")).to_contain_text(str(broken))
    assert not grave(page)


def test_one_that_can_never_be_loaded_is_refused_in_words(
    start: Start, visit: Visit, engines: Engines
) -> None:
    large = {**SECOND, "kv_cache_bytes": "8GiB"}
    settings = settings_of(large)
    page = visit(start(settings), expected="400")
    row(page, "second").get_by_role("button", name="Load").click()
    expect(row(page, "second").get_by_role("alert")).to_contain_text("memory_budget")
    expect(row(page, "second").locator(".state")).to_contain_text("not loaded")


def test_how_much_is_fetched_is_seen(start: Start, visit: Visit, engines: Engines) -> None:
    engines.gate = gate = Gate()

    async def fetch(repository: str, progress: Progress) -> None:
        progress(1_000_000_000, 4_000_000_000)
        await gate.passed()
        raise ModelError("the line is dead")

    settings = settings_of({"model": REPOSITORY}, preload=False)
    page = visit(start(settings, fetch), expected="503")
    row(page, REPOSITORY).get_by_role("button", name="Load").click()
    expect(row(page, REPOSITORY).locator(".state")).to_contain_text("is being fetched")
    expect(row(page, REPOSITORY)).to_contain_text("1.00 of 4.00 GB fetched")
    bar = page.get_by_role("progressbar", name=f"Loading {REPOSITORY}")
    expect(bar).to_have_attribute("value", "0.25")
    gate.open()
    expect(row(page, REPOSITORY).get_by_role("alert")).to_contain_text("the line is dead")


def test_a_users_key_chooses_and_asks_and_sees_nothing_of_the_memory(
    start: Start, visit: Visit, engines: Engines, tmp_path: Path
) -> None:
    keys = key_file(tmp_path, ann={"role": "admin"}, bob={})
    settings = settings_of(SECOND, api_keys_file=keys)
    page = visit(start(settings), expected="401|403")
    page.get_by_label("API key").fill(secret_of("bob"))
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("alert")).to_contain_text("signed in with a user key")
    choose(page, "second")
    page.get_by_role("combobox", name="Client").select_option("curl")
    expect(page.locator("#connect")).to_contain_text('"model":"second"')
    expect(page.get_by_role("table", name="Models")).to_have_count(0)
    expect(page.get_by_role("button", name="Load")).to_have_count(0)
    page.get_by_role("button", name="What is the capital of France?").click()
    expect(page.locator(".message.assistant[data-state='done']")).to_have_count(1)
    assert engines.started[1].submitted.qsize() == 1


def test_alarms_stand_on_top_in_a_line_each(serve: Serve, visit: Visit) -> None:
    engine = FakeEngine(disk=replace(DISK, write_fault="no_space"))
    page = visit(serve(engine, Settings(port=0)))
    alarms = page.get_by_role("region", name="Alarms")
    expect(alarms.get_by_role("listitem")).to_have_text(
        "The disk cache cannot be written: no_space. "
        "Free some of the disk, or lower disk_cache_bytes."
    )
    assert not grave(page)
    engine.disk = DISK
    expect(alarms).to_have_count(0)


def test_a_lack_of_memory_is_an_alarm(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.pressure.guard.INTERVAL_SECONDS", 0.05)
    engine, settings, sources = FakeEngine(), Settings(port=0), ScriptedSources()
    models = registry_of(engine, settings)
    sources.share = 0.91
    with serving(models, settings, guard=MemoryGuard(sources.read, models, 0.9)) as url:
        page = visit(url)
        alarms = page.get_by_role("region", name="Alarms")
        expect(alarms.get_by_role("listitem")).to_have_text(
            "Memory is short: cached prefixes are evicted: "
            "91% of the control group / are in use (limit 90.0%)"
        )
        assert not grave(page)
        sources.share = 0.0
        expect(alarms).to_have_count(0)
        page.goto("about:blank")  # it would ask a daemon that is gone


def test_one_model_without_a_budget_is_a_line(scripted_url: str, visit: Visit) -> None:
    page = visit(scripted_url)
    expect(row(page, CARD.name)).to_contain_text("ready")
    expect(page.get_by_role("heading", name="Model", exact=True)).to_be_visible()
    expect(row(page, CARD.name)).not_to_contain_text("pinned")
    expect(row(page, CARD.name)).to_contain_text("weights 50 MiB, KV 4 MiB")
    expect(page.get_by_role("img", name="Memory of the models")).to_have_count(0)
    expect(page.get_by_role("combobox", name="Model")).to_have_count(0)


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing_grave(
    start: Start, visit: Visit, engines: Engines, viewport: Any
) -> None:
    settings = settings_of(SECOND, {**SECOND, "served_model_name": ["third"]}, ttl_seconds=600)
    page = visit(start(settings), expected="503", viewport=viewport)
    expect(row(page, "first").locator(".state")).to_contain_text(
        re.compile(r"unloaded in (10:00|9:\d\d)")
    )
    engines.failure = "the file is torn"
    row(page, "second").get_by_role("button", name="Load").click()
    expect(row(page, "second").get_by_role("alert")).to_contain_text("the file is torn")
    choose(page, "third")
    expect(page.get_by_role("button", name="Load third")).to_be_visible()
    assert not grave(page)
    if viewport == PHONE:
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
