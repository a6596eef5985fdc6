"""The distribution's Chromium. None is downloaded."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
APPLICATIONS = (
    Path("/Applications/Chromium.app/Contents/MacOS/Chromium"),
    Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"),
)
MISSING = f"no Chromium: none of {', '.join(NAMES)} is on the PATH"


def executable() -> str | None:
    """Where a Chromium is installed, if one is."""
    on_path = filter(None, map(shutil.which, NAMES))
    return next(on_path, None) or next((str(path) for path in APPLICATIONS if path.exists()), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable())
        try:
            yield browser
        finally:
            browser.close()
