"""How long a disk cache takes to open: `python -m load_tests.bench.opening`. No model.

Its payloads are a few bytes each: what is opened are headers, whatever they tell of. Paths of 500
entries in extents of 200. The least and the median of processor seconds.
"""

import statistics
import tempfile
import time
from pathlib import Path

from blake3 import blake3

from kvstore.disk.store import DiskStore
from kvstore.disk.types import MIB, DiskLimits, EntryHead
from kvstore.tokens import Digest

RECORDS, PATH, REPEATS = 100_000, 500, 10
PARTS = (bytes(64), None)
LIMITS = DiskLimits(max_bytes=1024 * MIB, extent_bytes=200 * 64)


def fill(directory: Path, n_records: int) -> None:
    """Paths below one root, in extents."""
    tier, root = DiskStore.open(directory, "none", LIMITS), _name(b"root")
    for start in range(0, n_records, PATH):
        parent = root
        for number in range(start, min(start + PATH, n_records)):
            head = EntryHead(_name(b"%d" % number), 32, (64, None))
            while (reservation := tier.reserve(root, parent, head)) is None:
                tier.flush()
            tier.write(reservation, PARTS)
            parent = head.block_hash
    tier.flush()
    tier.close()


def opening_seconds(directory: Path, n_records: int) -> float:
    """Processor seconds of opening it once."""
    start = time.process_time()
    tier = DiskStore.open(directory, "none", LIMITS)
    seconds = time.process_time() - start
    assert tier.stats().entries == n_records
    tier.close()
    return seconds


def _name(seed: bytes) -> Digest:
    return Digest(blake3(seed).digest())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        fill(directory, RECORDS)
        seconds = [opening_seconds(directory, RECORDS) for _ in range(REPEATS)]
    print(
        f"{RECORDS:,} records: {min(seconds):.2f} s at least, {statistics.median(seconds):.2f} s "
        f"in the middle of {REPEATS}"
    )


if __name__ == "__main__":
    main()
