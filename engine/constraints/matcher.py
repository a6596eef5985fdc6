"""A grammar's state in one sequence. Another process computes what may follow."""

from dataclasses import dataclass, field
from typing import TypeAlias

from engine.step.plan import Masks
from engine.types.request import Grammar


@dataclass(frozen=True, slots=True, eq=False)
class Allowed:
    """These tokens may follow: a `mask` `[words]`."""

    mask: Masks


@dataclass(frozen=True, slots=True)
class Complete:
    """Nothing may follow."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The grammar cannot be followed any further: it is at fault. Why, for the client."""

    error: str


@dataclass(frozen=True, slots=True)
class Unanswerable:
    """What may follow cannot be computed, through no fault of the grammar. Why, for the client."""

    error: str


Answer: TypeAlias = Allowed | Complete | Refused | Unanswerable


@dataclass(eq=False, slots=True)
class Matcher:
    """The tokens that one grammar has accepted, and the answer on what may follow them.

    `param` is the request's field that asks for the grammar. `seconds` of the processor have been
    spent on it so far, and `trial_seconds` on trying the grammar. With a `refusal` it is followed
    no further than the answer that it has. Engine thread only.
    """

    grammar: Grammar
    param: str
    trial_seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)
    answer: Answer | None = None
    seconds: float = 0.0
    refusal: Refused | None = None

    def accept(self, token_id: int) -> None:
        """Append a token. What may follow it is to be asked for."""
        self.tokens.append(token_id)
        self.answer = None
