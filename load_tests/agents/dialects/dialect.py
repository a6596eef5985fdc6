"""What the player asks of a dialect."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from load_tests.agents.recording import Answer, Call, Tool

Json = dict[str, Any]
Choice = Literal["auto", "required"]


@dataclass(frozen=True, slots=True)
class UserTurn:
    """What the client says: results of the calls before, by their ids, then the user's words."""

    results: tuple[tuple[str, str], ...]
    text: str


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, in no dialect."""

    model: str
    system: str
    tools: Sequence[Tool]
    history: Sequence[UserTurn | Answer]
    choice: Choice  # whether the answer must be a call
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Told:
    """One answer, in no dialect. `prompt_tokens` are all of the prompt's, cached or not."""

    answer: Answer
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Reader(Protocol):
    """Takes in one stream."""

    def hear(self, event: Mapping[str, Any]) -> None:
        """The JSON of one event. Raises KeyError, TypeError, ValueError: not the dialect's."""

    def told(self) -> Told:
        """What the whole stream said. Raises ValueError when it was not whole."""


class Dialect(Protocol):
    """One API. Streams may end with `[DONE]`, which no reader hears."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str:
        """Behind the base URL, which ends in /v1."""

    def body(self, ask: Ask) -> Json: ...

    def reader(self) -> Reader: ...


@dataclass(slots=True)
class CallParts:
    """A call as streams bring it."""

    id: str
    name: str
    arguments: str = ""

    def call(self) -> Call:
        return Call(self.id, self.name, self.arguments)
