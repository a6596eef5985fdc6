"""Makes the guides of a request's sequences from its constraints."""

from collections.abc import Iterator, Mapping

from engine.api import InvalidRequest
from engine.constraints.guide import (
    AllBut,
    BehindMarker,
    BothGuides,
    BudgetGuide,
    FreeGuide,
    GrammarGuide,
    Guide,
    GuideFactory,
    PerhapsSpaced,
    RepeatingGuide,
    Unless,
)
from engine.constraints.matcher import Matcher
from engine.constraints.remote.trials import Verdict
from engine.types.request import (
    Alternative,
    Constraint,
    Grammar,
    GrammarKind,
    Request,
    ThinkingBlock,
)

MAX_GRAMMAR_CHARACTERS = {
    GrammarKind.JSON_SCHEMA: 256 * 1024,
    GrammarKind.REGEX: 32 * 1024,
    GrammarKind.LARK: 32 * 1024,
}

Verdicts = Mapping[Grammar, Verdict]


def grammars(request: Request) -> list[Grammar]:
    """The grammars to try before the request is served. Raises InvalidRequest where one is too
    long.
    """
    for constraint in _constraints(request):
        grammar, most = constraint.grammar, MAX_GRAMMAR_CHARACTERS[constraint.grammar.kind]
        if len(grammar.text) > most:
            raise InvalidRequest(
                f"{constraint.param}: the grammar has {len(grammar.text)} characters; {most} are "
                "the most",
                constraint.param,
            )
    return [constraint.grammar for constraint in _constraints(request)]


def check_verdicts(request: Request, verdicts: Verdicts) -> None:
    """Raises InvalidRequest for a grammar that is wrong, not supported, or too costly."""
    for constraint in _constraints(request):
        if (error := verdicts[constraint.grammar].error) is not None:
            raise InvalidRequest(f"{constraint.param}: {error}", constraint.param)


def _constraints(request: Request) -> Iterator[Constraint]:
    constraint = request.constraint
    while constraint is not None:
        yield constraint
        constraint = constraint.instead.constraint if constraint.instead else None


class GuideMaker:
    """With `end_tokens` the model ends its answers: none comes before a grammar that is to be
    fulfilled. Safe from any thread.
    """

    def __init__(self, end_tokens: frozenset[int]) -> None:
        self._end_tokens = end_tokens

    def guides(self, request: Request, verdicts: Verdicts) -> GuideFactory:
        """A factory of the guides of the request's sequences. Its grammars have been tried."""
        constrained = self._constrained(request.constraint, verdicts)
        budget = request.thinking_budget
        if budget is None:
            return constrained
        return lambda: BothGuides(
            BudgetGuide(budget.tokens, budget.start, budget.end), constrained()
        )

    def _constrained(self, constraint: Constraint | None, verdicts: Verdicts) -> GuideFactory:
        if constraint is None:
            return FreeGuide
        seconds = verdicts[constraint.grammar].seconds

        def grammar() -> Guide:
            return GrammarGuide(Matcher(constraint.grammar, constraint.param, seconds))

        either = self._either(constraint.instead, grammar, verdicts)
        return lambda: self._placed(constraint, either)

    def _either(
        self, instead: Alternative | None, grammar: GuideFactory, verdicts: Verdicts
    ) -> GuideFactory:
        """The grammar's guide, or the alternative's where its token comes first."""
        if instead is None:
            return grammar
        other, begin = self._constrained(instead.constraint, verdicts), instead.begin
        return lambda: Unless(begin, other(), grammar())

    def _placed(self, constraint: Constraint, grammar: GuideFactory) -> Guide:
        """The grammar's guide where it is to hold."""
        thinking, marker = constraint.thinking, constraint.behind
        if thinking is not None:
            return self._behind_thinking(thinking, grammar())
        if not marker:
            return grammar()
        if constraint.repeats:
            return RepeatingGuide(lambda: BehindMarker(marker, grammar()))
        return BehindMarker(marker, grammar())

    def _behind_thinking(self, thinking: ThinkingBlock, guide: Guide) -> Guide:
        """The grammar's guide from the first token on or behind a block, which is free but may not
        end the answer: that would be one without what the grammar asks for."""
        thoughts = AllBut(tuple(self._end_tokens.difference(thinking.end)))
        behind = BehindMarker(thinking.end, PerhapsSpaced(thinking.space, guide), thoughts)
        return Unless(thinking.begin[0], behind, guide) if thinking.begin else behind
