"""What the page says of the daemon, how to connect to it, and what a clear leaves."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect
from pydantic import SecretStr

from engine.values.model import ModelCard, facts_of
from server.settings import Settings, load_settings
from server.terminal.agents import AGENTS
from server.terminal.console import command_name
from tests.browser.conftest import Serve, Visit
from tests.browser.demo import DESKTOP, PHONE, say
from tests.browser.seen import clear, grave
from tests.contract.access.helpers import key_file, secret_of
from tests.contract.fake_engine import CARD, ByteTokenizer, FakeEngine

KEY = "open-sesame"
TOOL_TEMPLATE = '<tool_call>{"name"}</tool_call>'
AWKWARD = 'it\'s "mine" $HOME'


def lines(page: Page) -> dict[str, str]:
    """What can be copied, by its name."""
    connect = page.locator("#connect")
    client = connect.get_by_role("combobox")
    found = {"Base URL": connect.get_by_label("Base URL", exact=True).inner_text()}
    for name in client.get_by_role("option").all_inner_texts():
        client.select_option(name)
        found[name] = connect.get_by_label(name, exact=True).inner_text()
    return found


def large() -> FakeEngine:
    """An engine whose model serves every agent: 32,768 tokens, and a template with tools."""
    card = replace(CARD, max_context_tokens=32_768, arena_tokens=65_536)
    return FakeEngine(card=card, tokenizer=ByteTokenizer(chat_template=TOOL_TEMPLATE))


def test_every_client_has_a_line_that_can_be_copied(visit: Visit, serve: Serve) -> None:
    url = serve(large(), Settings(port=0))
    page = visit(url, permissions=["clipboard-read", "clipboard-write"])
    expect(page.locator("#connect")).to_be_visible()
    told = lines(page)
    assert told["Base URL"] == f"{url}/v1"
    assert f"curl {url}/v1/chat/completions" in told["curl"]
    assert f'base_url="{url}/v1"' in told["Python"]
    assert {name: told[name] for name in AGENTS} == {
        name: f"{command_name()} launch {name} --url {url}/v1" for name in AGENTS
    }
    for name, text in told.items():
        if name != "Base URL":
            page.locator("#connect").get_by_role("combobox").select_option(name)
        page.get_by_role("button", name=f"Copy: {name}", exact=True).click()
        expect(page.get_by_role("button", name=f"Copied: {name}", exact=True)).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == text


@pytest.mark.parametrize(
    ("n_context_tokens", "template", "served"),
    [
        (13_000, TOOL_TEMPLATE, {"opencode", "aider", "pi", "cline", "crush", "goose"}),
        (32_768, "", {"aider"}),
        (512, TOOL_TEMPLATE, {"crush", "goose"}),
    ],
)
def test_only_agents_that_the_model_can_serve_have_a_line(
    visit: Visit, serve: Serve, n_context_tokens: int, template: str, served: set[str]
) -> None:
    card = replace(CARD, max_context_tokens=n_context_tokens, arena_tokens=65_536)
    engine = FakeEngine(card=card, tokenizer=ByteTokenizer(chat_template=template))
    page = visit(serve(engine, Settings(port=0)))
    expect(page.locator("#connect")).to_be_visible()
    assert lines(page).keys() & AGENTS.keys() == served
    page.get_by_text("agents need another model").click()
    others = page.locator("#connect details")
    for name in AGENTS.keys() - served:
        expect(others).to_contain_text(name)
    expect(others).to_contain_text("26,000" if template else "no tool calls")


def test_the_header_leads_to_the_clients_and_on_a_phone_to_the_chat(
    visit: Visit, demo_url: str
) -> None:
    for viewport, link, heading in (
        (DESKTOP, "Connect a client", "Connect a client"),
        (PHONE, "Chat", "Playground"),
    ):
        page = visit(demo_url, viewport=viewport)
        expect(page.locator("#daemon")).to_be_visible()
        expect(page.locator(".picture")).to_be_visible()
        page.get_by_role("link", name=link).click()
        expect(page.get_by_role("heading", name=heading)).to_be_in_viewport()
        expect(page.get_by_role("link", name="Chat")).to_be_visible(visible=viewport is PHONE)


def test_lines_work_for_awkward_names(visit: Visit, serve: Serve) -> None:
    settings = Settings(port=0, served_model_name=(AWKWARD,))
    url = serve(FakeEngine(), settings)
    page = visit(url)
    expect(page.locator("#connect")).to_be_visible()
    namespace: dict[str, str] = {}
    model = lines(page)["Python"].partition("model=")[2].partition(",\n")[0]
    exec(f"model = {model}", namespace)
    assert namespace["model"] == AWKWARD


def test_with_keys_a_line_has_a_place_for_one_and_never_the_key(visit: Visit, serve: Serve) -> None:
    url = serve(large(), Settings(port=0, api_key=SecretStr(KEY)))
    page = visit(url, expected="401")
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Open").click()
    expect(page.locator("#connect")).to_be_visible()
    told = lines(page)
    for name in ("curl", "Python", "Variables", *AGENTS):
        assert "YOUR_KEY" in told[name]
    expect(page.locator("#daemon")).to_be_visible()
    page.get_by_text("at their default values").click()
    assert KEY not in page.content()
    expect(page.get_by_role("row").filter(has_text="api_key").first).to_contain_text("***")


def test_lines_work_as_they_stand(visit: Visit, serve: Serve) -> None:
    url = serve(large(), Settings(port=0, api_key=SecretStr(KEY)))
    page = visit(url, expected="401")
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Open").click()
    expect(page.locator("#connect")).to_be_visible()
    told = {name: text.replace("YOUR_KEY", KEY) for name, text in lines(page).items()}
    assert output(sys.executable, "-c", told["Python"]) == "Hello, wörld!"
    for name in AGENTS:
        command = told[name].replace(command_name(), f"{sys.executable} -m server")
        assert AGENTS[name].command in output("sh", "-c", f"{command} --force --print")


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_users_key_shows_how_to_connect_and_nothing_of_the_daemon(
    visit: Visit, serve: Serve, tmp_path: Path
) -> None:
    keys = key_file(tmp_path, ann={"role": "admin"}, bob={})
    url = serve(FakeEngine(), Settings(port=0, api_keys_file=keys))
    page = visit(url, expected="401|403")
    page.get_by_label("API key").fill(secret_of("bob"))
    page.get_by_role("button", name="Open").click()
    expect(page.locator("#connect")).to_be_visible()
    expect(page.locator("#daemon")).to_have_count(0)


def context_of(panel: Locator) -> Locator:
    """The line of the model's context."""
    return panel.locator(".facts > div").filter(has_text="Context")


@pytest.mark.parametrize(
    ("max_context_tokens", "arena_tokens", "limit"),
    [
        (4096, 8192, "max_model_len or memory"),
        (32_768, 4096, "the KV cache"),
        (8192, 4096, "the KV cache"),
    ],
)
def test_the_panel_says_what_shortens_the_context(
    visit: Visit, serve: Serve, max_context_tokens: int, arena_tokens: int, limit: str
) -> None:
    card = replace(
        CARD,
        model_context_tokens=32_768,
        max_context_tokens=max_context_tokens,
        arena_tokens=arena_tokens,
    )
    page = visit(serve(FakeEngine(card=card), Settings(port=0)))
    panel = page.get_by_role("region", name="This daemon")
    text = f"Context4,096 tokens of the model's 32,768, limited by {limit}"
    expect(context_of(panel)).to_have_text(text)


def test_the_panel_tells_model_context_dtype_memory_and_settings(
    visit: Visit, serve: Serve
) -> None:
    card = replace(CARD, batching="padded rows, since not joined rows")
    settings = load_settings({"port": 0, "step_tokens": 64, "max_body_bytes": 1 << 20})
    url = serve(FakeEngine(card=card), settings)
    page = visit(url)
    panel = page.get_by_role("region", name="This daemon")
    for said in (CARD.name, "512 tokens", CARD.dtype, "60 MiB in use", "300 MiB"):
        expect(panel.locator(".facts")).to_contain_text(said)
    expect(context_of(panel)).to_have_text("Context512 tokens the model's own")
    batching = panel.locator(".facts > div").filter(has_text="Batching")
    expect(batching).to_have_text(f"Batching{card.batching}")
    expect(batching).to_have_attribute("title", facts_of(ModelCard)["batching"].description)
    changed = panel.locator("h3 + .settings")
    expect(changed.get_by_role("row")).to_have_count(3)
    expect(changed.get_by_role("row").filter(has_text="step_tokens")).to_contain_text("64")
    expect(changed.get_by_role("row").filter(has_text="max_body_bytes")).to_contain_text("1 MiB")
    panel.get_by_text("at their default values").click()
    rows = panel.get_by_role("row")
    expect(rows).to_have_count(len(Settings.model_fields))


@pytest.fixture
def remembering(scripted_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted_url) as client:
        client.post("/v1/responses", json={"input": "Hi"}).raise_for_status()
        yield client


def test_a_clear_says_what_it_keeps_and_forgets_it_where_that_is_asked(
    visit: Visit, remembering: httpx.Client, engine: FakeEngine
) -> None:
    page = visit(str(remembering.base_url).rstrip("/"))
    page.get_by_role("button", name="Clear the cache").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("1 conversation of /v1/responses")
    expect(dialog).to_contain_text("0 answers kept as tokens")
    expect(dialog.get_by_role("checkbox", name="Stored responses")).not_to_be_checked()
    expect(dialog.get_by_role("checkbox", name="Answers with tool calls")).not_to_be_checked()
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_be_hidden()
    assert engine.cleared.empty()
    clear(page, "Answers with tool calls", "Stored responses")
    assert engine.cleared.empty()
    remembered = remembering.get("/admin/daemon").json()["remembered"]
    assert remembered == {"replays": 0, "responses": 0}


def test_a_clear_that_fails_says_so(
    remembering: httpx.Client, visit: Visit, engine: FakeEngine
) -> None:
    page = visit(str(remembering.base_url).rstrip("/"), expected="503")
    page.get_by_role("button", name="Clear the cache").click()
    engine.script.dead = True
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Clear", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("stopped")


def test_axe_finds_nothing_grave_in_the_dialog_and_the_settings(
    visit: Visit, remembering: httpx.Client
) -> None:
    page = visit(str(remembering.base_url).rstrip("/"))
    page.get_by_text("at their default values").click()
    page.get_by_role("button", name="Clear the cache").click()
    expect(page.get_by_role("dialog")).to_contain_text("1 conversation")
    assert not grave(page)


def test_where_there_is_one_namespace_one_button_clears(
    visit: Visit, demo_url: str, daemon: httpx.Client
) -> None:
    say(daemon, "Who are you?")
    page = visit(demo_url)
    page.locator(".bar").first.click()
    expect(page.get_by_role("region", name="The selected run of tokens")).to_be_visible()
    expect(page.get_by_role("button", name="Clear")).to_have_count(1)
