"""Several threads offer, read, touch, forget and clear at once, in whatever order."""

import random
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from kvstore.disk.catalog import Catalog
from kvstore.disk.extent import encode
from kvstore.disk.store import DiskStore
from kvstore.disk.types import MIB
from tests.disk_store_harness import (
    LIMITS,
    PATIENCE,
    Chain,
    allocated,
    entry,
    head_of,
    offer,
    read,
    stored,
)

N_BYTES = 8_192
CHAINS = [Chain(f"chain {number}", 20, N_BYTES, space="ab"[number % 2]) for number in range(40)]
TURNS = 150


def test_threads_do_not_get_into_each_others_way(tmp_path: Path) -> None:
    tier = DiskStore.open(tmp_path, "model", replace(LIMITS, buffer_bytes=MIB))
    failures = list[BaseException]()

    def write(randomness: random.Random) -> None:
        chain = randomness.choice(CHAINS)
        start = tier.held(chain.names)
        if start < len(chain.names):
            offer(tier, chain.extent(start, start + 5))

    def load(randomness: random.Random) -> None:
        chain = randomness.choice(CHAINS)
        entries, _ = read(tier, chain.names)
        assert entries == [entry(name, N_BYTES) for name in chain.names[: len(entries)]]
        tier.touch(chain.names)

    def forget(randomness: random.Random) -> None:
        tier.forget(randomness.choice(randomness.choice(CHAINS).names))

    def clear(randomness: random.Random) -> None:
        if randomness.random() < 0.05:
            tier.clear(randomness.choice([None, CHAINS[0].root, CHAINS[1].root]))
        assert allocated(tmp_path) <= LIMITS.max_bytes

    def work(number: int) -> None:
        randomness = random.Random(number)
        try:
            for _ in range(TURNS):
                (write, write, load, load, forget, clear)[number](randomness)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert tier.flush(PATIENCE)
    assert not list(tier.problems())
    assert tier.stats().counters.faults == {}
    known = {name for chain in CHAINS for name in chain.names if tier.entry(name)}
    tier.close()
    again = DiskStore.open(tmp_path, "model", LIMITS)
    assert {name for chain in CHAINS for name in chain.names if again.entry(name)} == known
    for chain in CHAINS:
        entries, _ = read(again, chain.names)
        assert len(entries) == again.known(chain.names)
    assert again.stats().counters.faults == {}
    again.close()


def test_what_is_cleared_while_it_is_written_does_not_come_back(tmp_path: Path) -> None:
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    for _ in range(50):
        for chain in CHAINS[:4]:
            offer(tier, chain.extent())
        tier.clear()
        assert tier.flush(PATIENCE)
        assert tier.stats().entries == 0
    tier.close()


def test_the_figures_may_be_read_while_files_are_written(tmp_path: Path) -> None:
    tier = DiskStore.open(tmp_path, "model", replace(LIMITS, extent_bytes=1))
    failures, is_over = list[BaseException](), threading.Event()

    def look() -> None:
        try:
            while not is_over.is_set():
                tier.stats()
        except BaseException as failure:
            failures.append(failure)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    looking = threading.Thread(target=look)
    looking.start()
    try:
        for number in range(20):
            stored(tier, Chain(f"chain {number}", 10, 400).extent())
    finally:
        is_over.set()
        looking.join()
        sys.setswitchinterval(interval)
    assert failures == []
    tier.close()


def test_an_entry_can_be_read_only_once_its_file_has_its_name() -> None:
    """Readers look without a lock, at any moment of the publication."""
    catalog, chain = Catalog(MIB, time.time), Chain("a", 2)
    catalog.allowance = catalog.longest_path = MIB
    entries, parent = chain.extent().entries, chain.root
    for each in entries:
        reservation = catalog.reserve(chain.root, parent, head_of(each))
        assert reservation is not None
        assert catalog.write(reservation, each.parts)
        parent = each.block_hash
    first = catalog.take_queued(MIB)
    header, _ = encode(chain.root, chain.root, entries)
    n_looks = 0

    def look(frame: FrameType, event: str, _: object) -> Any:
        nonlocal n_looks
        for name in chain.names:
            record = catalog.get(name)
            assert record is not None
            if record.is_written:
                n_looks += 1
                assert record.extent.name == "file"
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        catalog.publish(first, "file", header)
    finally:
        sys.settrace(before)
    assert catalog.known(chain.names) == 2
    assert n_looks > 0
