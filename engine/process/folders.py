"""The user's folders."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder for files that can be made again; it may not exist yet. Raises RuntimeError for a
    user without a home.

    https://specifications.freedesktop.org/basedir-spec/latest/
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        cache = Path.home() / ".cache"
    return cache / "rootstock"
