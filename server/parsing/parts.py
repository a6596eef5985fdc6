"""The parts of an answer: content, reasoning and tool calls, in the order of the text."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning, which is not part of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The begin of a tool call. `index` counts an answer's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A slice of a call's arguments. A call's slices, joined, are a JSON object."""

    index: int
    text: str


AnswerPart: TypeAlias = Content | Reasoning | CallBegun | CallArguments
