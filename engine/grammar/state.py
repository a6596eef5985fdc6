"""A sequence's constraint as a state machine: phases, and a state that goes through them. A phase
with a grammar has a matcher: worker processes compute which tokens it allows.

A request's constraint and thinking budget become a `GrammarPlan`, which its sequences share. Each
sequence has a `GrammarState`, which accepts its tokens and says what may come next.
"""

from collections.abc import Callable, Mapping, Set
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from engine.core.step import Masks
from engine.values.request import Grammar

TokenIds: TypeAlias = tuple[int, ...]


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


@dataclass(frozen=True, slots=True)
class GrammarChoice:
    """The tokens that a matcher's `answer` allows, and some others. None: it is not known yet."""

    answer: Answer | None
    others: TokenIds = ()


@dataclass(frozen=True, slots=True)
class AllBut:
    """Any token that is none of these."""

    token_ids: TokenIds


Choice: TypeAlias = GrammarChoice | AllBut | int | None
"""Which tokens may come next. An int is the one token that must come; None allows any token."""


@dataclass(frozen=True, slots=True, eq=False)
class TriedGrammar:
    """A grammar that has passed its trial, which took `trial_seconds` of the processor. `param` is
    the request's field with the grammar.
    """

    grammar: Grammar
    param: str
    trial_seconds: float

    def matcher(self) -> Matcher:
        """A new matcher, which has accepted no tokens."""
        return Matcher(self.grammar, self.param, self.trial_seconds)


@dataclass(slots=True, eq=False)
class Phase:
    """A part of a sequence's output. Phases refer to each other, and do not change once built.

    A phase with a grammar lasts until that is complete, or cannot be followed any further. Any
    other phase allows what `choice` says until the marker `until` has come, or `limit` tokens have:
    without both it lasts forever. After `limit` tokens, of which the last k began the marker, the
    k-th phase of `at_limit` comes.
    """

    grammar: TriedGrammar | None = None
    choice: AllBut | int | None = None
    until: TokenIds = ()
    spellings: Set[TokenIds] = frozenset()  # other tokens that count as the marker
    next: "Phase | None" = None  # after the grammar or the marker; None: the sequence ends
    is_dispensable: bool = False  # if the grammar fails, anything may follow; else an error
    limit: int | None = None
    at_limit: "tuple[Phase, ...]" = ()
    jumps: Mapping[int, "Phase"] = field(default_factory=dict)
    """Phases that may begin in place of this one, by their first tokens."""
    skips: Mapping[int, "Phase"] = field(default_factory=dict)
    """Tokens of which one may come before this phase, and the phase that begins after it."""
    marker_lengths: tuple[int, ...] = field(init=False)
    """The numbers of tokens that a marker may have, the largest first."""

    def __post_init__(self) -> None:
        lengths = {len(marker) for marker in (self.until, *self.spellings)}
        self.marker_lengths = tuple(sorted(lengths, reverse=True))

    def ends_with_marker(self, tokens: TokenIds) -> bool:
        """Whether the last tokens are the marker."""
        endings = (tokens[-length:] for length in self.marker_lengths)
        return any(ending == self.until or ending in self.spellings for ending in endings)


@dataclass(frozen=True, slots=True)
class GrammarPlan:
    """The phases of a request's output. If several phases run in parallel, the first one with a
    choice decides. `grammars` are the grammars of all phases.
    """

    firsts: tuple[Phase, ...]
    grammars: tuple[TriedGrammar, ...] = ()


class _Position:
    """A place in a phase: after `n_tokens` of its tokens, the last of which are the `tail`."""

    def __init__(self, phase: Phase) -> None:
        self.enter(phase)

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self.n_tokens = 0
        self.tail: TokenIds = ()

    def accept(self, token_id: int) -> Phase | None:
        """Move on by a token. Returns the phase that the token belongs to, if there is one."""
        phase = self.phase
        if self.n_tokens == 0:
            if token_id in phase.skips:
                self.enter(phase.skips[token_id])
                return None
            if token_id in phase.jumps:
                self.enter(phase.jumps[token_id])
                return self.accept(token_id)
        self.n_tokens += 1
        if phase.until:
            self.tail = (*self.tail, token_id)[-phase.marker_lengths[0] :]
            if phase.ends_with_marker(self.tail):
                assert phase.next is not None, "a marker leads to another phase"
                self.enter(phase.next)
                return phase
        if self.n_tokens == phase.limit:
            self.enter(phase.at_limit[_n_begun(phase.until, self.tail)])
        return phase


def _n_begun(marker: TokenIds, tokens: TokenIds) -> int:
    """How many of the last tokens are the marker's first. The marker is not complete."""
    longest = max(len(marker) - 1, 0)
    return next(n for n in range(longest, -1, -1) if tokens[len(tokens) - n :] == marker[:n])


class GrammarState:
    """The allowed next tokens of a sequence. The sequence ends once it `is_complete`.

        state.accept(token_id)    a token was sampled
        state.matcher             has to be answered now, if there is one
        state.advance()           `choice` and `is_complete` are valid again

    Engine thread only.
    """

    def __init__(self, plan: GrammarPlan) -> None:
        self.is_complete = False
        self._positions = [_Position(phase) for phase in plan.firsts]
        self._matchers = {grammar: grammar.matcher() for grammar in plan.grammars}

    @property
    def choice(self) -> Choice:
        """The allowed next tokens."""
        if (position := self._deciding()) is None:
            return None
        phase = position.phase
        if phase.grammar is None:
            return phase.choice
        others = () if position.n_tokens else (*phase.jumps, *phase.skips)
        return GrammarChoice(self._matchers[phase.grammar].answer, others)

    @property
    def matcher(self) -> Matcher | None:
        """The matcher that has to be answered before `choice` is known."""
        position = self._deciding()
        grammar = None if position is None else position.phase.grammar
        return None if grammar is None else self._matchers[grammar]

    def accept(self, token_id: int) -> None:
        """Take a token that was sampled."""
        for position in self._positions:
            phase = position.accept(token_id)
            if phase is not None and phase.grammar is not None:
                self._matchers[phase.grammar].accept(token_id)

    def advance(self) -> None:
        """Enter another phase if the answer for `matcher` shows that its grammar is complete or has
        failed.

        While another phase decides, an answer for a look-ahead changes nothing.
        """
        position = self._deciding()
        if position is None or (phase := position.phase).grammar is None:
            return
        match self._matchers[phase.grammar].answer:
            case Complete():
                if phase.next is None:
                    self.is_complete = True
                else:
                    position.enter(phase.next)
                    self.end()
                    self._matchers = {grammar: grammar.matcher() for grammar in self._matchers}
            case Refused() | Unanswerable() if phase.is_dispensable:
                position.phase = replace(phase, grammar=None)  # which may still be jumped from
                self._matchers[phase.grammar].end()

    def end(self) -> None:
        """No answer of its matchers is needed any more."""
        for matcher in self._matchers.values():
            matcher.end()

    def copy(self) -> "GrammarState":
        """A state at the same place, to follow a draft. Its matchers are forks."""
        copied = copy(self)
        copied._positions = [copy(position) for position in self._positions]
        copied._matchers = {grammar: one.fork() for grammar, one in self._matchers.items()}
        return copied

    def _deciding(self) -> _Position | None:
        """The position whose phase decides on the next token."""
        for position in self._positions:
            if position.phase.grammar is not None or position.phase.choice is not None:
                return position
        return None


def forced_tokens(state: GrammarState) -> TokenIds:
    """The tokens that must follow, as far as that is known: a draft. The state's matcher has been
    answered.

    After the first, others may turn out to be allowed as well, so masks decide there, too.
    """
    forced, ahead = list[int](), state.copy()
    while isinstance(choice := ahead.choice, int):
        forced.append(choice)
        ahead.accept(choice)
    match choice:
        case GrammarChoice(Allowed(forced=more), others=()):
            forced += more
    return tuple(forced)
