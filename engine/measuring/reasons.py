"""Why there are no figures, in words that name no file, no user and no host."""

import getpass
import platform
import re

from engine.mlx_backend.errors import one_line

_PATH = re.compile(r"\S*[/\\]\S*")
_HIDDEN = "..."


def reason(error: BaseException) -> str:
    """The error's type and what it says, on one line. Whatever may be a path is left out."""
    said = one_line(error).removeprefix(type(error).__name__).strip()
    return f"{type(error).__name__}: {without_names(said)}" if said else type(error).__name__


def without_names(text: str) -> str:
    """Without words that have a slash in them, the user's name and the host's."""
    text = _PATH.sub(_HIDDEN, text)
    for name in filter(None, (_user(), platform.node(), platform.node().partition(".")[0])):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", _HIDDEN, text, flags=re.IGNORECASE)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in containers
        return ""
