"""A draft: tokens that a sequence may generate next, to be verified in one forward."""

from dataclasses import dataclass

from engine.types.draft import DraftSource

__all__ = ["Draft", "DraftSource"]


@dataclass(frozen=True, slots=True)
class Draft:
    """At least one token, and what they were taken from."""

    tokens: tuple[int, ...]
    source: DraftSource
