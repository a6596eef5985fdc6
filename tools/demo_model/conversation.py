"""Pieces of conversations, which tasks generate for training and scoring, as OpenAI messages."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tools.demo_model.words import Words

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Some turns, the last of which is the assistant's. `tools` are offered in all of them."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = field(default=())


class Task(Protocol):
    """A kind of conversation that the model learns."""

    @property
    def name(self) -> str:
        """The name in the table of scores."""
        ...

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        """Generate a piece of conversation with these words."""
        ...


def user(content: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """A message of the assistant, without tool calls."""
    return {"role": "assistant", "content": content}


def turns(*contents: str) -> Exchange:
    """An exchange of these messages, of the user and the assistant in turn."""
    return Exchange(
        [user(text) if index % 2 == 0 else assistant(text) for index, text in enumerate(contents)]
    )
