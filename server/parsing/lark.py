"""Grammars of tool calls, in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

from engine.values.schemas import LeadsNowhere, ignore, plain, refuse
from server.parsing.json_schema import KINDS, closed
from server.parsing.parameters import parameters

Schema: TypeAlias = Mapping[str, Any]
Value = TypeVar("Value", dict[str, Any], list[Any], str)

ANY_TEXT = "(?s:.*)"
"""A pattern that any text matches, line breaks included."""

_SPACING = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""As templates render a call that comes back in the history, so that it is found in the cache."""

_NOT_RUST = re.compile(r"\(\?<?[=!]|\\[1-9k]")
"""Look-arounds and back-references, which no grammar can have."""

_ABOUT = frozenset({"title", "description", "$comment", "$schema"})
"""Keywords of a schema that ask for nothing, and that agents write pages of."""
_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords of a schema whose values are no schemas."""

MAX_WRITTEN_CHARACTERS = 1 << 24
"""Most characters of one grammar, repetitions included: each parameter's rule can repeat all
definitions of its function.
"""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called. A `strict` one is called exactly as its schema says."""

    name: str
    parameters: Schema
    strict: bool = False


class Lark:
    """Rules of one grammar as they are made.

    `special_tokens` are those that no text spells, by name: they become token literals.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        self._special = _any_of(tuple(special_tokens))
        self._names: dict[tuple[str, str], str] = {}  # of rules, by what they say
        self._n_characters = 0

    def text(self, text: str) -> str:
        """An expression for exactly this text, special tokens included."""
        expressions, at = list[str](), 0
        for found in self._special.finditer(text):
            if plain := text[at : found.start()]:
                expressions.append(json.dumps(plain, ensure_ascii=False))
            expressions.append(f"<[{self._special_tokens[found[0]]}]>")
            at = found.end()
        if rest := text[at:]:
            expressions.append(json.dumps(rest, ensure_ascii=False))
        return " ".join(expressions)

    def text_before(self, end: str, patterns: Sequence[str] = (ANY_TEXT,)) -> str:
        """An expression for text that all patterns match, and `end`, which the text does not
        contain. Patterns are regular expressions without slashes of their own.
        """
        special = self._special.search(end)
        if special is None:
            text = " & ".join(f"/{pattern}/" for pattern in patterns)
            return self.rule(text, attribute=f"[suffix={json.dumps(end, ensure_ascii=False)}]")
        # No text spells a special token, so the longest match ends before it.
        before = re.escape(end[: special.start()]).replace("/", r"\/")
        text = " & ".join(f"/{pattern}{before}/" for pattern in patterns)
        return f"{self.terminal(text)} {self.text(end[special.start() :])}"

    def json(self, schema: Schema, root: Schema, *, strict: bool) -> str:
        """An expression for JSON that conforms to the schema, whose references lead into `root`;
        keywords that are not known, or say what no grammar can have, are passed over unless
        `strict`.
        """
        options = {**_SPACING, "lenient": not strict}
        try:
            enforced = plain(schema, root, refuse if strict else ignore)
        except LeadsNowhere as error:
            raise NotASchema(str(error)) from None
        self._count(json.dumps(enforced))
        enforced = _without(_is_about if strict else _is_passed_over, enforced)
        return self.rule("%json " + json.dumps({**enforced, "x-guidance": options}))

    def name_but(self, names: Collection[str], pattern: str | None = None) -> str:
        """An expression for the name of a member that is none of these, and matches the pattern if
        one is given.
        """
        others = "|".join(re.escape(name).replace("/", r"\/") for name in names)
        but = f" & ~/({others})/" if others else ""
        fits = f" & /{whole_pattern(pattern)}/" if pattern and is_regular(pattern) else ""
        return self.terminal(r"/[a-zA-Z0-9_.-]{1,64}/" + fits + but)

    def any_of(self, expressions: Sequence[str]) -> str:
        """An expression for one of these."""
        return self.rule(" | ".join(expressions))

    def rule(self, expression: str, attribute: str = "") -> str:
        """A name for the expression."""
        return self._define("r", f"{attribute}: {expression}")

    def recursive(self, write: Callable[[str], str]) -> str:
        """A name for the expression that `write` makes, in which the name may stand."""
        name = "anything"
        meaning = f": {write(name)}"
        self._count(meaning)
        return self._names.setdefault((name, meaning), name)

    def terminal(self, expression: str) -> str:
        """A name for the expression of regular expressions, which is matched as one of them."""
        return self._define("T", f": {expression}")

    def _define(self, letter: str, meaning: str) -> str:
        """Define a rule and return its name. Equal rules share a name, because many functions take
        only a few plain texts.
        """
        self._count(meaning)
        return self._names.setdefault((letter, meaning), f"{letter}{len(self._names)}")

    def _count(self, written: str) -> None:
        self._n_characters += len(written)
        if self._n_characters > MAX_WRITTEN_CHARACTERS:
            raise NotASchema(
                "the grammar of the schemas takes more than "
                f"{MAX_WRITTEN_CHARACTERS} characters to write"
            )

    def grammar(self, start: str) -> str:
        """The whole, beginning with the expression."""
        rules = (name + meaning for (_, meaning), name in self._names.items())
        return "\n".join([f"start: {start}", *rules])


@lru_cache(8)
def _any_of(names: tuple[str, ...]) -> re.Pattern[str]:
    """Matches any of the names, the longest one. Some tokenizers have thousands."""
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


WriteCall: TypeAlias = Callable[[Lark, Function], str]
"""Makes an expression for a call of a function, from the function's name on."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The syntax of calls of a model family: `opens`, then `begin`, a call, `end` for each,
    `between` them, and `closes`. Opens and begin start with the marker that a parser looks for.
    """

    call: WriteCall
    opens: str = ""
    begin: str = ""
    end: str = ""
    between: str = ""
    closes: str = ""


def calls_grammar(
    syntax: CallSyntax,
    functions: Sequence[Function],
    special_tokens: Mapping[str, int],
    *,
    many: bool,
    behind: str = "",
) -> str:
    """A grammar for one call of one of the functions, or for `many`, one at least.

    With `behind`, a marker or a part of one, it is for what follows that. Raises NotASchema.
    """
    lark = Lark(special_tokens)
    called = [replace(one, parameters=arguments_schema(one)) for one in functions]
    call = lark.any_of([syntax.call(lark, function) for function in called])
    first = lark.text(_rest(syntax.opens + syntax.begin, behind))
    end = lark.text(syntax.end)
    more = f"({lark.text(syntax.between + syntax.begin)} {call} {end})*" if many else ""
    return lark.grammar(_sequence(first, call, end, more, lark.text(syntax.closes)))


def _rest(text: str, behind: str) -> str:
    """The text after `behind`, or all of it if it does not contain `behind`."""
    return text[text.find(behind) + len(behind) :] if behind in text else text


def _sequence(*expressions: str) -> str:
    return " ".join(filter(None, expressions))


class NotASchema(ValueError):
    """The schema of a function's parameters is no JSON schema, or too large for a grammar."""


def keyword(schema: Schema, name: str, kind: type[Value]) -> Value | None:
    """The value of a keyword of the schema; None if it is absent. Raises NotASchema."""
    value = schema.get(name)
    if value is None or isinstance(value, kind):
        return value
    raise NotASchema(f"{name!r} in a schema has a value of the wrong type")


def arguments_schema(function: Function) -> Schema:
    """The parameters' schema as an object's, which has no others than those that are declared. A
    function without a schema has no parameters.
    """
    return closed({"type": "object", **(function.parameters or {"properties": {}})})


def names_only(function: Function) -> Function:
    """The function, of whose parameters the names alone count, unless it is strict."""
    if function.strict:
        return function
    found = parameters(arguments_schema(function))
    names: Schema = {name: {} for name, schema in found.declared.items() if schema is not False}
    others = found.undeclared is not False or bool(found.patterns)
    return Function(function.name, {"properties": names, "additionalProperties": others})


def is_regular(pattern: str) -> bool:
    """Whether a pattern has no look-arounds and back-references, which no grammar can have."""
    return not _NOT_RUST.search(pattern)


def whole_pattern(pattern: str) -> str:
    """A schema's pattern, which is searched for, as a regular expression for the whole text."""
    escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern).replace("\n", r"\n")
    begin = "" if pattern.startswith("^") else ANY_TEXT
    end = "" if pattern.endswith("$") else ANY_TEXT
    return f"{begin}(?:{escaped.removeprefix('^').removesuffix('$')}){end}"


def json_call(arguments_key: str = "arguments") -> WriteCall:
    """`{"name": ..., "arguments": {...}}`."""

    def call(lark: Lark, function: Function) -> str:
        head = f'{{"name": {json.dumps(function.name)}, "{arguments_key}": '
        return f"{lark.text(head)} {json_arguments(lark, function)} {lark.text('}')}"

    return call


def headed_call(separator: str) -> WriteCall:
    """The name, a separator, and the arguments as JSON."""

    def call(lark: Lark, function: Function) -> str:
        return f"{lark.text(function.name + separator)} {json_arguments(lark, function)}"

    return call


def json_arguments(lark: Lark, function: Function) -> str:
    """The arguments as a JSON object."""
    return lark.json(function.parameters, function.parameters, strict=function.strict)


def _without(dropped: Callable[[str, Any], bool], schema: Any) -> Any:
    """The schema without some of its keywords, told from properties of their name by the value."""
    if isinstance(schema, list):
        return [_without(dropped, part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value if key in _DATA else _without(dropped, value)
        for key, value in schema.items()
        if not dropped(key, value)
    }


def _is_about(keyword: str, value: Any) -> bool:
    """Whether a keyword is for readers alone: left out, as grammars are bounded in length."""
    return keyword in _ABOUT and isinstance(value, str)


def _is_passed_over(keyword: str, value: Any) -> bool:
    """Whether no grammar can have a keyword, or it is for readers alone: a pattern that looks
    around, an unknown type.
    """
    match keyword, value:
        case "pattern", str():
            return not is_regular(value)
        case "type", str() | list():
            return any(
                name not in KINDS for name in (value if isinstance(value, list) else [value])
            )
    return _is_about(keyword, value)
