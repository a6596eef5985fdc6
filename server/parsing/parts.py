"""The parts of an answer: content, reasoning and tool calls, in the order of the text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from uuid import uuid4


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


class NotACall(Exception):
    """The text after a marker is no tool call. Nothing of it has been yielded."""


NewId = Callable[[str, int], str]
"""Makes a call's id from its function's name and its index."""


class Calls:
    """Makes the parts of an answer's calls, one call after the other.

    `tools` are the request's functions: name to JSON schema of the parameters.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], new_id: NewId) -> None:
        self._tools = tools
        self._new_id = new_id
        self.begun = 0

    def begin(self, name: str, id: str | None = None) -> CallBegun:
        """The next call. Raises NotACall for an empty name."""
        if not name:
            raise NotACall
        index = self.begun
        self.begun += 1
        return CallBegun(index, id or self._new_id(name, index), name)

    def arguments(self, text: str) -> CallArguments:
        """A slice of the arguments of the call that began last."""
        return CallArguments(self.begun - 1, text)

    def parameters(self, name: str) -> Mapping[str, Any]:
        """The schemas of a function's parameters by name; none for a function that is unknown."""
        properties = self.schema(name).get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def others(self, name: str) -> Mapping[str, Any]:
        """The schema of a function's parameters that are not declared; empty where it says none."""
        others = self.schema(name).get("additionalProperties")
        return others if isinstance(others, Mapping) else {}

    def declares(self, name: str) -> bool:
        """Whether the request has a function of this name."""
        return name in self._tools

    def schema(self, name: str) -> Mapping[str, Any]:
        """The schema of a function's arguments; an empty one for a function that is unknown."""
        return self._tools.get(name, {})


def openai_id(name: str, index: int) -> str:
    """The form of OpenAI's ids."""
    return f"call_{uuid4().hex[:24]}"


def short_id(name: str, index: int) -> str:
    """Nine letters and digits, which is all that Mistral's templates take."""
    return uuid4().hex[:9]


def indexed_id(name: str, index: int) -> str:
    """`functions.name:0`, which Kimi's templates expect."""
    return f"functions.{name}:{index}"
