"""The history of the user's input, saved between chats."""

from contextlib import suppress
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from server.terminal.state import state_folder

MOST_BYTES = 2**20


def history_file() -> Path:
    """The file of the history."""
    return state_folder() / "chat_history"


def history_in(file: Path) -> History:
    """The history in a file that its owner alone can read, or in memory where none can be written.
    A large file is renamed to `.old`.
    """
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.chmod(0o600)
        if file.stat().st_size > MOST_BYTES:
            file.replace(file.with_suffix(".old"))
            file.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return _History(file)


class _History(FileHistory):
    def store_string(self, string: str) -> None:
        with suppress(OSError):  # a disk that is full ends no chat
            super().store_string(string)
