"""A grammar's matcher in one sequence. Worker processes compute which tokens may follow."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from engine.core.step import Masks
from engine.values.request import Grammar


@dataclass(frozen=True, slots=True, eq=False)
class Allowed:
    """The tokens of a `mask` `[words]` may follow. `forced` are the tokens that must follow, as far
    as there is no choice.
    """

    mask: Masks
    forced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Complete:
    """The grammar is complete: no token may follow."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The grammar cannot be followed any further, and is at fault. `error` is for the client."""

    error: str


@dataclass(frozen=True, slots=True)
class Unanswerable:
    """No process can compute what may follow; the grammar is not at fault. `error` is for the
    client.
    """

    error: str


Answer: TypeAlias = Allowed | Complete | Refused | Unanswerable


@dataclass(eq=False, slots=True)
class Matcher:
    """The tokens that a grammar has accepted, and the mask of the next one.

    `param` is the request's field with the grammar. The processor has spent `seconds` on its
    answers so far, `draft_seconds` on its look-aheads, and `trial_seconds` on the trial of the
    grammar. Once a `refusal` is set, it is the only answer.

    A fork of a `parent` has only the tokens that it has accepted since. The last look-ahead is kept
    in `ahead` while the tokens of its draft come true: its answers are the matcher's. `when_ended`
    is called once the matcher is not needed any more. Engine thread only.
    """

    grammar: Grammar
    param: str
    trial_seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)
    answer: Answer | None = None
    seconds: float = 0.0
    refusal: Refused | None = None
    draft_seconds: float = 0.0
    parent: "Matcher | None" = None
    ahead: "LookAhead | None" = None
    when_ended: Callable[[], None] | None = None

    def accept(self, token_id: int) -> None:
        """Append a token. The answer is None unless a look-ahead has found it already."""
        self.tokens.append(token_id)
        self.answer = None if self.ahead is None else self.ahead.answer
        if self.answer is None:
            self.ahead = None

    def end(self) -> None:
        """No answer is needed any more."""
        when_ended, self.when_ended = self.when_ended, None
        if when_ended is not None:
            when_ended()

    def fork(self) -> "Matcher":
        """A matcher at the same place, to follow a draft. `LookAhead` answers it."""
        tokens = [] if self.parent is None else [*self.tokens]
        origin = self.parent or self
        return Matcher(self.grammar, self.param, tokens=tokens, answer=self.answer, parent=origin)


@dataclass(eq=False, slots=True)
class LookAhead:
    """The masks after a matcher's tokens and the first token of a draft, the first two, and so on.

    The `answers` are masks, and perhaps at the end that the grammar is complete. There are fewer
    answers than tokens if the grammar refuses a token, or if to compute more would take too long.
    They are None until they arrive.
    """

    matcher: Matcher
    tokens: tuple[int, ...]
    answers: tuple[Allowed | Complete, ...] | None = None
    n_before: int = field(init=False)  # tokens of the matcher, when it was asked

    def __post_init__(self) -> None:
        self.n_before = len(self.matcher.tokens)

    @property
    def answer(self) -> Answer | None:
        """The mask after the matcher now, if it has accepted tokens of the draft since then."""
        n_tokens = len(self.matcher.tokens) - self.n_before
        accepted = tuple(self.matcher.tokens[self.n_before :])
        if not 0 < n_tokens <= len(self.answers or ()) or accepted != self.tokens[:n_tokens]:
            return None
        return self.answers[n_tokens - 1] if self.answers else None
