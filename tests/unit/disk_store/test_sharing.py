"""Models of one daemon share a directory and its limit; those of two daemons do not."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from kvstore.disk import folder
from kvstore.disk import store as maintenance
from kvstore.disk.folder import LOCK, take_folder
from kvstore.disk.store import DiskStore
from kvstore.disk.types import DiskError, DiskLimits, Fault
from tests.disk_store_harness import (
    DAEMON,
    LIMITS,
    PATIENCE,
    Chain,
    extent_files,
    read,
    stored,
)

LENGTH = 25  # entries of a chain: 1 MB


class Models:
    """Tiers of one directory, over one clock on which no two things happen at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.open_tiers = list[DiskStore]()
        self._now = count(1_000_000)

    def open(self, model: str, limits: DiskLimits = LIMITS, daemon: str = DAEMON) -> DiskStore:
        tier = DiskStore.open(
            self.directory, model, limits, clock=lambda: float(next(self._now)), daemon=daemon
        )
        self.open_tiers.append(tier)
        return tier

    def close(self, tier: DiskStore) -> None:
        self.open_tiers.remove(tier)
        tier.close()


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Models]:
    models = Models(tmp_path)
    yield models
    for tier in list(models.open_tiers):
        models.close(tier)


def chains(name: str, number: int) -> list[Chain]:
    return [Chain(f"{name} {each}", LENGTH) for each in range(number)]


def ended_process() -> int:
    """The id that it had."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        return process.pid


def keep_up(tier: DiskStore) -> None:
    tier.upkeep()
    assert tier.flush(PATIENCE)


@pytest.mark.parametrize("is_open", [True, False])
def test_of_all_models_what_was_used_longest_ago_goes_first(models: Models, is_open: bool) -> None:
    """Each of these chains fills a segment."""
    one, another = models.open("one"), models.open("another")
    old, read_again, young = chains("one", 3)
    stored(one, old.extent(), read_again.extent())
    first_file, _ = extent_files(models.directory)
    middle = Chain("middle", LENGTH)
    stored(another, middle.extent())
    stored(one, young.extent())
    assert read(one, read_again.names)[1] is None
    files = sorted(extent_files(models.directory), key=lambda path: path.stat().st_mtime)
    assert files[0] == first_file
    if not is_open:
        models.close(one)
    more = iter(chains("another", 100))
    while files[2].exists():
        stored(another, next(more).extent())
        there = [path.exists() for path in files]
        assert there == sorted(there)
    if not is_open:
        one = models.open("one")
    keep_up(one)
    assert [one.known(chain.names) for chain in (old, young)] == [0, 0]
    assert another.known(middle.names) == 0
    assert read(one, read_again.names) == (list(read_again.extent().entries), None)
    assert one.stats().counters.faults == another.stats().counters.faults == {}


def test_what_another_evicts_is_gone_before_it_is_noticed(models: Models) -> None:
    one, another = models.open("one"), models.open("another")
    old = Chain("old", LENGTH)
    stored(one, old.extent())
    for chain in chains("another", 30):
        stored(another, chain.extent())
    assert one.known(old.names) == LENGTH
    _, failure = read(one, old.names)
    assert failure is not None
    assert failure.fault is Fault.GONE
    keep_up(one)
    assert one.known(old.names) == 0
    assert one.stats().counters.faults == {}
    stored(one, old.extent())
    assert read(one, old.names) == (list(old.extent().entries), None)


def test_an_idle_models_folder_goes_with_its_last_segment(models: Models) -> None:
    one, another = models.open("one"), models.open("another")
    stored(one, Chain("old", LENGTH).extent())
    models.close(one)
    for chain in chains("another", 30):
        stored(another, chain.extent())
    assert [use.fingerprint for use in maintenance.du(models.directory)] == ["another"]
    assert models.open("one").stats().counters.faults == {}


def test_another_daemon_is_refused_and_told_who_has_it(models: Models) -> None:
    models.open("one")
    for daemon in ("", "1 others"):
        with pytest.raises(DiskError, match=r"is in use by another daemon \(pid 1\)"):
            models.open("another", daemon=daemon)
    models.open("another")


def test_a_daemon_keeps_others_out_as_long_as_one_of_its_models_runs(models: Models) -> None:
    one, another = models.open("one"), models.open("another")
    models.close(one)
    with pytest.raises(DiskError, match="in use"):
        models.open("one", daemon="1 others")
    models.close(another)
    models.open("one", daemon="1 others")


def test_the_engines_of_a_daemon_that_was_killed_are_waited_for(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = models.open("one", daemon=f"{ended_process()} killed")
    monkeypatch.setattr(folder, "sleep", lambda _: models.close(one))
    stored(models.open("another", daemon="1 others"), Chain("chain", LENGTH).extent())


def test_they_are_not_waited_for_without_end(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "LINGER_SECONDS", 0.0)
    pid = ended_process()
    models.open("one", daemon=f"{pid} killed")
    with pytest.raises(DiskError, match=rf"in use by another daemon \(pid {pid}\)"):
        models.open("another", daemon="1 others")


def test_a_model_that_is_served_twice_has_two_folders(models: Models) -> None:
    first, chain = models.open("one"), Chain("first", LENGTH)
    stored(first, chain.extent())
    second = models.open("one")
    assert second.known(chain.names) == 0
    stored(second, chain.extent())
    names = [use.folder.name for use in maintenance.du(models.directory)]
    assert names == [names[0], f"{names[0]}-2"]
    models.close(first)
    assert models.open("one").known(chain.names) == LENGTH


def test_folders_that_nobody_has_open_are_cleared_of_one_model_or_of_all(models: Models) -> None:
    """As of models that a daemon has unloaded, while it serves another."""
    names = ("one", "two", "three")
    tiers = {name: models.open(f"{name} kv") for name in names}
    for name, tier in tiers.items():
        stored(tier, Chain(name, LENGTH).extent())
    models.close(tiers["one"])
    models.close(tiers["two"])
    assert maintenance.clear_unopened(models.directory, DAEMON, "one ") > LENGTH * 40_960
    left = {use.fingerprint for use in maintenance.du(models.directory)}
    assert left == {"two kv", "three kv"}
    assert maintenance.clear_unopened(models.directory, DAEMON) > LENGTH * 40_960
    assert [use.fingerprint for use in maintenance.du(models.directory)] == ["three kv"]
    assert tiers["three"].known(Chain("three", LENGTH).names) == LENGTH
    with pytest.raises(DiskError, match="another daemon"):
        maintenance.clear_unopened(models.directory, "1 others")


def test_the_day_is_shared(models: Models) -> None:
    limits = replace(LIMITS, daily_bytes=1_500_000)
    one, another = models.open("one", limits), models.open("another", limits)
    chain = Chain("chain", LENGTH)
    stored(one, chain.extent())
    left = 1_500_000 - LENGTH * 40_960
    assert one.room == left
    late = Chain("late", 15)
    stored(another, late.extent())  # it is taken: nobody has looked
    assert another.known(late.names) == 0
    assert another.room == left
    assert another.stats().counters.refused_entries == 15


def test_each_model_knows_what_it_takes_and_what_all_do(models: Models) -> None:
    one, another = models.open("one"), models.open("another")
    for chain in chains("one", 3):
        stored(one, chain.extent())
    keep_up(another)
    mine, theirs = one.stats(), another.stats()
    assert mine.used_bytes >= 3 * LENGTH * 40_960 > theirs.used_bytes > 0
    assert mine.used_bytes + theirs.used_bytes <= theirs.shared_bytes
    assert theirs.shared_bytes == sum(
        use.allocated_bytes for use in maintenance.du(models.directory)
    )


def test_a_folder_of_an_old_format_is_removed(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    old = models.directory / f"v1-{'0' * 32}"
    foreign = models.directory / "v1-website"
    for path in (old, foreign):
        path.mkdir()
        (path / "00000001.kv").write_bytes(b"anything")
    models.open("one")
    assert not old.exists()
    assert foreign.exists()
    assert f"{old} has the old format v1 and was removed" in caplog.text


def test_a_lock_is_signed_by_who_has_the_folder(tmp_path: Path) -> None:
    taken, lock = take_folder(tmp_path, "model")
    assert (taken / LOCK).read_text() == f"{os.getpid()}\n"
    lock.close()
