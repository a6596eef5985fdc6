"""What an answer consists of, in the order in which a model writes it."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text from before the answer, not part of it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call. `index` counts an answer's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A slice of a call's arguments. A call's slices, joined, are a JSON object."""

    index: int
    text: str


AnswerPart: TypeAlias = Content | Reasoning | CallBegun | CallArguments
