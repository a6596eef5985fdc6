"""What one sequence may generate next, token by token. Engine thread only."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from engine.grammar.matcher import Complete, Matcher, Refused, Unanswerable


@dataclass(frozen=True, slots=True)
class AlsoAllowed:
    """What a matcher allows, and some tokens more."""

    matcher: Matcher
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllBut:
    """Any token that is none of these."""

    token_ids: tuple[int, ...]


Choice: TypeAlias = Matcher | AlsoAllowed | AllBut | int | None
"""What decides which tokens may come next: a matcher, perhaps with some more tokens; all tokens but
a few; one token that must come; None: nothing, any token may."""

TokenIds: TypeAlias = tuple[int, ...]


def matcher_of(choice: Choice) -> Matcher | None:
    """The matcher that has to be answered before the choice is known."""
    match choice:
        case Matcher():
            return choice
        case AlsoAllowed(matcher=matcher):
            return matcher
        case _:
            return None


class Guide(Protocol):
    """Constrains one sequence. It is given every token of it, in order."""

    @property
    def choice(self) -> Choice:
        """What decides on the next token."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow any more: the sequence ends here."""
        ...

    def accept(self, token_id: int) -> None:
        """The token has been sampled. `choice` and `is_complete` are valid again when the matcher,
        where there is one, has been answered.
        """
        ...

    def answered(self) -> None:
        """The matcher of `choice` has been answered. If complete, go on to what comes next."""
        ...

    def fork(self) -> "Guide":
        """Another at the same place, to go on along a draft while this one stays."""
        ...


GuideFactory: TypeAlias = Callable[[], Guide]
"""Makes the guide of each of a request's sequences."""


class FreeGuide:
    """Any token, at any time."""

    choice = None
    is_complete = False

    def accept(self, token_id: int) -> None:
        """It has no state."""

    def answered(self) -> None:
        """Nothing comes after it."""

    def fork(self) -> "FreeGuide":
        return self


class Watch:
    """Looks for a marker, a run of tokens, in what is generated."""

    def __init__(self, marker: TokenIds) -> None:
        self._marker = marker
        self._last: TokenIds = ()

    def sees(self, token_id: int) -> bool:
        """Whether this token completes the marker."""
        self._last = (*self._last, token_id)[-len(self._marker) :]
        return self._last == self._marker

    def fork(self) -> "Watch":
        return copy(self)


class GrammarGuide:
    """A grammar from the first token on, and the end of the sequence with it."""

    def __init__(self, matcher: Matcher) -> None:
        self.choice = matcher

    @property
    def is_complete(self) -> bool:
        return isinstance(self.choice.answer, Complete)

    def accept(self, token_id: int) -> None:
        self.choice.accept(token_id)

    def answered(self) -> None:
        """Nothing comes after it."""

    def fork(self) -> "GrammarGuide":
        return GrammarGuide(self.choice.fork())


class UntilItFails:
    """Follows a guide as long as its matcher can be answered; free from there on."""

    def __init__(self, guide: Guide) -> None:
        self._guide = guide

    @property
    def choice(self) -> Choice:
        return self._guide.choice

    @property
    def is_complete(self) -> bool:
        return self._guide.is_complete

    def accept(self, token_id: int) -> None:
        self._guide.accept(token_id)

    def answered(self) -> None:
        self._guide.answered()
        matcher = matcher_of(self._guide.choice)
        if matcher is not None and isinstance(matcher.answer, Refused | Unanswerable):
            self._guide = FreeGuide()

    def fork(self) -> "UntilItFails":
        return UntilItFails(self._guide.fork())


class BehindMarker:
    """Free until a marker has been generated, or limited as `before` says; then follows `then`."""

    def __init__(self, marker: TokenIds, then: Guide, before: AllBut | None = None) -> None:
        self._marker: Watch | None = Watch(marker)
        self._then = then
        self._before = before

    @property
    def choice(self) -> Choice:
        return self._then.choice if self._marker is None else self._before

    @property
    def is_complete(self) -> bool:
        return self._marker is None and self._then.is_complete

    def accept(self, token_id: int) -> None:
        if self._marker is None:
            self._then.accept(token_id)
        elif self._marker.sees(token_id):
            self._marker = None

    def answered(self) -> None:
        self._then.answered()

    def fork(self) -> "BehindMarker":
        fork = copy(self)
        fork._marker = self._marker and self._marker.fork()
        fork._then = self._then.fork()
        return fork


class Unless:
    """Follows `guide`, unless the first token is `begin`: then it follows `other`, from that token
    on.
    """

    def __init__(self, begin: int, other: Guide, guide: Guide) -> None:
        self._begin = begin
        self._other: Guide | None = other
        self._guide = guide

    @property
    def choice(self) -> Choice:
        choice = self._guide.choice
        return choice if self._other is None else _also(choice, self._begin)

    @property
    def is_complete(self) -> bool:
        return self._guide.is_complete

    def accept(self, token_id: int) -> None:
        if self._other is not None and token_id == self._begin:
            self._guide = self._other
        self._other = None
        self._guide.accept(token_id)

    def answered(self) -> None:
        self._guide.answered()

    def fork(self) -> "Unless":
        fork = copy(self)
        fork._other = self._other and self._other.fork()
        fork._guide = self._guide.fork()
        return fork


class PerhapsSpaced:
    """Follows another guide, which does not get the first token if that is white space."""

    def __init__(self, space: TokenIds, guide: Guide) -> None:
        self._space = space
        self._guide = guide

    @property
    def choice(self) -> Choice:
        return _also(self._guide.choice, *self._space)

    @property
    def is_complete(self) -> bool:
        return self._guide.is_complete

    def accept(self, token_id: int) -> None:
        if token_id not in self._space:
            self._guide.accept(token_id)
        self._space = ()

    def answered(self) -> None:
        self._guide.answered()

    def fork(self) -> "PerhapsSpaced":
        return PerhapsSpaced(self._space, self._guide.fork())


def _also(choice: Choice, *token_ids: int) -> Choice:
    match choice:
        case Matcher() if token_ids:
            return AlsoAllowed(choice, token_ids)
        case AlsoAllowed(matcher, others):
            return AlsoAllowed(matcher, (*others, *token_ids))
        case _:
            return choice


class RepeatingGuide:
    """Follows one guide after another, without end: a new one when the last is complete."""

    is_complete = False

    def __init__(self, new: GuideFactory) -> None:
        self._new = new
        self._guide = new()

    @property
    def choice(self) -> Choice:
        return self._guide.choice

    def accept(self, token_id: int) -> None:
        self._guide.accept(token_id)

    def answered(self) -> None:
        self._guide.answered()
        if self._guide.is_complete:
            self._guide = self._new()

    def fork(self) -> "RepeatingGuide":
        fork = copy(self)
        fork._guide = self._guide.fork()
        return fork


class ForcedTokens:
    """Some tokens, then any."""

    is_complete = False

    def __init__(self, tokens: TokenIds) -> None:
        self._tokens = list(tokens)

    @property
    def choice(self) -> Choice:
        return self._tokens[0] if self._tokens else None

    def accept(self, token_id: int) -> None:
        if self._tokens:
            del self._tokens[0]

    def answered(self) -> None:
        """Nothing comes after it."""

    def fork(self) -> "ForcedTokens":
        return ForcedTokens(tuple(self._tokens))


class BudgetGuide:
    """Lets a block that ends with a marker have so many tokens, then forces the marker.

    The block begins behind the `start` marker, or with the first token where that is empty.
    """

    is_complete = False

    def __init__(self, tokens: int, start: TokenIds, end: TokenIds) -> None:
        self._left = tokens
        self._start = Watch(start) if start else None
        self._end = end
        self._ended = Watch(end)
        self._forced: Guide = FreeGuide()
        self._enter()

    @property
    def choice(self) -> Choice:
        return self._forced.choice

    def accept(self, token_id: int) -> None:
        if self._start is not None:
            if self._start.sees(token_id):
                self._start = None
                self._enter()
            return
        if self._forced.choice is not None:
            self._forced.accept(token_id)
            return
        if self._left > 0 and not self._ended.sees(token_id):
            self._left -= 1
            self._enter()
        else:
            self._left = 0

    def answered(self) -> None:
        """It has no matcher."""

    def fork(self) -> "BudgetGuide":
        fork = copy(self)
        fork._start = self._start and self._start.fork()
        fork._ended = self._ended.fork()
        fork._forced = self._forced.fork()
        return fork

    def _enter(self) -> None:
        if self._start is None and self._left == 0:
            self._forced = ForcedTokens(self._end)


class BothGuides:
    """Two guides side by side; the first one's choice wins."""

    def __init__(self, first: Guide, second: Guide) -> None:
        self._guides = (first, second)

    @property
    def choice(self) -> Choice:
        first, second = self._guides
        return second.choice if first.choice is None else first.choice

    @property
    def is_complete(self) -> bool:
        return any(guide.is_complete for guide in self._guides)

    def accept(self, token_id: int) -> None:
        for guide in self._guides:
            guide.accept(token_id)

    def answered(self) -> None:
        for guide in self._guides:
            guide.answered()

    def fork(self) -> "BothGuides":
        first, second = self._guides
        return BothGuides(first.fork(), second.fork())
