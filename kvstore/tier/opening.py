"""Opens a folder as a process or a power loss left it: a catalog whose records can all be read."""

import gc
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvstore.tier.catalog import Catalog
from kvstore.tier.disk.files import Files
from kvstore.tier.disk.index import FILE_NAME, Index
from kvstore.tier.disk.segments import Segments
from kvstore.tier.record import Record
from kvstore.tier.tally import Tally
from kvstore.tier.types import Fault


def open_index(files: Files, folder: Path, tally: Tally) -> tuple[Index, list[Record]]:
    """One that cannot be understood is begun anew: without it the segments say nothing. Raises
    OSError and sqlite3.OperationalError where the disk is at fault.
    """
    try:
        return _read_index(files, folder)
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:
        tally.fault(Fault.INDEX)
        for suffix in ("", "-wal", "-shm", "-journal"):
            files.remove(folder / f"{FILE_NAME}{suffix}")
        return _read_index(files, folder)


@contextmanager
def collector_paused() -> Iterator[None]:
    """While a hundred thousand records are made, none of which is garbage, cycles are not looked
    for among them again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def load_catalog(
    records: Sequence[Record], segments: Segments, tally: Tally
) -> tuple[Catalog, list[Record]]:
    """And the records that are no use: evicted by others, without their bytes, or without a parent.
    Files that no record needs are removed, and the last segment goes on behind its last record.
    """
    catalog, there, useless = Catalog(), list[Record](), list[Record]()
    sizes = {number: segments.size(number) for number in segments.numbers()}
    for record in records:
        if 0 <= record.offset <= record.offset + record.n_bytes <= sizes.get(record.segment, -1):
            there.append(record)
        else:
            useless.append(record)
            if record.segment in sizes:
                tally.fault(Fault.SHORT_READ if record.is_sane else Fault.INDEX)
    useless += catalog.fill(there)
    live = catalog.segments()
    for number in sizes.keys() - live.keys():
        segments.remove(number)
    if live:
        last = max(live)
        segments.resume(last, max(it.end for it in catalog.records() if it.segment == last))
    return catalog, useless


def _read_index(files: Files, folder: Path) -> tuple[Index, list[Record]]:
    index = Index(files, folder)
    try:
        return index, list(index.load())
    except BaseException:
        index.close()
        raise
