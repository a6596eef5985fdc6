"""The events of a streamed answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what a model thinks before it answers; not part of the conversation."""

    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The last token has come. `reason` is the server's word: "stop", "length" and others."""

    reason: str


@dataclass(frozen=True, slots=True)
class Usage:
    """The server's counts. `cached_tokens` is None where it does not report them."""

    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int


Event = Text | Reasoning | Finish | Usage
