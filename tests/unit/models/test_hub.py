"""Models in the Hugging Face cache: their names, downloads, and how far one has come."""

import asyncio
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from anyio import Event, create_task_group, fail_after, sleep_forever
from huggingface_hub import constants

from engine.api import ModelError, Progress
from engine.launch import fetch_repository
from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT
from server.dialects.ollama.catalog import pull_lines
from server.models import hub
from server.models.hub import MAX_SCAN_AGE_SECONDS, CachedNames, Downloads
from server.models.model import PROGRESS_SECONDS, Model
from server.models.policy import Loading, Need, Unknown
from server.settings.models import ModelSettings
from tests.contract.fake_engine import CARD
from tests.hub import Hub, checkpoint_files, serving_hub

NAMES = ("org/one", "org/two")


class Cache:
    """A Hugging Face cache of the test's own. Counts its scans; the clock is set by hand."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now = 100.0
        self.n_scans = 0
        self._modified_ns = 10**18
        self.names = CachedNames(lambda: self.now)

    def fetch(self, name: str, commit: str = "a" * 40) -> None:
        """The directories change at times of their own, whatever the resolution of the clock."""
        home = self.home(name)
        snapshot = home / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        self._touch(home / "snapshots")

    def delete(self, name: str) -> None:
        shutil.rmtree(self.home(name))
        self._touch(self.directory)

    def home(self, name: str) -> Path:
        return self.directory / f"models--{name.replace('/', '--')}"

    def _touch(self, directory: Path) -> None:
        self._modified_ns += 10**9
        os.utime(directory, ns=(self._modified_ns, self._modified_ns))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cache, scan = Cache(tmp_path), hub.cached_models

    def counted() -> list[Any]:
        cache.n_scans += 1
        return scan()

    monkeypatch.setattr(hub, "cached_models", counted)
    return cache


async def test_many_requests_at_once_are_one_scan(cache: Cache) -> None:
    cache.fetch("org/one")
    async with create_task_group() as tasks:
        for _ in range(40):
            tasks.start_soon(cache.names.names)
    assert await cache.names.names() == ("org/one",)
    assert cache.n_scans == 1


async def test_a_model_is_seen_as_soon_as_it_is_fetched_or_deleted(cache: Cache) -> None:
    assert await cache.names.names() == ()
    for name in NAMES:
        cache.fetch(name)
        assert name in await cache.names.names()
    cache.delete("org/one")
    assert await cache.names.names() == ("org/two",)


async def test_a_model_whose_directory_was_there_before_its_files_is_seen(cache: Cache) -> None:
    (cache.home("org/one") / "blobs").mkdir(parents=True)
    assert await cache.names.names() == ()
    cache.fetch("org/one")
    assert await cache.names.names() == ("org/one",)


async def test_a_scan_is_not_used_for_long(cache: Cache) -> None:
    await cache.names.names()
    cache.now += MAX_SCAN_AGE_SECONDS
    await cache.names.names()
    assert cache.n_scans == 1
    cache.now += 0.5
    await cache.names.names()
    assert cache.n_scans == 2


SECONDS = 20.0


async def test_the_lines_of_a_pull_say_how_far_it_is() -> None:
    may_end = Event()

    async def fetch(repository: str, progress: Progress) -> None:
        progress(10, 30)
        await may_end.wait()

    async with create_task_group() as tasks:
        lines = pull_lines(Downloads(fetch, tasks).start("org/small"))
        said = [json.loads(await anext(lines)) for _ in range(2)]
        may_end.set()
        said += [json.loads(line) async for line in lines]
    assert [line["status"] for line in said] == ["pulling manifest", "pulling org/small", "success"]
    assert (said[1]["completed"], said[1]["total"]) == (10, 30)


@pytest.mark.parametrize("error", [ModelError("the line is dead"), ZeroDivisionError("a fault")])
async def test_the_error_of_an_abandoned_download_is_logged_and_ends_nothing_else(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def fetch(repository: str, progress: Progress) -> None:
        raise error

    async with create_task_group() as tasks:
        lines = pull_lines(Downloads(fetch, tasks).start("org/small"))
        await anext(lines)
        await lines.aclose()
    assert [record.levelno >= logging.WARNING for record in caplog.records] == [True]


async def test_a_stop_ends_downloads_in_progress_and_later_ones() -> None:
    async def fetch(repository: str, progress: Progress) -> None:
        await sleep_forever()

    with fail_after(SECONDS):
        async with create_task_group() as tasks:
            downloads = Downloads(fetch, tasks)
            first = downloads.start("org/small")
            await asyncio.sleep(0)
            downloads.stop()
            second = downloads.start("org/other")
    assert first.error == "org/small was not fetched: the server is stopping"
    assert second.error == "org/other was not fetched: the server is stopping"


async def test_a_process_fetches_a_repository_and_reports_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub("org/small", checkpoint_files(DEFAULT_CHECKPOINT))
    hub.may_send.set()
    n_bytes = sum(len(hub.files[name]) for name in hub.files if name != "README.md")
    heard: list[tuple[int, int]] = []
    with serving_hub(hub, tmp_path) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        await fetch_repository("org/small", lambda done, total: heard.append((done, total)))
        assert heard[-1] == (n_bytes, n_bytes)
        with pytest.raises(ModelError, match=r"has none of that name, .*; at hand: org/small$"):
            await fetch_repository("org/none", lambda done, total: None)


async def test_a_cancelled_fetch_ends_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub("org/small", checkpoint_files(DEFAULT_CHECKPOINT))
    with serving_hub(hub, tmp_path) as environment, fail_after(SECONDS):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        fetching = asyncio.create_task(fetch_repository("org/small", lambda done, total: None))
        await asyncio.to_thread(hub.requested.wait, SECONDS)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching


BEGAN, TOOK = 100.0, 20.0


@pytest.fixture
def model() -> Model:
    return Model(ModelSettings(served_model_name=("demo",)))


def test_of_a_repository_it_is_what_has_been_fetched(model: Model) -> None:
    assert model.begin_measuring()
    assert model.is_coming
    assert model.progress_share(BEGAN) is None
    model.report_fetched(1_250_000_000, 5_000_000_000)
    assert model.progress_share(BEGAN) == 0.25
    assert model.progress == "1.25 of 5.00 GB fetched"
    model.report_fetched(10, 0)
    assert model.progress_share(BEGAN) is None


def test_of_loading_it_is_the_time_that_it_took_before(model: Model) -> None:
    model.become(Loading(Need(60, load_seconds=TOOK), BEGAN))
    assert model.is_coming
    assert model.progress_share(BEGAN + 5) is None
    model.card = CARD
    assert model.progress_share(BEGAN + 5) == 0.25
    assert model.progress_share(BEGAN + TOOK) is None
    model.become(Unknown())
    assert not model.is_coming


def test_what_is_being_done_is_logged_if_nothing_else_is_for_a_while(
    model: Model, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    seconds = 1000.0
    monkeypatch.setattr("server.models.model.time.monotonic", lambda: seconds)
    model.report("model /models/demo")
    seconds += 1
    model.report("loading weights, 40.0 GiB…")
    assert model.progress == "loading weights, 40.0 GiB…"
    seconds += PROGRESS_SECONDS
    for _ in range(2):
        model.report("loading weights, 3.0 of 40.0 GiB…")
    model.report("weights: 40.0 GiB")
    assert caplog.messages == [
        "demo: model /models/demo",
        "demo: loading weights, 3.0 of 40.0 GiB…",
        "demo: weights: 40.0 GiB",
    ]
