"""Where files of ours are kept between commands."""

import os
from pathlib import Path


def state_folder() -> Path:
    """It may not exist. https://specifications.freedesktop.org/basedir-spec/latest/"""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        state = Path.home() / ".local" / "state"
    return state / "rootstock"
