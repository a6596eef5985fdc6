"""What can happen to a directory while nobody looks."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from kvstore.tier.disk.folder import folders
from tests.tier_harness import flip, segment_files

Damage = Callable[[Path, random.Random], None]

FLIP_EVERY_BYTES = 100_000


def nothing(directory: Path, randomness: random.Random) -> None:
    """It stays as it is."""


def flipped_bits(directory: Path, randomness: random.Random) -> None:
    for segment in segment_files(directory):
        n_bytes = segment.stat().st_size
        for _ in range(n_bytes // FLIP_EVERY_BYTES):
            flip(segment, randomness.randrange(n_bytes))


def truncated(directory: Path, randomness: random.Random) -> None:
    for segment in segment_files(directory):
        with segment.open("r+b") as file:
            file.truncate(randomness.randrange(segment.stat().st_size))


def all_cut(directory: Path, randomness: random.Random) -> None:
    """Every file that there is, in half."""
    for path in directory.rglob("*"):
        if path.is_file():
            os.truncate(path, path.stat().st_size // 2)


def missing(directory: Path, randomness: random.Random) -> None:
    """Every other segment, and one more."""
    for segment in [*segment_files(directory)[::2], segment_files(directory)[-1]]:
        segment.unlink(missing_ok=True)


def no_index(directory: Path, randomness: random.Random) -> None:
    index(directory).unlink()


def index_is_nonsense(directory: Path, randomness: random.Random) -> None:
    index(directory).write_bytes(randomness.randbytes(index(directory).stat().st_size))


def index_is_cut(directory: Path, randomness: random.Random) -> None:
    with index(directory).open("r+b") as file:
        file.truncate(randomness.randrange(index(directory).stat().st_size))


def index_has_flipped_bits(directory: Path, randomness: random.Random) -> None:
    """One in each page but the first, of which sqlite finds few by itself."""
    for page in range(1, index(directory).stat().st_size // 4096):
        flip(index(directory), page * 4096 + randomness.randrange(4096))


def segments_change_places(directory: Path, randomness: random.Random) -> None:
    """All bytes are sound, and none where the index has them."""
    names = segment_files(directory)
    aside = [segment.rename(segment.with_suffix(".aside")) for segment in names]
    for segment, name in zip(aside, [*names[1:], names[0]], strict=True):
        segment.rename(name)


def called_as_ours(directory: Path, randomness: random.Random) -> None:
    """Another model's folder has the name of ours."""
    foreign, ours = folders(directory)
    shutil.rmtree(ours)
    foreign.rename(ours)


def index(directory: Path) -> Path:
    """Of our own folder, which was opened last."""
    return folders(directory)[-1] / "index.sqlite"
