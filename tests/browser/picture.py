"""What stands in the picture, as a visitor's browser has it."""

from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Page

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
    """A run of tokens. Places are in pixels. `found`: so many of its tokens are lit."""

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
