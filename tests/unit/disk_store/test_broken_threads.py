"""A fault of our own costs what was being done, and a thread that is lost for good is told of."""

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from kvstore.disk import reader, writer
from kvstore.disk.reader import READERS
from kvstore.disk.store import DiskStore
from kvstore.disk.types import Fault, ReadFailure
from tests.disk_store_harness import LIMITS, PATIENCE, Chain, FaultyFiles, offer, read, stored

LOST = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
CHAIN, MORE = Chain("one", 20), Chain("more", 20)


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def tier(tmp_path: Path, files: FaultyFiles) -> Iterator[DiskStore]:
    tier = DiskStore.open(tmp_path, "model", LIMITS, files)
    stored(tier, CHAIN.extent())
    yield tier
    files.heal()
    tier.close()


def raising(error: BaseException) -> Callable[..., NoReturn]:
    def raises(*_: object) -> NoReturn:
        raise error

    return raises


def ended(thread: str) -> None:
    """Until a thread that is about to end has."""
    for found in [found for found in threading.enumerate() if found.name == thread]:
        found.join(PATIENCE)


FAULTS = pytest.mark.parametrize(
    ("error", "fault"),
    [(ValueError("a fault of ours"), Fault.INTERNAL), (MemoryError(), Fault.RESOURCES)],
    ids=["a fault of ours", "too little memory"],
)


@FAULTS
def test_a_reader_goes_on_and_each_read_fails(
    tier: DiskStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    fault: Fault,
) -> None:
    """More often than there are readers. Nothing is forgotten, and only our own fault is logged."""
    with monkeypatch.context() as broken:
        broken.setattr(reader, "parse", raising(error))
        for _ in range(READERS + 1):
            assert read(tier, CHAIN.names) == ([], ReadFailure(0, fault))
    assert read(tier, CHAIN.names)[1] is None
    assert tier.stats().ended_threads == ()
    if fault is Fault.INTERNAL:
        assert tier.stats().counters.faults == {fault: READERS + 1}
        assert caplog.text.count("ValueError: a fault of ours") == READERS + 1


@FAULTS
def test_the_writer_goes_on_and_what_it_had_can_be_offered_again(
    tier: DiskStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    fault: Fault,
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(writer, "encode", raising(error))
        assert offer(tier, MORE.extent())
        assert tier.flush(PATIENCE)
    assert tier.held(MORE.names) == 0
    assert tier.stats().counters.faults == {fault: 1}
    if fault is Fault.INTERNAL:
        assert caplog.text.count("ValueError: a fault of ours") == 1
    else:
        assert tier.stats().write_fault is fault
    tier.upkeep()
    assert tier.flush(PATIENCE)
    stored(tier, MORE.extent())
    assert tier.stats().write_fault is None
    assert read(tier, MORE.names)[1] is None
    assert tier.stats().ended_threads == ()


def test_a_disk_that_goes_on_failing_is_logged_once(
    tier: DiskStore, files: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        files.fail("disk", 5)
        for _ in range(3):
            tier.upkeep()
            assert tier.flush(PATIENCE)
        files.heal()
        tier.upkeep()
        assert tier.flush(PATIENCE)
        stored(tier, MORE.extent())
        tier.forget(MORE.names[0])
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert ["the disk cache cannot be written (io)" in each.message for each in said] == [True] * 2


@LOST
def test_a_writer_that_is_lost_is_told_of_and_the_rest_is_read(
    tier: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(writer, "encode", raising(SystemExit()))
        assert offer(tier, MORE.extent())
        ended("disk-writer")
    assert tier.stats().ended_threads == ("disk-writer",)
    assert read(tier, CHAIN.names)[1] is None


@LOST
def test_readers_that_are_lost_are_told_of_and_nobody_waits_for_them(
    tier: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(reader, "parse", raising(SystemExit()))
        for _ in range(READERS):
            tier.read(CHAIN.names, lambda found: None)
        for number in range(READERS):
            ended(f"disk-reader-{number}")
    assert tier.stats().ended_threads == ("disk-reader-0", "disk-reader-1")
    assert read(tier, CHAIN.names) == ([], ReadFailure(0, Fault.INTERNAL))


def test_threads_that_have_been_ended_are_not_lost(tmp_path: Path) -> None:
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    tier.close()
    assert tier.stats().ended_threads == ()
