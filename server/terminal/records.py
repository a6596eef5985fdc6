"""Files that tell which daemons of this user run on this machine, wherever they listen.

Each daemon has one in the user's state folder while it runs, and holds a lock on it. The kernel
drops the lock however the daemon ends, so a file that is not locked is stale, and is removed.
"""

import fcntl
import os
import platform
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from server.settings.folders import state_folder


class Record(BaseModel):
    """A running daemon. It has no API key."""

    model_config = ConfigDict(frozen=True)

    pid: int
    machine: str  # its name: a home may be shared by several
    url: str  # with /v1
    models: tuple[str, ...]  # all names that the settings give its models

    @property
    def text(self) -> str:
        """The URL, and the names of the models."""
        return f"{self.url} ({', '.join(self.models)})"


def records_folder() -> Path:
    """The folder of the files. It may not exist yet."""
    return state_folder() / "daemons"


@contextmanager
def recorded(url: str, models: Sequence[str]) -> Iterator[None]:
    """Keep a record of this process, which only its user can read, until the block ends.

    Raises OSError at its beginning if there can be none.
    """
    record = Record(pid=os.getpid(), machine=platform.node(), url=url, models=tuple(models))
    folder = records_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f"{record.pid}-", dir=folder)  # with mode 0600
    path = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(record.model_dump_json())
            file.flush()
            path = path.rename(path.with_name(f"{path.name}.json"))
            yield
    finally:
        path.unlink(missing_ok=True)


def running_records() -> list[Record]:
    """The records of the daemons that run, by their URLs."""
    found = filter(None, map(_read, records_folder().glob("*.json")))
    here = platform.node()
    return sorted((each for each in found if each.machine == here), key=lambda each: each.url)


def _read(path: Path) -> Record | None:
    """The record in the file. None for one that is stale, which is removed, or not readable."""
    with suppress(OSError, ValidationError), path.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return Record.model_validate_json(file.read())
        path.unlink()
    return None
