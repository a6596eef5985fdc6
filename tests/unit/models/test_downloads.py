"""Downloads that no request waits for, and the process that fetches."""

import asyncio
import json
import logging
from pathlib import Path

import pytest
from anyio import Event, create_task_group, fail_after, sleep_forever

from engine.api import ModelError, Progress
from engine.launch import fetch_repository
from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT
from server.dialects.ollama.models import pull_lines
from server.models.hub import Downloads
from tests.hub import Hub, checkpoint_files, serving_hub

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
