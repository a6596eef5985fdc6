"""The names of the models in the Hugging Face cache, and how often it is scanned for them."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from anyio import create_task_group
from huggingface_hub import constants

from server.models import hub
from server.models.hub import MAX_SCAN_AGE_SECONDS, CachedNames

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
