"""A grammar at one point of a sequence. What may follow there another process says."""

from dataclasses import dataclass, field

from engine.step import Masks
from engine.types import Grammar


@dataclass(frozen=True, slots=True)
class Answer:
    """What may follow: tokens by `mask`, `[words]`, nothing (`is_complete`), or it is not known for
    an `error`, in words for the client. `is_refusal`: the error is the grammar's fault."""

    mask: Masks | None = None
    is_complete: bool = False
    error: str | None = None
    is_refusal: bool = True


@dataclass(eq=False, slots=True)
class Matcher:
    """The tokens that one grammar has been told, and the answer on what may follow them.

    `param` is the request's field that asks for the grammar. `seconds` of the processor have been
    spent on it so far, and `trial_seconds` on trying the grammar. Engine thread only.
    """

    grammar: Grammar
    param: str
    trial_seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)
    answer: Answer | None = None
    seconds: float = 0.0

    def accept(self, token_id: int) -> None:
        """The token comes next. What may follow is to be asked for."""
        self.tokens.append(token_id)
        self.answer = None
