"""How soon the picture shows what has happened, on a machine that has time for it."""

import statistics
import time

import httpx
from playwright.sync_api import Page, expect

from tests.browser.chromium import chromium
from tests.browser.demo import DESKTOP, QUESTIONS, SYSTEM, demo_daemon, say

ROUNDS = 10
POLL_SECONDS = 0.01


def delays_seconds() -> list[float]:
    """From the last of three answers to four bars, in each round."""
    with demo_daemon() as client, chromium() as browser:
        page = browser.new_page(viewport=DESKTOP)
        page.goto(str(client.base_url))
        expect(page.get_by_role("status")).to_have_text("live")
        return [_delay_seconds(page, client) for _ in range(ROUNDS)]


def report() -> float:
    """Prints the delays. Their median, in seconds."""
    delays = delays_seconds()
    median = statistics.median(delays)
    longest = max(delays)
    print(f"four bars after three requests: median {median:.3f} s, longest {longest:.3f} s")
    return median


def _delay_seconds(page: Page, client: httpx.Client) -> float:
    client.post("/admin/cache/clear").raise_for_status()
    expect(page.locator(".bar")).to_have_count(0)
    for question in QUESTIONS:
        say(client, question, SYSTEM)
    answered = time.perf_counter()
    while page.locator(".bar").count() != len(QUESTIONS) + 1:
        time.sleep(POLL_SECONDS)
    return time.perf_counter() - answered
