"""What keeps somebody from using a page."""

from collections.abc import Iterator
from typing import Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

Scheme = Literal["dark", "light"]
SCHEMES: tuple[Scheme, ...] = "dark", "light"
GRAVE = {"serious", "critical"}
RULES = {"label-content-name-mismatch": {"enabled": True}}
"""Besides those that axe has on: who says what a button shows must mean that button."""


def in_each_scheme(page: Page) -> Iterator[Scheme]:
    """The page in dark colours, then in light ones."""
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        yield scheme


def grave(page: Page) -> list[str]:
    """What axe finds that is, in either colour scheme."""
    return [
        f"{found['id']}, {scheme}: {[node['target'] for node in found['nodes']]}"
        for scheme in in_each_scheme(page)
        for found in Axe().run(page, options={"rules": RULES}).response["violations"]
        if found["impact"] in GRAVE
    ]
