"""`rootstock cache` on a disk cache's directory, without a daemon."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.table import Table

from kvstore.disk import store as disk_store
from kvstore.disk.store import FolderCheck, FolderUse
from kvstore.disk.types import DiskError
from server.terminal.errors import TerminalError
from server.terminal.tables import listing
from server.terminal.text import bytes_text, printable

HEADS = ("folder", "files", "size", "of")


def used(directory: Path) -> Sequence[FolderUse]:
    """The folders, one for each model and format stored there. Raises TerminalError."""
    with _as_terminal_errors():
        return disk_store.du(directory)


def use_table(uses: Sequence[FolderUse]) -> Table:
    rows = [
        (
            use.folder.name,
            f"{use.n_extents:,}",
            bytes_text(use.allocated_bytes),
            use.fingerprint,
        )
        for use in uses
    ]
    return listing(HEADS, rows)


def checked(directory: Path) -> Iterator[FolderCheck]:
    """The folders, each when it has been read. Raises TerminalError."""
    with _as_terminal_errors():
        yield from disk_store.verify(directory)


def verdict(check: FolderCheck) -> str:
    """The result of a check, in one line."""
    return printable(f"{check.folder.name}: {_found(check)}")


def emptied(directory: Path) -> int:
    """Empty the directory. Returns the bytes freed. Raises TerminalError."""
    with _as_terminal_errors():
        return disk_store.clear(directory)


def _found(check: FolderCheck) -> str:
    found = [f"{check.entries:,} entries, {bytes_text(check.n_bytes)}"]
    if check.damaged:
        found.append(f"{len(check.damaged):,} damaged")
    if check.orphans:
        found.append(f"{check.orphans:,} that nothing leads to")
    return ", ".join([*found, "sound"] if check.is_sound else found)


@contextmanager
def _as_terminal_errors() -> Iterator[None]:
    try:
        yield
    except DiskError as error:
        raise TerminalError(str(error)) from error
