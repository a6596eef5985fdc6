"""Makes the guides of a request's sequences from its constraints."""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import dropwhile

from engine.api import InvalidRequest
from engine.grammar.answers import Verdict
from engine.grammar.guide import (
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
    UntilItFails,
)
from engine.grammar.matcher import Matcher
from engine.values.request import (
    Alternative,
    Constraint,
    Grammar,
    Request,
    ThinkingBlock,
    ThinkingBudget,
)

Verdicts = Mapping[Grammar, Verdict]


def untried(request: Request, verdicts: Verdicts) -> list[Grammar]:
    """The grammars to try next before the request is served: of each constraint the first, or the
    first behind those that have been refused. None where it is known which of them hold.
    """
    firsts = [_standing(constraint, verdicts)[:1] for constraint in _constraints(request)]
    grammars = (grammar for first in firsts for grammar in first)
    return [grammar for grammar in grammars if grammar is not None and grammar not in verdicts]


def check_verdicts(request: Request, verdicts: Verdicts) -> None:
    """Raises InvalidRequest where all grammars of a constraint are refused: they are wrong, not
    supported, or too costly.
    """
    for constraint in _constraints(request):
        if not _standing(constraint, verdicts):
            error = verdicts[constraint.grammar].error
            raise InvalidRequest(f"{constraint.param}: {error}", constraint.param)


def is_dispensable(request: Request) -> bool:
    """Whether the request may be served without its grammars."""
    return all(None in constraint.weaker for constraint in _constraints(request))


def all_refused(request: Request, why: str) -> Verdicts:
    """Verdicts by which none of the request's grammars holds."""
    grammars = [g for one in _constraints(request) for g in (one.grammar, *one.weaker)]
    return {grammar: Verdict(why, 0.0) for grammar in grammars if grammar is not None}


def _standing(constraint: Constraint, verdicts: Verdicts) -> list[Grammar | None]:
    """The constraint's grammars from the first on that has not been refused."""
    refused = {grammar for grammar, verdict in verdicts.items() if verdict.error is not None}
    return list(dropwhile(refused.__contains__, (constraint.grammar, *constraint.weaker)))


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

    def guides(self, request: Request, verdicts: Verdicts) -> GuideFactory | None:
        """A factory of the guides of the request's sequences; None where they have no constraint.
        The request's grammars have been tried.
        """
        budget, constraint = request.thinking_budget, request.constraint
        if constraint is None:
            return None if budget is None else partial(_budget_guide, budget)
        constrained = self._constrained(constraint, verdicts)
        if budget is None:
            return constrained
        return lambda: BothGuides(_budget_guide(budget), constrained())

    def _constrained(self, constraint: Constraint | None, verdicts: Verdicts) -> GuideFactory:
        if constraint is None:
            return FreeGuide
        held = _standing(constraint, verdicts)[0]
        grammar = self._grammar(constraint, held, verdicts) if held else FreeGuide
        either = self._either(constraint.instead, grammar, verdicts)
        return lambda: self._placed(constraint, either)

    def _grammar(self, constraint: Constraint, held: Grammar, verdicts: Verdicts) -> GuideFactory:
        seconds = verdicts[held].seconds

        def grammar() -> Guide:
            return GrammarGuide(Matcher(held, constraint.param, seconds))

        return grammar if None not in constraint.weaker else lambda: UntilItFails(grammar())

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
        if not marker:
            return grammar() if thinking is None else self._behind_thinking(thinking, grammar())

        def call() -> Guide:
            return BehindMarker(marker, grammar())

        guide = RepeatingGuide(call) if constraint.repeats else call()
        return guide if thinking is None else _unwatched_thinking(thinking, guide)

    def _behind_thinking(self, thinking: ThinkingBlock, guide: Guide) -> Guide:
        """The grammar's guide from the first token on or behind a block, which is free but may not
        end the answer: that would be one without what the grammar asks for."""
        thoughts = AllBut(tuple(self._end_tokens.difference(thinking.end)))
        behind = BehindMarker(thinking.end, PerhapsSpaced(thinking.space, guide), thoughts)
        return Unless(thinking.begin[0], behind, guide) if thinking.begin else behind


def _budget_guide(budget: ThinkingBudget) -> BudgetGuide:
    return BudgetGuide(budget.tokens, budget.start, budget.end)


def _unwatched_thinking(thinking: ThinkingBlock, guide: Guide) -> Guide:
    """A guide that is not told of the block that may come first: a marker there begins nothing."""
    behind = BehindMarker(thinking.end, guide)
    return Unless(thinking.begin[0], behind, guide) if thinking.begin else behind
