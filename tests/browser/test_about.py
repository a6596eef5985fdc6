"""What the page says of the daemon, how to connect to it, and what a clear leaves."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect
from pydantic import SecretStr

from server.settings import Settings
from server.terminal.agents import AGENTS
from tests.browser.axe import grave
from tests.browser.clearing import clear
from tests.browser.conftest import Serve, Visit
from tests.browser.demo import say
from tests.contract.access.helpers import key_file, secret_of
from tests.contract.fake_engine import CARD, FakeEngine

KEY = "open-sesame"
AWKWARD = 'it\'s "mine" $HOME'


def lines(page: Page) -> dict[str, str]:
    """What can be copied, by its name."""
    shown = page.locator("#connect .lines > div")
    return {
        line.locator("dt").inner_text(): line.locator("pre").inner_text() for line in shown.all()
    }


def test_every_client_has_a_line_also_when_the_cache_is_full(
    visit: Visit, demo_url: str, daemon: httpx.Client
) -> None:
    say(daemon, "Who are you?")
    page = visit(demo_url, permissions=["clipboard-read", "clipboard-write"])
    expect(page.locator(".bar")).to_have_count(1)
    expect(page.locator("#connect")).to_be_visible()
    told = lines(page)
    assert told["Base URL"] == f"{demo_url}/v1"
    assert f"curl {demo_url}/v1/chat/completions" in told["curl"]
    assert f'base_url="{demo_url}/v1"' in told["openai"]
    assert {name: told[name] for name in AGENTS} == {
        name: f"rootstock launch {name} --url {demo_url}/v1" for name in AGENTS
    }
    for name, text in told.items():
        page.get_by_role("button", name=f"Copy: {name}", exact=True).click()
        expect(page.get_by_role("button", name=f"Copied: {name}", exact=True)).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == text


def test_the_header_leads_there(visit: Visit, demo_url: str) -> None:
    page = visit(demo_url)
    page.get_by_role("link", name="Connect a client").click()
    expect(page.get_by_role("heading", name="Connect a client")).to_be_in_viewport()


def test_lines_work_for_awkward_names(visit: Visit, serve: Serve) -> None:
    settings = Settings(port=0, served_model_name=(AWKWARD,))
    url = serve(FakeEngine(), settings)
    page = visit(url)
    expect(page.locator("#connect")).to_be_visible()
    namespace: dict[str, str] = {}
    model = lines(page)["openai"].partition("model=")[2].partition(",\n")[0]
    exec(f"model = {model}", namespace)
    assert namespace["model"] == AWKWARD


def test_with_keys_a_line_has_a_place_for_one_and_never_the_key(visit: Visit, serve: Serve) -> None:
    url = serve(FakeEngine(), Settings(port=0, api_key=SecretStr(KEY)))
    page = visit(url, expected="401")
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Open").click()
    expect(page.locator("#connect")).to_be_visible()
    told = lines(page)
    for name in ("curl", "openai", "Variables", *AGENTS):
        assert "YOUR_KEY" in told[name]
    expect(page.locator("#daemon")).to_be_visible()
    page.get_by_text("as they are by default").click()
    assert KEY not in page.content()
    expect(page.get_by_role("row").filter(has_text="api_key").first).to_contain_text("***")


def test_lines_work_as_they_stand(visit: Visit, serve: Serve) -> None:
    url = serve(FakeEngine(), Settings(port=0, api_key=SecretStr(KEY)))
    page = visit(url, expected="401")
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Open").click()
    expect(page.locator("#connect")).to_be_visible()
    told = {name: text.replace("YOUR_KEY", KEY) for name, text in lines(page).items()}
    assert output(sys.executable, "-c", told["openai"]) == "Hello, wörld!"
    for name in AGENTS:
        command = told[name].replace("rootstock launch", f"{sys.executable} -m server launch")
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


def test_the_panel_tells_model_context_dtype_memory_and_settings(
    visit: Visit, serve: Serve
) -> None:
    url = serve(FakeEngine(), Settings(port=0, step_tokens=64, max_body_bytes=1 << 20))
    page = visit(url)
    panel = page.get_by_role("region", name="This daemon")
    for said in (CARD.name, "512 tokens", CARD.dtype, "60 MiB in use", "300 MiB"):
        expect(panel.locator(".facts")).to_contain_text(said)
    changed = panel.locator("h3 + .settings")
    expect(changed.get_by_role("row")).to_have_count(3)
    expect(changed.get_by_role("row").filter(has_text="step_tokens")).to_contain_text("64")
    expect(changed.get_by_role("row").filter(has_text="max_body_bytes")).to_contain_text("1 MiB")
    panel.get_by_text("as they are by default").click()
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
    expect(dialog).to_contain_text("0 answers with tool calls")
    expect(dialog.get_by_role("checkbox", name="Stored responses")).not_to_be_checked()
    expect(dialog.get_by_role("checkbox", name="Replays")).not_to_be_checked()
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_be_hidden()
    assert engine.cleared.empty()
    clear(page, "Replays", "Stored responses")
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
    page.get_by_text("as they are by default").click()
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
