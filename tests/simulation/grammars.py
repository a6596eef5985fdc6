"""Grammars made of hashes, and those who answer them late."""

from collections.abc import Callable
from random import Random

import numpy as np

from engine.core.step import SequenceId
from engine.grammar.answers import Verdict
from engine.grammar.factory import GuideMaker, untried
from engine.grammar.guide import GuideFactory
from engine.grammar.masks import mask_words
from engine.grammar.matcher import Allowed, Answer, Complete, LookAhead, Matcher, Refused
from engine.values.request import Request
from tests.looking_ahead import told_ahead
from tests.simulation.census import Census, Happening
from tests.simulation.model import ROOT, chain

EOS = 0
MAKER = GuideMaker(frozenset({EOS}))


def guides(request: Request) -> GuideFactory | None:
    return MAKER.guides(request, {grammar: Verdict(None, 0.0) for grammar in untried(request, {})})


def answer(matcher: Matcher, vocab_size: int) -> Allowed | Complete:
    """What may follow depends on the grammar and on all tokens that it has been told."""
    state = chain(ROOT, int(matcher.grammar.text))
    for token_id in matcher.tokens:
        state = chain(state, token_id)
    if matcher.tokens and state % 11 == 0:
        return Complete()
    bits = np.zeros(32 * mask_words(vocab_size), dtype=np.uint8)
    allowed = [t for t in range(vocab_size) if chain(state, t) % 3]
    bits[allowed or [state % vocab_size]] = 1
    return Allowed(np.packbits(bits, bitorder="little").view(np.int32))


def follow(request: Request, generated: list[int], vocab_size: int) -> Answer | None:
    """What the request's grammar says behind these tokens; None where it says nothing.

    Told once more what guides do, in the plainest way. A marker has one token.
    """
    constraint = request.constraint
    if constraint is None:
        return None
    told: list[int] | None = None if constraint.behind else []
    for token_id in generated:
        if told is None:
            told = [] if token_id == constraint.behind[0] else None
        else:
            told.append(token_id)
            said = answer(Matcher(constraint.grammar, "", tokens=told), vocab_size)
            told = None if isinstance(said, Complete) and constraint.repeats else told
    return (
        None if told is None else answer(Matcher(constraint.grammar, "", tokens=told), vocab_size)
    )


def ruled_out(said: Answer | None, banned: frozenset[int], vocab_size: int) -> frozenset[int]:
    """What is banned is, unless the grammar leaves nothing else."""
    if not isinstance(said, Allowed):
        return banned
    bits = np.unpackbits(said.mask.view(np.uint8), bitorder="little")[:vocab_size]
    allowed = frozenset(np.flatnonzero(bits).tolist())
    return frozenset(range(vocab_size)) - (allowed - banned or allowed)


class LateAnswers:
    """Answers come at any time, and seldom an error in their place."""

    def __init__(
        self,
        random: Random,
        vocab_size: int,
        fails: Callable[[], bool],
        census: Census,
    ) -> None:
        self.n_words = mask_words(vocab_size)
        self._random = random
        self._promptness = random.choice([1.0, 0.9, 0.3])
        self._vocab_size = vocab_size
        self._fails = fails
        self._census = census
        self._asked: dict[SequenceId, Matcher] = {}
        self._drafted: dict[SequenceId, LookAhead] = {}

    def ask(self, sequence: SequenceId, client: str, matcher: Matcher) -> None:
        """Once in a while it is known at once, as when no process can be started."""
        if self._random.random() < 0.02:
            self._answer(matcher)
        else:
            self._asked[sequence] = matcher

    def look_ahead(self, sequence: SequenceId, client: str, question: LookAhead) -> None:
        if question.matcher.answer is None:
            self.ask(sequence, client, question.matcher)
        self._drafted[sequence] = question

    def retain(self, is_live: Callable[[SequenceId], bool]) -> None:
        self._asked = {one: matcher for one, matcher in self._asked.items() if is_live(one)}
        self._drafted = {one: asked for one, asked in self._drafted.items() if is_live(one)}

    def wait(self, is_enough: Callable[[], bool], seconds: float) -> None:
        for sequence, matcher in tuple(self._asked.items()):
            if self._random.random() < self._promptness:
                del self._asked[sequence]
                self._answer(matcher)
            else:
                self._census[Happening.ANSWER_LATE] += 1
        for sequence in tuple(self._drafted):
            if self._random.random() < self._promptness:
                self._answer_ahead(self._drafted.pop(sequence))

    def close(self) -> None:
        self._asked.clear()
        self._drafted.clear()

    def _answer_ahead(self, question: LookAhead) -> None:
        """Often less than all of it."""
        told = told_ahead(question, lambda matcher: answer(matcher, self._vocab_size))
        n_told = self._random.choice([len(told), self._random.randint(0, len(told))])
        question.answers = told[:n_told]

    def _answer(self, matcher: Matcher) -> None:
        if self._fails():
            self._census[Happening.ANSWER_FAILED] += 1
            matcher.answer = Refused("injected")
        else:
            matcher.answer = answer(matcher, self._vocab_size)
