"""Grammars within the test's own process: what grammar processes would say, at once."""

from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engine.api import InvalidRequest
from engine.core.step import SequenceId
from engine.grammar.answers import MatcherAnswers, Verdict, too_long
from engine.grammar.phases import check_verdicts, grammar_plan, untried
from engine.grammar.stage import mask_words
from engine.grammar.state import (
    Allowed,
    Answer,
    Complete,
    GrammarPlan,
    GrammarState,
    LookAhead,
    Matcher,
    Refused,
)
from engine.grammar.worker import GrammarError, compile_grammar, probe
from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT
from engine.values.request import Grammar, Request

DEMO_VOCAB_SIZE = 1024


class NoAnswers(MatcherAnswers):
    """For engines that are asked for no grammar."""

    def __init__(self, vocab_size: int) -> None:
        self.n_words = mask_words(vocab_size)

    def ask(self, sequence: SequenceId, client: str, matcher: Matcher) -> None:
        raise AssertionError("a grammar that nobody has asked for")

    def look_ahead(self, sequence: SequenceId, client: str, question: LookAhead) -> None:
        raise AssertionError("a grammar that nobody has asked for")

    def wait(self, is_enough: Callable[[], bool], seconds: float) -> None: ...

    def close(self) -> None: ...


class AnsweredState(GrammarState):
    """A state whose matchers are answered at once."""

    def __init__(self, plan: GrammarPlan, answer: Callable[[Matcher], Answer]) -> None:
        super().__init__(plan)
        self._answer = answer
        self._settle()

    def accept(self, token_id: int) -> None:
        super().accept(token_id)
        self._settle()

    def _settle(self) -> None:
        if self.matcher is not None and self.matcher.answer is None:
            self.matcher.answer = self._answer(self.matcher)
        self.advance()


class LocalGrammars:
    """Tries grammars and makes the states of sequences as an engine does."""

    def __init__(self, tokenizer: LLTokenizer, end_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens

    def states(self, request: Request) -> Callable[[], GrammarState]:
        """Makes new states of the request's sequences. Raises InvalidRequest."""
        verdicts = dict[Grammar, Verdict]()
        while grammars := untried(request, verdicts):
            verdicts |= {grammar: self._verdict(grammar) for grammar in grammars}
        check_verdicts(request, verdicts)
        plan = grammar_plan(request, verdicts, self._end_tokens)
        assert plan is not None, "the request has no constraint"
        return lambda: AnsweredState(plan, self.answer)

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """llguidance's own, of a grammar that passes its trial. Raises InvalidRequest."""
        if (error := self._verdict(grammar).error) is not None:
            raise InvalidRequest(error, "grammar")
        return self._compiled(grammar)

    def answer(self, matcher: Matcher) -> Answer:
        """What a grammar process would say."""
        told = self._compiled(matcher.grammar)
        told.consume_tokens(matcher.tokens)
        if told.is_stopped() and not told.is_error():
            return Complete()
        bits = told.compute_bitmask()[: 4 * mask_words(self._tokenizer.vocab_size)]
        if told.is_error():
            return Refused(told.get_error())
        return Allowed(np.frombuffer(bits, dtype=np.int32))

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        return compile_grammar(self._tokenizer, grammar.kind, grammar.text)

    def _verdict(self, grammar: Grammar) -> Verdict:
        if (refused := too_long(grammar)) is not None:
            return refused
        try:
            probe(self._compiled(grammar))
        except GrammarError as error:
            return Verdict(str(error), 0.0)
        return Verdict(None, 0.0)


def demo_tokenizer(eos_token_id: int) -> LLTokenizer:
    """The demonstration model's tokens."""
    text = (DEFAULT_CHECKPOINT / "tokenizer.json").read_text("utf-8")
    return LLTokenizer(text, n_vocab=DEMO_VOCAB_SIZE, eos_token=[eos_token_id])
