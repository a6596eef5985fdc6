"""What stands on a page, as a visitor sees it: bars, dialogs, and what keeps somebody from it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

BARS = """() => [...document.querySelectorAll(".bar")].map((bar) => {
  const body = bar.querySelector(".body");
  const [x, y, width, height] = ["x", "y", "width", "height"].map((n) => +body.getAttribute(n));
  const { tokens, holders } = bar.dataset;
  const found = +(bar.querySelector(".found")?.dataset.tokens ?? 0);
  return { tokens: +tokens, holders: +holders, found, x, y, width, height };
})"""
GAP = 2  # pixels between neighbours


@dataclass(frozen=True)
class Bar:
    """A run of tokens. Positions are in pixels. `found`: the number of highlighted tokens."""

    tokens: int
    holders: int
    found: int
    x: float
    y: float
    width: float
    height: float

    def is_behind(self, other: "Bar") -> bool:
        """Whether it begins where the other ends, within the other's height."""
        follows = abs(self.x - (other.x + other.width + GAP)) < 1
        return follows and other.y <= self.y and self.y + self.height <= other.y + other.height + 1


def bars(page: Page) -> list[Bar]:
    found: list[dict[str, Any]] = page.evaluate(BARS)
    return [Bar(**bar) for bar in found]


def clear(page: Page, *what: str) -> None:
    """Clear this and nothing else, by the names that the dialog has for it."""
    page.get_by_role("button", name="Clear the cache").click()
    dialog = page.get_by_role("dialog", name="Clear the cache")
    for choice in dialog.get_by_role("checkbox").all():
        label = choice.evaluate("choice => choice.nextSibling.firstChild.textContent")
        choice.set_checked(label in what)
    for label in what:
        expect(dialog.get_by_role("checkbox", name=label)).to_be_checked()
    dialog.get_by_role("button", name="Clear", exact=True).click()
    expect(dialog).to_be_hidden()


Scheme = Literal["dark", "light"]
SCHEMES: tuple[Scheme, ...] = "dark", "light"
GRAVE = {"serious", "critical"}
RULES = {"label-content-name-mismatch": {"enabled": True}}
"""Besides those that axe has on: who says what a button shows must mean that button."""
OPTIONS = {"rules": RULES, "resultTypes": ["violations"]}
"""What axe describes: one element of each rule that passed, and all that break one."""


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
        for found in Axe().run(page, options=OPTIONS).response["violations"]
        if found["impact"] in GRAVE
    ]
