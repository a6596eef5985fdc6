"""Which web origins may send requests. Only browsers send an Origin header."""

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

ANY_ORIGIN = "*"
APP_SCHEMES = "app|file|tauri|vscode-webview|vscode-file"
"""Of desktop programs' own pages, as Ollama allows them: no web site can have such an origin."""

ORIGIN = re.compile(rf"\*|(?:{APP_SCHEMES})://\*|[a-z][a-z0-9+.-]*://[a-z0-9_.:\[\]-]+")


class Origins:
    """Whose pages may ask: origins as browsers send them, `app://*` and the like, or `*`."""

    def __init__(self, allowed: Sequence[str]) -> None:
        patterns = [re.escape(origin).replace(r"\*", ".*") for origin in allowed]
        self.pattern = "|".join(patterns) or "(?!)"

    def has(self, origin: str) -> bool:
        return re.fullmatch(self.pattern, origin) is not None


def is_origin(text: str) -> bool:
    """Whether it can stand in Origins."""
    return ORIGIN.fullmatch(text) is not None


def is_own(origin: str, host: str) -> bool:
    """Whether an Origin header names this Host. `null`, and what is no URL, name none."""
    try:
        named = urlsplit(origin).netloc
    except ValueError:
        return False
    return bool(named) and named == host
