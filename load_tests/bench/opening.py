"""How long a disk cache takes to open: `python -m load_tests.bench.opening`. No model.

- 100,000 entries of a small model, of a few bytes each, since only headers are read: paths of 500
  entries in extents of 200.
- 64 GiB of a large model: extents of 16 MiB with four entries of 4 MiB, in sparse files.

The least and the median of the seconds that opening takes.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

from blake3 import blake3

from kvstore.disk.extent import encode
from kvstore.disk.folder import folders
from kvstore.disk.store import DiskStore
from kvstore.disk.types import MIB, DiskLimits, Entry, EntryHead
from kvstore.tokens import Digest

ENTRIES, EXTENTS, PATH, REPEATS = 100_000, 4096, 500, 10
ZEROS = bytes(4 * MIB)
PARTS = (bytes(64), None)
LIMITS = DiskLimits(max_bytes=1024 * MIB, extent_bytes=200 * 64)


def fill(directory: Path, n_entries: int) -> None:
    """Paths below one root, in extents."""
    tier, root = DiskStore.open(directory, "none", LIMITS), _name(b"root")
    for start in range(0, n_entries, PATH):
        parent = root
        for number in range(start, min(start + PATH, n_entries)):
            head = EntryHead(_name(b"%d" % number), 32, (64, None))
            while (reservation := tier.reserve(root, parent, head)) is None:
                tier.flush()
            tier.write(reservation, PARTS)
            parent = head.block_hash
    tier.flush()
    tier.close()


def fill_sparsely(directory: Path, n_extents: int) -> None:
    """Paths of extents whose payload is a hole."""
    DiskStore.open(directory, "none", LIMITS).close()
    [folder], root = folders(directory), _name(b"root")
    for number in range(n_extents):
        names = [_name(b"%d" % index) for index in range(4 * number, 4 * number + 4)]
        parent = root if number % PATH == 0 else _name(b"%d" % (4 * number - 1))
        entries = [Entry(name, 32, (ZEROS, None)) for name in names]
        header, encoded = encode(root, parent, entries)
        path = folder / f"{number:016x}.kv"
        path.write_bytes(encoded)
        os.truncate(path, header.end)


def opening_seconds(directory: Path, n_entries: int) -> float:
    """Of opening it once."""
    start = time.perf_counter()
    tier = DiskStore.open(directory, "none", LIMITS)
    seconds = time.perf_counter() - start
    assert tier.stats().entries == n_entries
    tier.close()
    return seconds


def _name(seed: bytes) -> Digest:
    return Digest(blake3(seed).digest())


def main() -> None:
    cases = {
        f"{ENTRIES:,} entries": (fill, ENTRIES, ENTRIES),
        f"{EXTENTS:,} extents of 16 MiB": (fill_sparsely, EXTENTS, 4 * EXTENTS),
    }
    for name, (prepare, count, n_entries) in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder), count)
            seconds = [opening_seconds(Path(folder), n_entries) for _ in range(REPEATS)]
        print(
            f"{name}: {min(seconds):.2f} s at least, {statistics.median(seconds):.2f} s "
            f"in the middle of {REPEATS}"
        )


if __name__ == "__main__":
    main()
