"""Grammars from text to matchers."""

import json

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.grammar.worker.json_schema import faithful

PROBED_STEPS = 24
MAX_MESSAGE_CHARACTERS = 400

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
"""What most grammars of too much work are refused by, with a reason. They do not bound all of it:
what they let through is bounded by the processor time of the process."""


class GrammarError(ValueError):
    """The grammar is wrong, not supported or too costly, in words for a client."""


def compile_grammar(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """A matcher at its beginning. `kind`: `json_schema`, `regex` or `lark`.

    Raises GrammarError.
    """
    try:
        source = _source(kind, text)
    except (ValueError, RecursionError) as error:  # half a character; nested too deeply
        raise GrammarError(first_line(str(error))) from error
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(first_line(matcher.get_error()))
    return matcher


def probe(matcher: LLMatcher) -> None:
    """Walk some steps of a copy: some grammars only turn out wrong or dear there.

    Raises GrammarError.
    """
    walker = matcher.deep_copy()
    for _ in range(PROBED_STEPS):
        mask = int.from_bytes(walker.compute_bitmask(), "little")
        if walker.is_error():
            raise GrammarError(first_line(walker.get_error()))
        if walker.is_stopped() or not mask:
            return
        walker.consume_token(mask.bit_length() - 1)  # the last is seldom the end


def _source(kind: str, text: str) -> str:
    """The grammar as llguidance takes it. Raises ValueError or RecursionError."""
    match kind:
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "lark":
            return LLMatcher.grammar_from_lark(text)
        case "json_schema":
            return _json_source(text)
    raise ValueError(f"no such kind of grammar: {kind}")


def _json_source(text: str) -> str:
    return LLMatcher.grammar_from_json_schema(
        json.dumps(faithful(text)),
        overrides={
            "whitespace_pattern": WHITESPACE,
            "json_allowed_escapes": JSON_ESCAPES,
            "lenient": False,
        },
    )


def first_line(message: str) -> str:
    """As much of an error as a client gets."""
    lines = message.strip().splitlines() or ["it cannot be compiled"]
    return lines[0][:MAX_MESSAGE_CHARACTERS]
