"""What can happen to a directory while nobody looks."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from kvstore.disk.folder import folders
from tests.disk_store_harness import extent_files, flip, offset_of

Damage = Callable[[Path, random.Random], None]

FLIP_EVERY_BYTES = 100_000


def nothing(directory: Path, randomness: random.Random) -> None:
    """It stays as it is."""


def flipped_bits(directory: Path, randomness: random.Random) -> None:
    for path in extent_files(directory):
        n_bytes = path.stat().st_size
        for _ in range(n_bytes // FLIP_EVERY_BYTES):
            flip(path, randomness.randrange(n_bytes))


def truncated(directory: Path, randomness: random.Random) -> None:
    for path in extent_files(directory):
        with path.open("r+b") as file:
            file.truncate(randomness.randrange(path.stat().st_size))


def all_cut(directory: Path, randomness: random.Random) -> None:
    """Every file that there is, in half."""
    for path in directory.rglob("*"):
        if path.is_file():
            os.truncate(path, path.stat().st_size // 2)


def missing(directory: Path, randomness: random.Random) -> None:
    """Every other extent, and one more."""
    for path in [*extent_files(directory)[::2], extent_files(directory)[-1]]:
        path.unlink(missing_ok=True)


def headers_have_flipped_bits(directory: Path, randomness: random.Random) -> None:
    for path in extent_files(directory):
        flip(path, randomness.randrange(offset_of(path, 0)))


def nonsense(directory: Path, randomness: random.Random) -> None:
    """In place of every other file."""
    for path in extent_files(directory)[::2]:
        path.write_bytes(randomness.randbytes(path.stat().st_size))


def headers_change_places(directory: Path, randomness: random.Random) -> None:
    """All headers and all bytes are sound, and do not belong together."""
    paths = extent_files(directory)
    contents = [(path.read_bytes(), offset_of(path, 0)) for path in paths]
    for path, (mine, start), (theirs, at) in zip(
        paths, contents, [*contents[1:], contents[0]], strict=True
    ):
        path.write_bytes(mine[:start] + theirs[at:])


def called_as_ours(directory: Path, randomness: random.Random) -> None:
    """Another model's folder has the name of ours."""
    foreign, ours = folders(directory)
    shutil.rmtree(ours)
    foreign.rename(ours)
