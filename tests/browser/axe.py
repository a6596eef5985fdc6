"""What keeps somebody from using a page."""

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

GRAVE = {"serious", "critical"}
RULES = {"label-content-name-mismatch": {"enabled": True}}
"""Besides those that axe has on: who says what a button shows must mean that button."""


def grave(page: Page) -> list[str]:
    """What axe finds that is."""
    violations = Axe().run(page, options={"rules": RULES}).response["violations"]
    return [
        f"{found['id']}: {[node['target'] for node in found['nodes']]}"
        for found in violations
        if found["impact"] in GRAVE
    ]
