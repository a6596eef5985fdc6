"""A grammar's state in one sequence. Another process computes what may follow."""

from dataclasses import dataclass, field
from typing import TypeAlias

from engine.core.step import Masks
from engine.values.request import Grammar


@dataclass(frozen=True, slots=True, eq=False)
class Allowed:
    """These tokens may follow: a `mask` `[words]`. As far as there is no choice, `forced` is what
    must follow.
    """

    mask: Masks
    forced: tuple[int, ...] = ()


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
    spent on it so far, `draft_seconds` on looking ahead of it, and `trial_seconds` on trying the
    grammar. With a `refusal` it is followed no further than the answer that it has. One that was
    forked has only the tokens that it has accepted since: they are `behind` those of the other.
    While the tokens of a draft come true, what was found out `ahead` of them is the answer. Engine
    thread only.
    """

    grammar: Grammar
    param: str
    trial_seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)
    answer: Answer | None = None
    seconds: float = 0.0
    refusal: Refused | None = None
    draft_seconds: float = 0.0
    behind: "Matcher | None" = None
    ahead: "LookAhead | None" = None

    def accept(self, token_id: int) -> None:
        """Append a token. What may follow it is to be asked for, unless it is known."""
        self.tokens.append(token_id)
        self.answer = None if self.ahead is None else self.ahead.answer
        if self.answer is None:
            self.ahead = None

    def fork(self) -> "Matcher":
        """Another at the same place, to go on along a draft. It is asked for with `LookAhead`."""
        tokens = [] if self.behind is None else [*self.tokens]
        origin = self.behind or self
        return Matcher(self.grammar, self.param, tokens=tokens, answer=self.answer, behind=origin)


@dataclass(eq=False, slots=True)
class LookAhead:
    """What may follow a matcher's tokens and the first of a draft's, and the first two, and so on.

    The `answers` are masks, and at the end perhaps that the grammar is complete. They are fewer
    than the tokens where the grammar refuses one, or to look further would take too long; None
    before they have come.
    """

    matcher: Matcher
    tokens: tuple[int, ...]
    answers: tuple[Allowed | Complete, ...] | None = None
    n_before: int = field(init=False)  # tokens of the matcher, when it was asked

    def __post_init__(self) -> None:
        self.n_before = len(self.matcher.tokens)

    @property
    def answer(self) -> Answer | None:
        """What may follow the matcher now, if it has accepted tokens of the draft since then."""
        n_tokens = len(self.matcher.tokens) - self.n_before
        accepted = tuple(self.matcher.tokens[self.n_before :])
        if not 0 < n_tokens <= len(self.answers or ()) or accepted != self.tokens[:n_tokens]:
            return None
        return self.answers[n_tokens - 1] if self.answers else None
