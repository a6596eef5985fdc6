"""Requests of which nothing is to be kept, by the demonstration model with a disk cache."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from engine.values.settings import DiskCacheConfig, EngineConfig
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.metrics import value
from tests.hosting import loaded
from tests.polling import until

pytestmark = pytest.mark.process

NOT_KEPT = {"prompt_cache_options": {"keep": False}}
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat", "/v1/completions")
WORDS = ("blue", "marble", "box", "river", "seven", "stone", "tree", "lamp")


class Served(NamedTuple):
    http: httpx.Client
    disk: Path

    def text(self, seed: int) -> str:
        """Words that no other prompt begins with."""
        return " ".join(random.Random(seed).choices(WORDS, k=120))

    def cached(self, text: str) -> int:
        """The tokens of a chat with this text that a prompt would find."""
        body = {"messages": [{"role": "user", "content": text}]}
        found = self.http.post("/admin/cache/probe", json=body).raise_for_status().json()
        return int(found["cached_tokens"])

    def blocks(self, state: str) -> float:
        return self.metric("rootstock_kv_blocks", state=state)

    def metric(self, name: str, **labels: str) -> float:
        return value(self.http.get("/metrics").text, name, **labels)

    def written(self) -> None:
        """Wait until nothing is left to be written, which the number of entries shows."""
        entries = -1.0

        def is_steady() -> bool:
            nonlocal entries
            before, entries = entries, self.metric("rootstock_disk_entries")
            time.sleep(0.5)
            return before == entries and not self.metric("rootstock_disk_buffered_bytes")

        until(is_steady)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("disk")
    disk = DiskCacheConfig(folder, 64 << 20)
    engine = loaded(EngineConfig(model="", kv_cache_bytes=32 << 20, disk=disk))
    with running(engine, Settings(port=0)) as url, httpx.Client(base_url=url) as http:
        yield Served(http, folder)


def ask(served: Served, path: str, text: str, **fields: Any) -> None:
    said = [{"role": "user", "content": text}]
    body: dict[str, Any] = {
        "/v1/completions": {"prompt": text, "max_tokens": 40},
        "/v1/responses": {"input": said, "max_output_tokens": 40},
        "/api/chat": {"messages": said, "stream": False, "options": {"num_predict": 40}},
    }.get(path, {"messages": said, "max_tokens": 40})
    served.http.post(path, json={**body, **fields}).raise_for_status()


@pytest.mark.parametrize("path", PATHS)
def test_nothing_of_it_stays(served: Served, path: str) -> None:
    cached, text = served.blocks("cached"), served.text(PATHS.index(path))
    ask(served, path, text, **NOT_KEPT)
    until(lambda: served.blocks("held"), lambda held: not held)
    assert served.cached(text) < 40, "but what all chats begin with"
    assert served.blocks("cached") == cached
    ask(served, path, text)
    assert served.blocks("cached") > cached


def test_it_uses_what_others_have_cached_and_takes_nothing_from_them(served: Served) -> None:
    text = served.text(100)
    ask(served, PATHS[0], text)
    cached, blocks = served.cached(text), served.blocks("cached")
    said = [{"role": "user", "content": text}]
    body = {"messages": said, "max_tokens": 20, "n": 3, "temperature": 1, **NOT_KEPT}
    answer = served.http.post(PATHS[0], json=body).raise_for_status().json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= cached > 200
    until(lambda: served.blocks("held"), lambda held: not held)
    assert served.blocks("cached") == blocks
    assert served.cached(text) == cached


def test_several_at_once_leave_what_is_to_be_kept(served: Served) -> None:
    """Requests with one text, of which some may be kept and some may not."""
    text, cached = served.text(200), served.blocks("cached")
    with ThreadPoolExecutor(6) as threads:
        fields = [NOT_KEPT, NOT_KEPT, {}, NOT_KEPT, {}, NOT_KEPT]
        list(threads.map(lambda each: ask(served, PATHS[0], text, **each), fields))
    until(lambda: served.blocks("held"), lambda held: not held)
    assert served.cached(text) > 200
    assert served.blocks("cached") > cached


def test_it_is_never_on_disk(served: Served) -> None:
    """While what is kept is written."""
    text = served.text(300)
    ask(served, PATHS[0], text)
    served.written()
    entries = served.metric("rootstock_disk_entries")
    assert entries
    for seed in range(301, 304):
        ask(served, PATHS[0], served.text(seed), **NOT_KEPT)
    served.written()
    assert served.metric("rootstock_disk_entries") == entries


@pytest.mark.parametrize(
    ("options", "named"),
    [({"keep": False, "prewarm": True}, "keep"), ({"keep": 0}, "prompt_cache_options.keep")],
)
def test_refusals_name_the_field(served: Served, options: dict[str, Any], named: str) -> None:
    said = [{"role": "user", "content": "Hi"}]
    body = {"messages": said, "prompt_cache_options": options}
    answer = served.http.post(PATHS[0], json=body)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
