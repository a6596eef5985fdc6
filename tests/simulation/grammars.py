"""Grammars made of hashes, and those who answer them late."""

from collections.abc import Callable
from random import Random

import numpy as np

from engine.core.step import SequenceId
from engine.grammar.answers import Verdict
from engine.grammar.phases import grammar_plan, untried
from engine.grammar.stage import mask_words
from engine.grammar.state import Allowed, Answer, Complete, GrammarPlan, LookAhead, Matcher, Refused
from engine.values.request import Grammar, Request
from tests.looking_ahead import PendingQuestions, told_ahead
from tests.simulation.census import Census, Happening
from tests.simulation.model import ROOT, chain

EOS = 0


def plan_of(request: Request) -> GrammarPlan | None:
    """The request's grammar plan. Every grammar passes its trial."""
    verdicts = {grammar: Verdict(None, 0.0) for grammar in untried(request, {})}
    return grammar_plan(request, verdicts, {EOS})


def is_dispensable(grammar: Grammar) -> bool:
    """Whether the requests with this grammar may go on without it."""
    return int(grammar.text) >= 3


def answer(matcher: Matcher, vocab_size: int) -> Allowed | Complete | Refused:
    """What may follow, which depends on the grammar and on all tokens that it has accepted.

    Dispensable grammars fail after some tokens, always after the same ones.
    """
    state = chain(ROOT, int(matcher.grammar.text))
    for token_id in matcher.tokens:
        state = chain(state, token_id)
    if is_dispensable(matcher.grammar) and state % 7 == 1:
        return Refused("reported to nobody")
    if matcher.tokens and state % 11 == 0:
        return Complete()
    bits = np.zeros(32 * mask_words(vocab_size), dtype=np.uint8)
    allowed = [t for t in range(vocab_size) if chain(state, t) % 3]
    bits[allowed or [state % vocab_size]] = 1
    return Allowed(np.packbits(bits, bitorder="little").view(np.int32))


def follow(request: Request, generated: list[int], vocab_size: int) -> Answer | None:
    """The answer of the request's grammar after these tokens; None where any token may follow.

    This is the state machine of `GrammarState`, written down in the plainest way. A marker has one
    token.
    """
    constraint = request.constraint
    if constraint is None:
        return None
    accepted: list[int] | None = None if constraint.behind else []
    said = answer_after(constraint.grammar, accepted, vocab_size)
    for token_id in generated:
        if isinstance(said, Refused):
            return None  # free from there on
        if accepted is not None:
            accepted = [*accepted, token_id]
        elif token_id == constraint.behind[0]:
            accepted = []
        said = answer_after(constraint.grammar, accepted, vocab_size)
        if isinstance(said, Complete) and constraint.repeats:
            accepted = said = None
    return None if isinstance(said, Refused) else said


def answer_after(grammar: Grammar, accepted: list[int] | None, vocab_size: int) -> Answer | None:
    """The answer after these tokens of the grammar; None before its first."""
    return None if accepted is None else answer(Matcher(grammar, "", tokens=accepted), vocab_size)


def ruled_out(said: Answer | None, banned: frozenset[int], vocab_size: int) -> frozenset[int]:
    """What is banned is, unless the grammar leaves nothing else."""
    if not isinstance(said, Allowed):
        return banned
    bits = np.unpackbits(said.mask.view(np.uint8), bitorder="little")[:vocab_size]
    allowed = frozenset(np.flatnonzero(bits).tolist())
    return frozenset(range(vocab_size)) - (allowed - banned or allowed)


class LateAnswers(PendingQuestions):
    """Answers come at any time. Seldom there is an error in their place, but for a grammar that is
    dispensable: then nobody would know what its sequence generates.
    """

    def __init__(
        self,
        random: Random,
        vocab_size: int,
        fails: Callable[[], bool],
        census: Census,
    ) -> None:
        super().__init__(vocab_size)
        self._random = random
        self._promptness = random.choice([1.0, 0.9, 0.3])
        self._vocab_size = vocab_size
        self._fails = fails
        self._census = census

    def ask(self, sequence: SequenceId, client: str, matcher: Matcher) -> None:
        """Once in a while it is known at once, as when no process can be started."""
        if self._random.random() < 0.02:
            self._answer(matcher)
        else:
            super().ask(sequence, client, matcher)

    def wait(self, is_enough: Callable[[], bool], seconds: float) -> None:
        for sequence, matcher in tuple(self.asked.items()):
            if self._random.random() < self._promptness:
                del self.asked[sequence]
                self._answer(matcher)
            else:
                self._census[Happening.ANSWER_LATE] += 1
        for sequence in tuple(self.drafted):
            if self._random.random() < self._promptness:
                self._answer_ahead(self.drafted.pop(sequence))

    def _answer_ahead(self, question: LookAhead) -> None:
        """Often less than all of it."""
        told = told_ahead(question, lambda matcher: answer(matcher, self._vocab_size))
        n_told = self._random.choice([len(told), self._random.randint(0, len(told))])
        question.answers = told[:n_told]

    def _answer(self, matcher: Matcher) -> None:
        if not is_dispensable(matcher.grammar) and self._fails():
            self._census[Happening.ANSWER_FAILED] += 1
            matcher.answer = Refused("injected")
        else:
            matcher.answer = answer(matcher, self._vocab_size)
            self._census[Happening.GRAMMAR_DROPPED] += isinstance(matcher.answer, Refused)
