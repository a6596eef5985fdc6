"""The user's folders."""

import os
from pathlib import Path


def state_folder() -> Path:
    """The folder for files that stay between runs; it may not exist yet. Raises RuntimeError for a
    user without a home.

    https://specifications.freedesktop.org/basedir-spec/latest/
    """
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        state = Path.home() / ".local" / "state"
    return state / "rootstock"
