"""A cache directory of any content is opened and serves, and nothing outside it changes: links,
pipes and folders in the place of files, files with the right checksum whose content makes no sense.
"""

import os
import struct
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.disk.extent import CHECKSUM_BYTES, HEAD, MAGIC, PREFIX
from kvstore.disk.store import DiskStore, clear, du, verify
from kvstore.disk.types import DiskError
from kvstore.tokens import Digest
from tests.disk_store_harness import LIMITS, PATIENCE, Chain, entry, extent_files, read, stored
from tests.profiles import examples

MODEL = f"v4-{blake3(b'model').hexdigest(length=16)}"
HASHES = [Digest(bytes([number]) * 32) for number in range(5)]
CHAIN = Chain("chain", 5)

hashes = st.sampled_from(HASHES)
counts = st.sampled_from([0, 1, 2, 3, 1_000_000, 2**32 - 1])


@dataclass(frozen=True)
class Item:
    """Something at a path of the directory: `kind` says what, `content` what is in a file."""

    path: str
    kind: str
    content: bytes = b""


def signed(body: bytes) -> bytes:
    """A file whose header has the right checksum."""
    checksum = blake3(body).digest(length=CHECKSUM_BYTES)
    return PREFIX.pack(MAGIC, len(body), checksum) + body


@st.composite
def extent_bodies(draw: st.DrawFn) -> bytes:
    """A header with any root, parent, counts, hashes, lengths and sizes; sometimes cut short."""
    n_entries, n_parts = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    body = HEAD.pack(
        draw(hashes),
        draw(hashes),
        draw(st.just(n_entries) | counts),
        draw(st.just(n_parts) | counts),
    )
    for _ in range(n_entries):
        n_tokens = draw(st.sampled_from([0, 1, 16, 2**32 - 1]))
        body += struct.pack("<32sI16s", draw(hashes), n_tokens, bytes(16))
        for _ in range(n_parts):
            body += struct.pack("<q", draw(st.sampled_from([-5, -1, 0, 8, 2**40, 2**62])))
    return draw(st.just(body) | st.integers(0, len(body)).map(lambda end: body[:end]))


def joined(*parts: bytes) -> bytes:
    return b"".join(parts)


extents = st.builds(
    joined, extent_bodies().map(signed), st.sampled_from([b"", bytes(8), bytes(64)])
)
contents = extents | st.binary(max_size=200) | st.just(PREFIX.pack(MAGIC, 2**32 - 1, bytes(16)))
others = st.sampled_from(["link to a file", "link to a folder", "link to nothing", "loop", "pipe"])
folders = st.sampled_from(["empty folder", "folder"])
own_names = st.sampled_from(
    ["lock", "fingerprint", "model", "x.tmp", "fingerprint.tmp", "notes"]
    + [f"{number:016x}.kv" for number in range(6)]
)
own_items = st.builds(
    Item,
    own_names.map(lambda name: f"{MODEL}/{name}"),
    st.just("file") | others | folders,
    contents,
)
texts = st.sampled_from([b"", b"1 x", b"20786 -5", b"9" * 250, b"0 99999999999999999999999"])
top_items = st.builds(
    Item,
    st.sampled_from(["lock", "write.lock", "written"]),
    st.just("file") | others | st.just("empty folder"),
    texts,
)
folder_items = st.builds(
    Item,
    st.sampled_from([MODEL, f"{MODEL}-2", f"v1-{'0' * 32}", f"v4-{'1' * 32}", f"v5-{'2' * 32}"]),
    st.just("file") | others | folders,
)
extent_items = st.builds(
    Item, st.integers(0, 99).map(lambda n: f"{MODEL}/{n:016x}.kv"), st.just("file"), extents
)


def put(directory: Path, outside: Path, item: Item) -> None:
    path = directory / item.path
    if path.parent.is_symlink() or (path.parent.exists() and not path.parent.is_dir()):
        return
    if path.exists() or path.is_symlink():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    match item.kind:
        case "file":
            path.write_bytes(item.content)
        case "empty folder":
            path.mkdir()
        case "folder":
            (path / "lock").mkdir(parents=True)
            (path / "lock" / "file").write_bytes(b"")
            (path / "link").symlink_to(outside)
        case "link to a file":
            path.symlink_to(outside / "file")
        case "link to a folder":
            path.symlink_to(outside / "folder")
        case "link to nothing":
            path.symlink_to(outside / "nothing")
        case "loop":
            path.symlink_to(path)
        case "pipe":
            os.mkfifo(path)


def seen(outside: Path) -> dict[str, tuple[int, int, bytes]]:
    """All that is outside: modes, times and contents."""
    return {
        str(path.relative_to(outside)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in [outside, *outside.rglob("*")]
    }


def in_time(act: Callable[[], None]) -> None:
    """Run it in a thread of its own, so that a test fails where it never ends."""
    errors = list[BaseException]()

    def run() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it never ends"
    if errors:
        raise errors[0]


def open_and_serve(directory: Path) -> None:
    """The cache takes and returns a path, now and after a restart."""
    for is_new in (True, False):
        tier = DiskStore.open(directory, "model", LIMITS)
        assert not list(tier.problems())
        assert tier.known(CHAIN.names) == (0 if is_new else len(CHAIN.names))
        if is_new:
            stored(tier, CHAIN.extent())
        for name in HASHES:
            tier.touch([name])
        tier.upkeep()
        assert tier.flush(PATIENCE)
        found, failure = read(tier, CHAIN.names)
        assert failure is None
        assert found == [entry(name, CHAIN.n_bytes) for name in CHAIN.names]
        assert tier.stats().write_fault is None
        assert len(extent_files(directory)) <= 1 + tier.stats().entries
        tier.close()
    assert all(use.fingerprint in ("model", "") for use in du(directory))
    list(verify(directory))


@given(
    items=st.lists(own_items | top_items | folder_items, max_size=8),
    extents=st.lists(extent_items, max_size=12),
)
@settings(max_examples=examples(150), deadline=None)
def test_a_directory_of_any_content_serves(items: list[Item], extents: list[Item]) -> None:
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        directory, outside = Path(name) / "cache", Path(name) / "outside"
        (outside / "folder").mkdir(parents=True)
        (outside / "folder" / "file").write_bytes(b"mine")
        (outside / "file").write_bytes(b"mine")
        directory.mkdir()
        for item in (*items, *extents):
            put(directory, outside, item)
        before = seen(outside)
        in_time(lambda: open_and_serve(directory))
        clear(directory)
        assert seen(outside) == before


def test_a_cycle_of_two_namespaces_ends(tmp_path: Path) -> None:
    """Each root is an entry of the other one."""
    for number, (root, other) in enumerate([HASHES[:2], HASHES[1::-1]]):
        body = HEAD.pack(root, root, 1, 1) + struct.pack("<32sI16sq", other, 16, bytes(16), 0)
        put(tmp_path, tmp_path, Item(f"{MODEL}/{number:016x}.kv", "file", signed(body)))
    in_time(lambda: open_and_serve(tmp_path))


def test_what_may_be_somebodys_folder_is_left_and_named(tmp_path: Path) -> None:
    """The directory may be a home that has a folder `lock` with something in it."""
    (tmp_path / "lock").mkdir()
    (tmp_path / "lock" / "file").write_text("mine")
    with pytest.raises(DiskError, match="Directory not empty"):
        DiskStore.open(tmp_path, "model", LIMITS)
    assert (tmp_path / "lock" / "file").read_text() == "mine"


def test_what_appears_in_the_folder_later_is_evicted_first(tmp_path: Path) -> None:
    """It counts, so it must not stay for ever."""
    tier = DiskStore.open(tmp_path, "model", LIMITS)
    stored(tier, CHAIN.extent())
    [folder] = (use.folder for use in du(tmp_path))
    (folder / f"{1:016x}.kv").write_bytes(bytes(12 << 20))
    (folder / f"{2:016x}.kv").mkdir()
    for number in range(6):
        stored(tier, Chain(f"other {number}", 25).extent())
    assert tier.known(CHAIN.names) == len(CHAIN.names)
    assert not (folder / f"{1:016x}.kv").exists()
    tier.close()
