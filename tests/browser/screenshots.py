"""`make screenshots`: the page while several users share prompts, and pictures of caches that are
hard to draw.
"""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
from playwright.sync_api import Browser, Page, expect

from engine.values.tree import TreeSnapshot
from server.settings import Settings
from tests.browser.chromium import MISSING, chromium, executable
from tests.browser.demo import DESKTOP as SMALL_DESKTOP
from tests.browser.demo import PHONE, demo_daemon
from tests.cache_scenes import agent_beside_short_prompts, many_leaves
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine

INTO = Path(__file__).parents[2] / "docs" / "images"
MOST_BYTES = 250_000
DESKTOP = {"width": 1440, "height": 1080}
SHOTS: dict[str, dict[str, Any]] = {
    "dashboard-light.png": {"viewport": DESKTOP, "color_scheme": "light"},
    "dashboard-dark.png": {"viewport": DESKTOP, "color_scheme": "dark"},
    "dashboard-phone.png": {"viewport": PHONE, "color_scheme": "light", "device_scale_factor": 1.5},
}
SCENES: dict[str, tuple[TreeSnapshot, dict[str, Any]]] = {
    "tree-agent.png": (agent_beside_short_prompts(), {"viewport": SMALL_DESKTOP}),
    "tree-leaves.png": (many_leaves(), {"viewport": SMALL_DESKTOP, "color_scheme": "dark"}),
    "tree-phone.png": (
        agent_beside_short_prompts(),
        {"viewport": PHONE, "color_scheme": "dark", "device_scale_factor": 1.5},
    ),
}
GONE = "tree-gone.png"
REQUESTS = "requests.png"
PROMPTS = (
    "You answer questions about Rootstock, shortly and in plain words. " * 12,
    "You remember what you are told, and repeat it when you are asked. " * 5,
)
QUESTIONS = (
    *("What is Rootstock?", "How does the cache work?", "How do I clear the cache?"),
    *("Repeat: Laura painted 42 wooden boats in Lisbon.", "How do I serve a real model?"),
)
AGENTS = (
    "claude-cli/2.0.14 (external, cli)",
    "codex_cli_rs/0.46.0",
    "opencode/1.0.0",
    "curl/8.5.0",
)
USERS = 6
LONGEST_ANSWER = 190
LOAD_SECONDS = 25
PATIENCE_MS = 60_000


def main() -> int | str:
    if executable() is None:
        return MISSING
    expect.set_options(timeout=PATIENCE_MS)
    INTO.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        take_scenes(browser)
    with demo_daemon(dashboard_text=True) as client, chromium() as browser, load(client):
        for name, options in SHOTS.items():
            page = browser.new_page(**options)
            page.goto(str(client.base_url))
            time.sleep(LOAD_SECONDS)
            take(page, INTO / name)
            page.close()
    return 0


def take_scenes(browser: Browser) -> None:
    """Of the picture alone; the last of a daemon that is gone."""
    engine = FakeEngine()
    with running(engine, Settings(port=0)) as url:
        for name, (picture, options) in SCENES.items():
            engine.picture = picture
            page = browser.new_page(**options)
            page.goto(url)
            expect(page.locator(".bar .found").first).to_be_visible()
            keep(INTO / name, page.locator(".picture").screenshot())
            page.close()
        engine.picture = agent_beside_short_prompts()
        page = browser.new_page(viewport=SMALL_DESKTOP)
        page.goto(url)
        expect(page.locator(".bar").first).to_be_visible()
    expect(page.locator(".notice")).to_be_visible()
    keep(INTO / GONE, page.screenshot())
    page.close()


def keep(path: Path, image: bytes) -> None:
    path.write_bytes(image)
    print(f"{path.name}: {len(image):,} bytes")
    assert len(image) < MOST_BYTES


def take(page: Page, path: Path) -> None:
    """With answers in the playground, and while somebody is being served."""
    if page.viewport_size == DESKTOP:
        page.get_by_role("button", name="How does the cache work?").click()
        answers = page.locator(".message.assistant[data-state='done']")
        expect(answers).to_have_count(1)
        page.get_by_label("Your message").fill("How do I clear the cache?")
        page.get_by_role("button", name="at once").click()
        expect(answers).to_have_count(2)
    expect(page.locator(".lane.running").first).to_be_visible()
    expect(page.locator(".numbers b").first).not_to_have_text("0")
    keep(path, page.screenshot())
    if path.name == "dashboard-light.png":
        keep(path.with_name(REQUESTS), page.locator("section.requests").screenshot())


@contextmanager
def load(client: httpx.Client) -> Iterator[None]:
    """Users of several programs, with one of two system prompts, who send the next message as soon
    as they have an answer.
    """
    over = Event()

    def talk(user: int) -> None:
        system = PROMPTS[int(user % 3 == 2)]
        for turn in range(1_000):
            if over.is_set():
                return
            question = QUESTIONS[(user + turn) % len(QUESTIONS)]
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": question},
            ]
            tokens = LONGEST_ANSWER * (1 + (user + turn) % 3) // 3
            body = {"messages": messages, "max_tokens": tokens, "ignore_eos": True}
            headers = {"User-Agent": AGENTS[user % len(AGENTS)]}
            client.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()

    with ThreadPoolExecutor(USERS) as users:
        talks = [users.submit(talk, user) for user in range(USERS)]
        try:
            yield
        finally:
            over.set()
        for talked in talks:
            talked.result()


if __name__ == "__main__":
    sys.exit(main())
