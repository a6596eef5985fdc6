"""Grammars from text to matchers, off the engine thread, within bounds."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

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
from engine.constraints.json_schema import faithful
from engine.types import Alternative, Constraint, Grammar, GrammarKind, Request, ThinkingBlock

MAX_GRAMMAR_CHARACTERS = {
    GrammarKind.JSON_SCHEMA: 256 * 1024,
    GrammarKind.REGEX: 32 * 1024,  # the slowest take time by the square of it: 2 s here
    GrammarKind.LARK: 32 * 1024,
}
PROBED_STEPS = 3
MAX_MESSAGE_CHARACTERS = 400
CACHED_GRAMMARS = 128
CACHED_CHARACTERS = 4 * 1024**2

WHITESPACE = r"( |\n[ \t]{0,24})?"
"""Between JSON's tokens: a space, or a new line and its indentation. Bounded, or a model that likes
spaces never comes to an end."""

JSON_ESCAPES = 'nrbtf\\"'
"""Of those in strings all but \\u: with it a name has other spellings, which schemas do not see."""

LIMITS = LLParserLimits(
    max_items_in_row=20_000,
    initial_lexer_fuel=1_000_000,  # about 20 ms
    step_lexer_fuel=200_000,  # about 14 ms
    step_max_items=50_000,
    max_lexer_states=50_000,  # 2 kB each
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Work is bounded by fuel and not by a clock, so that what compiles here compiles everywhere."""


class GrammarCompiler:
    """Compiles a request's constraint, and keeps what was compiled last. Safe from any thread.

    `new_tokenizer` is called at the first grammar: who never asks for one pays nothing. With
    `end_tokens` the model ends its answers: none comes before a grammar that is to be fulfilled.
    """

    def __init__(
        self, new_tokenizer: Callable[[], LLTokenizer], end_tokens: frozenset[int]
    ) -> None:
        self._new_tokenizer = new_tokenizer
        self._end_tokens = end_tokens
        self._tokenizer: LLTokenizer | None = None
        self._matchers: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def guides(self, request: Request) -> GuideFactory:
        """What makes the guides of the request's sequences.

        Raises InvalidRequest for a grammar that is wrong, not supported, or too costly.
        """
        constrained = self._constrained(request.constraint)
        budget = request.thinking_budget
        if budget is None:
            return constrained
        return lambda: BothGuides(
            BudgetGuide(budget.tokens, budget.start, budget.end), constrained()
        )

    def _constrained(self, constraint: Constraint | None) -> GuideFactory:
        if constraint is None:
            return FreeGuide
        matcher = self._matcher(constraint.grammar, constraint.param)

        def grammar() -> Guide:
            return GrammarGuide(matcher.deep_copy())

        either = self._either(constraint.instead, grammar)
        return lambda: self._placed(constraint, either)

    def _either(self, instead: Alternative | None, grammar: GuideFactory) -> GuideFactory:
        """The grammar's guide, or the alternative's where its token comes first."""
        if instead is None:
            return grammar
        other, begin = self._constrained(instead.constraint), instead.begin
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

    def _matcher(self, grammar: Grammar, param: str) -> LLMatcher:
        """A matcher at its beginning: to be copied, never to be moved on."""
        with self._lock:
            if grammar in self._matchers:
                self._matchers.move_to_end(grammar)
                return self._matchers[grammar]
            tokenizer = self._tokenizer = self._tokenizer or self._new_tokenizer()
        matcher = _compile(tokenizer, grammar, param)
        with self._lock:
            self._matchers[grammar] = matcher
            while self._is_full():
                self._matchers.popitem(last=False)
        return matcher

    def _is_full(self) -> bool:
        characters = sum(len(grammar.text) for grammar in self._matchers)
        return len(self._matchers) > CACHED_GRAMMARS or characters > CACHED_CHARACTERS


def _compile(tokenizer: LLTokenizer, grammar: Grammar, param: str) -> LLMatcher:
    most = MAX_GRAMMAR_CHARACTERS[grammar.kind]
    if len(grammar.text) > most:
        raise InvalidRequest(
            f"{param}: the grammar has {len(grammar.text)} characters; {most} are the most",
            param,
        )
    matcher = LLMatcher(tokenizer, _source(grammar, param), limits=LIMITS)
    if error := _error_of_first_steps(matcher):
        raise InvalidRequest(f"{param}: {_first_line(error)}", param)
    return matcher


def _error_of_first_steps(matcher: LLMatcher) -> str:
    """What goes wrong in the first masks, which are the dearest; empty where nothing does."""
    steps = [matcher]
    for _ in range(PROBED_STEPS):
        mask = int.from_bytes(steps[-1].compute_bitmask(), "little")
        if steps[-1].is_error():
            return steps[-1].get_error()
        if steps[-1].is_stopped() or not mask:
            break
        steps.append(steps[-1].deep_copy())
        steps[-1].consume_token(mask.bit_length() - 1)  # the last is seldom the end
    return ""


def _source(grammar: Grammar, param: str) -> str:
    """The grammar as llguidance takes it."""
    match grammar.kind:
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)
        case GrammarKind.JSON_SCHEMA:
            try:
                schema = json.dumps(faithful(grammar.text))
                return LLMatcher.grammar_from_json_schema(
                    schema,
                    overrides={
                        "whitespace_pattern": WHITESPACE,
                        "json_allowed_escapes": JSON_ESCAPES,
                        "lenient": False,
                    },
                )
            except ValueError as error:
                raise InvalidRequest(f"{param}: {_first_line(str(error))}", param) from error


def _first_line(message: str) -> str:
    lines = message.strip().splitlines() or ["it cannot be compiled"]
    return lines[0][:MAX_MESSAGE_CHARACTERS]
