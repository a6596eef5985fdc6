"""Turns a request's constraint into the phases of its output, with the first grammars that pass
their trial.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import dropwhile

from engine.api import InvalidRequest
from engine.grammar.answers import Verdict
from engine.grammar.state import AllBut, GrammarPlan, Phase, TriedGrammar
from engine.values.request import Constraint, Grammar, Request, ThinkingBudget

Verdicts = Mapping[Grammar, Verdict]


def untried(request: Request, verdicts: Verdicts) -> list[Grammar]:
    """The grammars to try next before the request is served: of each constraint the first one that
    has not been refused. Empty if it is known which of them hold.
    """
    firsts = [_standing(constraint, verdicts)[:1] for constraint in _constraints(request)]
    grammars = (grammar for first in firsts for grammar in first)
    return [grammar for grammar in grammars if grammar is not None and grammar not in verdicts]


def check_verdicts(request: Request, verdicts: Verdicts) -> None:
    """Raises InvalidRequest if all grammars of a constraint are refused: they are wrong, not
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


def grammar_plan(
    request: Request, verdicts: Verdicts, end_tokens: Collection[int]
) -> GrammarPlan | None:
    """The phases of the request's output; None if nothing constrains it. Its grammars have been
    tried. The model ends its answers with `end_tokens`.
    """
    budget, constraint = request.thinking_budget, request.constraint
    firsts, builder = list[Phase](), _Builder(verdicts, frozenset(end_tokens))
    if budget is not None:
        firsts.append(_budget_phase(budget))
    if constraint is not None:
        firsts.append(builder.first_phase(constraint, after=None))
    return GrammarPlan(tuple(firsts), tuple(builder.grammars)) if firsts else None


class _Builder:
    """Builds the phases of constraints, and collects their `grammars`."""

    def __init__(self, verdicts: Verdicts, end_tokens: frozenset[int]) -> None:
        self.grammars: list[TriedGrammar] = []
        self._verdicts = verdicts
        self._end_tokens = end_tokens

    def first_phase(self, constraint: Constraint | None, after: Phase | None) -> Phase:
        """The phase that a constraint's output begins with. `after` comes when its grammar is
        complete; None: the sequence ends then.
        """
        if constraint is None:
            return Phase()
        thinking, marker = constraint.thinking, constraint.behind
        if marker:
            begin = Phase(until=marker, spellings=constraint.spellings)
            begin.next = self._grammar_phase(constraint, begin if constraint.repeats else after)
        else:
            begin = self._grammar_phase(constraint, after)
        if thinking is None:
            return begin
        if marker:
            block = Phase(until=thinking.end, next=begin)
        else:
            # An answer that ended within the block would lack what the grammar asks for.
            banned = tuple(self._end_tokens.difference(thinking.end))
            spaced = replace(begin, skips=dict.fromkeys(thinking.space, begin))
            block = Phase(choice=AllBut(banned), until=thinking.end, next=spaced)
        if not thinking.begin:
            return block
        return replace(begin, jumps={**begin.jumps, thinking.begin[0]: block})

    def _grammar_phase(self, constraint: Constraint, after: Phase | None) -> Phase:
        """The phase of the constraint's grammar, or of no grammar if all of them are refused."""
        jumps = dict[int, Phase]()
        if (instead := constraint.instead) is not None:
            jumps[instead.begin] = self.first_phase(instead.constraint, after)
        standing = _standing(constraint, self._verdicts)[0]
        if standing is None:
            return Phase(jumps=jumps)
        seconds = self._verdicts[standing].seconds
        tried = TriedGrammar(standing, constraint.param, seconds)
        self.grammars.append(tried)
        is_dispensable = None in constraint.weaker
        return Phase(tried, next=after, is_dispensable=is_dispensable, jumps=jumps)


def _budget_phase(budget: ThinkingBudget) -> Phase:
    """The first phase of a sequence whose thinking blocks are limited: the rest of the end marker
    is forced.
    """
    outside = Phase(until=budget.start)
    forced = [outside]
    for token_id in reversed(budget.end):
        forced.insert(0, Phase(choice=token_id, limit=1, at_limit=(forced[0],)))
    block = Phase(until=budget.end, next=outside, limit=budget.tokens, at_limit=tuple(forced))
    outside.next = block if budget.tokens else forced[0]
    return outside.next if budget.is_open or not budget.start else outside


def _standing(constraint: Constraint, verdicts: Verdicts) -> list[Grammar | None]:
    """The constraint's grammars from the first on that has not been refused."""
    refused = {grammar for grammar, verdict in verdicts.items() if verdict.error is not None}
    return list(dropwhile(refused.__contains__, (constraint.grammar, *constraint.weaker)))


def _constraints(request: Request) -> Iterator[Constraint]:
    constraint = request.constraint
    while constraint is not None:
        yield constraint
        constraint = constraint.instead.constraint if constraint.instead else None
