"""The embedded model's daemon, and something to ask it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from playwright.sync_api import ViewportSize

from engine.values.settings import EngineConfig
from server.settings import Settings
from tests.contract.daemon import running
from tests.hosting import launched

DESKTOP: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}
KV_CACHE_BYTES = 32 << 20
SYSTEM = "You answer questions about Rootstock. " * 8
QUESTIONS = ("Who are you?", "How does the cache work?", "What licence?")
CLIENT_SECONDS = 60


@contextmanager
def demo_daemon(
    kv_cache_bytes: int = KV_CACHE_BYTES, *, dashboard_text: bool = False
) -> Iterator[httpx.Client]:
    """A client of a daemon of its own."""
    config = EngineConfig(model="", kv_cache_bytes=kv_cache_bytes)
    engine = launched(config)
    with (
        running(engine, Settings(port=0, dashboard_text=dashboard_text)) as url,
        httpx.Client(base_url=url, timeout=CLIENT_SECONDS) as client,
    ):
        yield client


def say(client: httpx.Client, text: str, system: str = "") -> Any:
    """One short answer, and what it took."""
    messages = [{"role": "user", "content": text}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body).raise_for_status()
    return answer.json()["usage"]
