"""Grammars of tool calls, in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeAlias, TypeVar

from server.parsing.schemas import KINDS, closed, target

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

    def json(self, schema: Schema, *, strict: bool) -> str:
        """An expression for JSON that conforms to the schema; keywords that are not known, or say
        what no grammar can have, are passed over unless `strict`."""
        options = {**_SPACING, "lenient": not strict}
        self._count(json.dumps(schema))
        enforced = _without(_is_about if strict else partial(_is_passed_over, schema), schema)
        return self.rule("%json " + json.dumps({**enforced, "x-guidance": options}))

    def name_but(self, names: Collection[str]) -> str:
        """An expression for the name of a member that is none of these."""
        others = "|".join(re.escape(name).replace("/", r"\/") for name in names)
        return self.terminal(r"/[a-zA-Z0-9_.-]{1,64}/" + (f" & ~/({others})/" if others else ""))

    def any_of(self, expressions: Sequence[str]) -> str:
        """An expression for one of these."""
        return self.rule(" | ".join(expressions))

    def rule(self, expression: str, attribute: str = "") -> str:
        """A name for the expression."""
        return self._define("r", f"{attribute}: {expression}")

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


def properties(schema: Schema) -> dict[str, Any]:
    """The schemas of an object's members by their names. Raises NotASchema."""
    return keyword(schema, "properties", dict) or {}


def undeclared(schema: Schema) -> Any:
    """The schema of members that an object may have in addition to those that it declares; else
    False."""
    return schema.get("additionalProperties", False)


def required(schema: Schema) -> Collection[str]:
    """The names of the members that an object must have, in their order. Raises NotASchema."""
    names = keyword(schema, "required", list) or []
    if not all(isinstance(name, str) for name in names):
        raise NotASchema("'required' in a schema must be names")
    return dict.fromkeys(names)  # each member is looked up in it


def arguments_schema(function: Function) -> Schema:
    """The parameters' schema as an object's, which has no others than those that are declared."""
    return closed({"type": "object", **function.parameters})


def names_only(function: Function) -> Function:
    """The function, of whose parameters the names alone count, unless it is strict."""
    if function.strict:
        return function
    names = function.parameters.get("properties")
    if not isinstance(names, Mapping):
        return Function(function.name, {})
    others = undeclared(function.parameters) is not False
    declared = {"properties": {name: {} for name in names}, "additionalProperties": others}
    return Function(function.name, declared)


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
    return lark.json(function.parameters, strict=function.strict)


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


def _is_passed_over(root: Schema, keyword: str, value: Any) -> bool:
    """Whether no grammar can have a keyword, or it is for readers alone: a pattern that looks
    around, as zod's of an e-mail address does, an unknown type, a reference that leads nowhere.
    """
    match keyword, value:
        case "pattern", str():
            return bool(_NOT_RUST.search(value))
        case "type", str() | list():
            return any(
                name not in KINDS for name in (value if isinstance(value, list) else [value])
            )
        case "$ref", str():
            return not (value.startswith("#") and target(value, root))
    return _is_about(keyword, value)
