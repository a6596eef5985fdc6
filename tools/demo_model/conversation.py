"""What a task hands the trainer: a piece of conversation in the messages of the OpenAI API."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tools.demo_model.words import Words

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Some turns that end with the assistant's; `tools` are offered throughout."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = field(default=())


class Task(Protocol):
    """A kind of conversation that the model must be able to hold."""

    @property
    def name(self) -> str: ...

    def exchange(self, words: Words, rng: random.Random) -> Exchange:
        """A piece of conversation of these words."""
        ...


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def turns(*contents: str) -> Exchange:
    """User and assistant in turn."""
    return Exchange(
        [user(text) if index % 2 == 0 else assistant(text) for index, text in enumerate(contents)]
    )
