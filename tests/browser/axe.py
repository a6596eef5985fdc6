"""What keeps somebody from using a page."""

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

GRAVE = {"serious", "critical"}


def grave(page: Page) -> list[str]:
    """What axe finds that is."""
    violations = Axe().run(page).response["violations"]
    return [
        f"{found['id']}: {[node['target'] for node in found['nodes']]}"
        for found in violations
        if found["impact"] in GRAVE
    ]
