"""What the page says of a disk cache, of windows and of saved states, over real checkpoints."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from engine.values.request import WaitReason
from engine.values.settings import DiskCacheConfig, DiskWrites, EngineConfig
from engine.values.stats import RequestInfo
from engine.values.tree import HiddenRequests
from server.settings import Settings
from tests.browser.conftest import Visit
from tests.browser.demo import CLIENT_SECONDS
from tests.browser.seen import GAP, clear, grave
from tests.checkpoints import FAMILIES, write_family
from tests.contract.daemon import running
from tests.contract.fake_engine import PICTURE, FakeEngine
from tests.hosting import launched

PROMPT_TOKENS = 80
N_PROMPTS = 12  # of which windows' slots hold about half
DISK_BYTES = 64 << 20


@contextmanager
def tiered_daemon(family: str, directory: Path) -> Iterator[httpx.Client]:
    """A client of a tiny model's daemon, which writes everything to disk at once."""
    model = str(write_family(FAMILIES[family], directory))
    config = EngineConfig(
        model=model,
        kv_cache_bytes=1 << 20,
        block_size=8,
        disk=DiskCacheConfig(directory / "disk", DISK_BYTES, DiskWrites.ALL),
    )
    engine = launched(config)
    with (
        running(engine, Settings(port=0, model=model)) as url,
        httpx.Client(base_url=url, timeout=CLIENT_SECONDS) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with tiered_daemon("qwen3_next", tmp_path_factory.mktemp("hybrid")) as client:
        yield client


@pytest.fixture
def daemon(hybrid: httpx.Client) -> httpx.Client:
    """Its cache has one prompt, in memory and before long on disk."""
    hybrid.post("/admin/cache/clear").raise_for_status()
    ask(hybrid)
    return hybrid


def ask(client: httpx.Client, first: int = 5) -> None:
    prompt = range(first, first + PROMPT_TOKENS)
    body = {"prompt": list(prompt), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    client.post("/v1/completions", json=body).raise_for_status()


@pytest.fixture
def open_page(visit: Visit, daemon: httpx.Client) -> Callable[..., Page]:
    """The page, once what is in memory is hatched."""

    def opened(**options: Any) -> Page:
        page = visit(str(daemon.base_url).rstrip("/"), **options)
        expect(page.locator(".bar .disk")).to_have_count(1)
        return page

    return opened


def test_as_much_of_a_bar_is_hatched_as_is_on_disk(
    visit: Visit, scripted_url: str, engine: FakeEngine
) -> None:
    page = visit(scripted_url)
    expect(page.locator(".bar .disk")).to_have_count(2)
    hatched, bars = widths(page, ".bar .disk"), widths(page, ".bar .body")
    shares = [node.disk_tokens / node.tokens for node in engine.picture.nodes]
    assert shares[0] == 1.0 > shares[1]
    assert [part / bar for part, bar in zip(hatched, bars, strict=True)] == [
        pytest.approx(share, abs=0.01) for share in shares
    ]


def widths(page: Page, what: str) -> list[float]:
    found = page.locator(what).all()
    return [float(each.get_attribute("width") or "nan") + GAP for each in found]


def test_it_is_told_wherever_a_bar_is_and_so_are_saved_states(
    open_page: Callable[..., Page],
) -> None:
    page = open_page()
    expect(page.locator(".bar")).to_have_accessible_name(re.compile(r"8\d on disk"))
    expect(page.locator(".group.disk")).to_contain_text("of 64 MiB")
    expect(page.locator(".memory")).to_contain_text("Saved recurrent states")
    expect(page.locator(".legend")).to_contain_text("on disk too")
    expect(page.locator(".legend")).to_contain_text("saved state of recurrent layers")
    expect(page.locator(".bar .state").first).to_be_visible()
    page.locator(".bar").click()
    details = page.get_by_role("region", name="The selected run of tokens")
    expect(details).to_contain_text("On disk")
    expect(details).to_contain_text("States at")
    expect(details).to_contain_text(str(PROMPT_TOKENS - 1))  # where the same prompt will resume
    page.get_by_text("The same as tables").click()
    expect(page.get_by_role("columnheader", name="Tokens on disk")).to_be_visible()


def test_what_windows_have_left_behind_is_marked(visit: Visit, tmp_path: Path) -> None:
    with tiered_daemon("gemma3_text", tmp_path) as client:
        for first in range(5, 5 + N_PROMPTS):
            ask(client, first)
        page = visit(str(client.base_url).rstrip("/"))
        expect(page.locator(".legend")).to_contain_text("no longer in a sliding window")
        expect(page.locator(".memory")).to_contain_text("Windows of")
        page.get_by_role("button", name="that share nothing").click()
        expect(page.locator(".bar .disk")).to_have_count(N_PROMPTS)
        nodes = client.get("/admin/cache/tree").json()["nodes"]
        holes = [end - start for node in nodes for start, end in node["holes"]]
        assert 0 < len(holes) < N_PROMPTS
        expect(page.locator(".bar .hole")).to_have_count(len(holes))
        page.close()  # before its daemon ends


def test_memory_and_disk_are_cleared_apart_or_at_once(
    open_page: Callable[..., Page], daemon: httpx.Client
) -> None:
    page = open_page()
    clear(page, "KV in memory")
    expect(page.get_by_role("heading", name="Nothing is in memory yet")).to_be_visible()
    clear(page, "KV on disk")
    expect(page.get_by_role("heading", name="Nothing is cached yet")).to_be_visible()
    ask(daemon)
    expect(page.locator(".bar .disk")).to_have_count(1)
    clear(page, "KV in memory", "KV on disk")
    expect(page.get_by_role("heading", name="Nothing is cached yet")).to_be_visible()


def test_axe_finds_nothing_grave_in_it(open_page: Callable[..., Page]) -> None:
    page = open_page()
    page.locator(".bar").click()
    page.get_by_text("The same as tables").click()
    expect(page.get_by_role("table").first).to_be_visible()
    assert not grave(page)


def test_who_waits_for_the_disk_says_so(
    visit: Visit, scripted_url: str, engine: FakeEngine
) -> None:
    loading = RequestInfo("l", 0, WaitReason.DISK, 300, 0, 0, 0, blocks=0)
    engine.picture = replace(
        PICTURE, requests=(loading,), hidden_requests=HiddenRequests(0, 0), version=2
    )
    page = visit(scripted_url)
    expect(page.locator(".lane.loading")).to_contain_text("loading from disk")
    expect(page.locator(".numbers")).to_contain_text("1 of them loading from disk")


def test_without_a_disk_nothing_is_said_of_one(
    visit: Visit, scripted_url: str, engine: FakeEngine
) -> None:
    nodes = tuple(replace(node, disk_tokens=0) for node in PICTURE.nodes)
    engine.picture = replace(PICTURE, disk=None, nodes=nodes)
    page = visit(scripted_url)
    expect(page.locator(".bar")).to_have_count(2)
    page.locator(".bar").first.click(position={"x": 5, "y": 5})
    page.get_by_text("The same as tables").click()
    expect(page.get_by_role("table").first).to_be_visible()
    said = page.locator(".watching").inner_text()
    assert "disk" not in said.lower()
    page.get_by_role("button", name="Clear the cache").click()
    expect(page.get_by_role("dialog")).not_to_contain_text("disk")
