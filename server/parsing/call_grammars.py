"""Grammars of calls whose parameters are not one JSON object: text between tags, or literals.

What they allow parses to arguments that conform to the function's schema. Between tags a string's
`format` is an exception, and so is text that reads as an object or a list where the schema allows
strings and these. Where a notation has no form for what a schema says, a value is written as JSON,
which the parsers take, too.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from server.parsing.json_schema import (
    KINDS,
    alternatives,
    common_types,
    followed,
    kind,
    kinds,
    listed,
)
from server.parsing.lark import (
    Function,
    Lark,
    NotASchema,
    Schema,
    WriteCall,
    keyword,
    whole_pattern,
)
from server.parsing.parameters import Parameters, shapes
from server.parsing.tagged_calls import Tags


def tagged_call(tags: Tags) -> WriteCall:
    """The rest of a call's head, from the function's name on, and the parameters."""

    def call(lark: Lark, function: Function) -> str:
        head = function.name + tags.heads.call[1] + tags.call.head_end + tags.line
        return f"{lark.text(head)} {tagged_parameters(lark, function, tags)}"

    return call


def tagged_parameters(lark: Lark, function: Function, tags: Tags) -> str:
    """All parameters in the order of their declaration; those that are not required, or not. After
    them others, where the schema allows some.
    """
    check_exact(function)
    of_shapes = [
        _tagged_shape(lark, function, tags, one) for one in object_shapes(function.parameters)
    ]
    return of_shapes[0] if len(of_shapes) == 1 else lark.any_of([one or '""' for one in of_shapes])


def _tagged_shape(lark: Lark, function: Function, tags: Tags, shape: Parameters) -> str:
    needed = dict.fromkeys(shape.required)
    expressions = []
    for key, schema in shape.declared.items():
        if schema is False and key not in needed:
            continue
        values = [
            f"{lark.text(tags.opening(key, kind))} {value} {lark.text(tags.line)}"
            for kind, value in tagged_values(lark, function, tags, schema)
        ]
        optional = "" if key in needed else "?"
        expressions.append(f"({lark.any_of(values)}){optional}")
    others = [
        _other(lark, function, tags, schema, lark.name_but(shape.declared, pattern))
        for pattern, schema in other_parameters(shape)
    ]
    if others:
        expressions.append(f"({lark.any_of(others)})*")
    return " ".join(expressions)


def object_shapes(schema: Schema, root: Schema | None = None) -> Sequence[Parameters]:
    """The alternatives for an object's members. References lead into `root`, or else into the
    schema. Raises NotASchema.
    """
    keyword(schema, "properties", dict)
    if not all(isinstance(name, str) for name in keyword(schema, "required", list) or ()):
        raise NotASchema("'required' in a schema must be names")
    return shapes(schema, root)


def check_exact(function: Function) -> None:
    """Raises NotASchema for a strict function whose parameters the notation allows more loosely."""
    if function.strict and not all(one.is_exact for one in object_shapes(function.parameters)):
        raise NotASchema(f"the parameters of {function.name!r} cannot be enforced as they are")


def other_parameters(shape: Parameters) -> Iterator[tuple[str | None, Any]]:
    """Parameters that are not declared by name: a pattern of their names, and their schema."""
    for pattern, schema in shape.patterns.items():
        if schema is not False:
            yield pattern, schema
    if shape.undeclared is not False:
        yield None, shape.undeclared


def _other(lark: Lark, function: Function, tags: Tags, schema: Any, name: str) -> str:
    """A parameter that is not declared by name."""
    stand_in = "name"
    written = []
    for type_, value in tagged_values(lark, function, tags, schema):
        begin, _, end = tags.opening(stand_in, type_).rpartition(stand_in)
        written.append(f"{lark.text(begin)} {name} {lark.text(end)} {value}")
    return f"({lark.any_of(written)}) {lark.text(tags.line)}"


def tagged_values(
    lark: Lark, function: Function, tags: Tags, schema: Any
) -> Iterator[tuple[str, str]]:
    """A type, and an expression for a value of it with its end tag, for each way to write one."""
    root = function.parameters
    close = lark.text(tags.trim.written + tags.parameter.end)
    for branch in [*branches(schema, root)] or [{}]:
        if fixed := constants(branch):
            for value in fixed:
                is_text = isinstance(value, str)
                text = lark.text(value) if is_text else lark.json({"const": value}, {}, strict=True)
                yield kind(value), f"{text} {close}"
                if value is None or isinstance(value, bool):
                    yield from _words(lark, tags, [json.dumps(value)], close)
            continue
        for name in sorted(kinds(branch, root) or KINDS):
            if name == "string":
                yield from (("string", text) for text in _strings(lark, function, tags, branch))
            else:
                only = {**branch, "type": name}
                yield name, f"{lark.json(only, root, strict=function.strict)} {close}"
                if set(branch) <= ANNOTATIONS | {"type"}:
                    yield from _words(lark, tags, _WORDS_OF.get(name, ()), close)


_WORDS_OF = {"null": ("null",), "boolean": ("true", "false")}


def _words(lark: Lark, tags: Tags, words: Sequence[str], close: str) -> Iterator[tuple[str, str]]:
    """JSON's words as the family's template writes them, where that differs."""
    for word in words:
        if word in tags.words:
            yield kind(json.loads(word)), f"{lark.text(tags.words[word])} {close}"


def _strings(lark: Lark, function: Function, tags: Tags, schema: Schema) -> Iterator[str]:
    """Expressions for a string as text with its end tag, one for each way to quote it."""
    patterns = list(_patterns(schema)) if function.strict else []
    for quotes in tags.quotes:
        text = lark.text_before(quotes.end or tags.parameter.end, [quotes.pattern, *patterns])
        close = lark.text(tags.parameter.end) if quotes.end else ""
        yield f"{lark.text(quotes.begin)} {text} {close}"


def _patterns(schema: Schema) -> Iterator[str]:
    """A schema's constraints on a string's length and form, as regular expressions for the whole
    string.
    """
    least, most = schema.get("minLength") or 0, schema.get("maxLength", "")
    if least or most != "":
        yield f"(?s:.{{{least},{most}}})"
    if pattern := keyword(schema, "pattern", str):
        yield whole_pattern(pattern)
    for other in listed(schema, "allOf"):
        if isinstance(other, Mapping):
            yield from _patterns(other)


def branches(schema: Any, root: Schema) -> Iterator[Schema]:
    """The alternatives of a schema, each with all that applies to its value; none where it refers
    to itself alone. Of too many, one that allows anything is the last.
    """
    waiting: deque[tuple[list[Any], Schema, frozenset[int]]] = deque([([schema], {}, frozenset())])
    left = _MOST_BRANCHES
    while waiting:
        applies, merged, path = waiting.popleft()
        left -= 1
        if left < 0:
            yield {}
            return
        if not applies:
            yield merged
            continue
        first, *rest = applies
        if id(first) in path:
            continue
        if not isinstance(first, Mapping):
            waiting.appendleft((rest, merged, path))
            continue
        inside = path | {id(first)}
        own = {key: value for key, value in first.items() if key not in _APPLY_AS_WELL}
        merged = _merged(merged, own)
        if isinstance(first.get("$ref"), str):
            rest = [followed(first["$ref"], root), *rest]
        places = [*alternatives(first)]
        rest = [*(place[0] for place in places if len(place) == 1), *rest]
        several = [place for place in places if len(place) > 1]
        if not several:
            waiting.appendleft((rest, merged, inside))
            continue
        rest += [{"anyOf": place} for place in several[1:]]
        waiting.extendleft(([choice, *rest], merged, inside) for choice in reversed(several[0]))


_APPLY_AS_WELL = frozenset({"$ref", "allOf", "anyOf", "oneOf", "$defs", "definitions"})
_MOST_BRANCHES = 1000


def _merged(one: Schema, other: Schema) -> Schema:
    """A schema for what conforms to both."""
    merged = {**one, **other}
    for key in (one.keys() & other.keys()) - ANNOTATIONS:
        if key == "type":
            types = common_types(one[key], other[key])
            merged[key] = types[0] if len(types) == 1 else types
            if types:
                continue
        elif one[key] == other[key] and type(one[key]) is type(other[key]):
            continue
        return {**one, "allOf": [*listed(one, "allOf"), other]}
    return merged


def constants(schema: Schema) -> Sequence[Any]:
    return [schema["const"]] if "const" in schema else listed(schema, "enum")


Value: TypeAlias = Callable[[Schema], str]


"""An expression for a value that conforms to the schema."""


ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$defs", "definitions"})


_TEXT = ANNOTATIONS | {"type", "enum", "const"}


LIST = ANNOTATIONS | {"type", "items"}


OBJECT = ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}


_MOST_WRITTEN_DEPTH = 8  # what is deeper is written as JSON


_KEY = re.compile(r"[^\s,:=<>\"'()\[\]{}](?:[^,:=<>\"'()\[\]{}]*[^\s,:=<>\"'()\[\]{}])?")


def keyword_call(lark: Lark, function: Function) -> str:
    """`name(key=value, other=value)`. Values are Python's literals, or JSON."""
    check_exact(function)
    values = _Python(lark, _json(lark, function))
    members = _any_members(lark, function.parameters, "=", ", ", values.value)
    return f"{lark.text(function.name + '(')} {members} {lark.text(')')}"


def json_keyword_call(lark: Lark, function: Function) -> str:
    """`name(key=value, other=value)`. Values are JSON."""
    check_exact(function)
    members = _any_members(lark, function.parameters, "=", ", ", _json(lark, function))
    return f"{lark.text(function.name + '(')} {members} {lark.text(')')}"


def braced_call(quote: str) -> WriteCall:
    """`name{key:value,other:value}`, strings between the quotes, and keys in the alphabet's order,
    in which the templates put them.
    """

    def call(lark: Lark, function: Function) -> str:
        values = _Braces(lark, _json(lark, function), quote)
        check_exact(function)
        members = values.members(function.parameters)
        return f"{lark.text(function.name + '{')} {members} {lark.text('}')}"

    return call


def _json(lark: Lark, function: Function) -> Value:
    """Values as JSON."""

    def value(schema: Schema) -> str:
        return lark.json(schema, function.parameters, strict=function.strict)

    return value


@dataclass(frozen=True, slots=True)
class _Python:
    """Values as Python writes them; where it has another form than JSON, either of them."""

    lark: Lark
    json: Value

    def value(self, schema: Schema) -> str:
        """See Value."""
        keywords, kind = set(schema), schema.get("type")
        if stated := _stated_branches(schema):
            return self.lark.any_of([self.value(branch) for branch in stated])
        if kind == "array" and keywords <= LIST and "items" in schema:
            item = self.value(_schema(schema["items"]))
            return self.lark.rule(_list(item, ", "))
        forms = [self.json(schema)]
        if kind == "string" and keywords <= ANNOTATIONS | {"type"}:
            forms.append(_SINGLE_QUOTED)
        elif keywords <= _TEXT:
            forms += [f'"{word}"' for word in _python_words(schema)]
        return self.lark.any_of(forms)


_SINGLE_QUOTED = r"""/'(?:[^'\\\n]|\\['"\\ntr])*'/"""


def _python_words(schema: Schema) -> Sequence[str]:
    """Python's words for the values of a schema that are no numbers and no text."""
    kinds = schema.get("type")
    if "const" in schema or "enum" in schema:
        return [
            str(value) for value in constants(schema) if value is None or isinstance(value, bool)
        ]
    return {"null": ["None"], "boolean": ["True", "False"]}.get(str(kinds), [])


def _list(item: str, comma: str = ",") -> str:
    return f'"[" ({item} ("{comma}" {item})*)? "]"'


_NUMBER = r"/-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/"
_BARE_KEY = r"/[^\s,:=<>\"'()\[\]{}\/]{1,64}/"


@dataclass(frozen=True, slots=True)
class _Braces:
    """Values with bare keys in braces, and with quotes of their own around strings."""

    lark: Lark
    json: Value
    quote: str
    depth: int = 0

    def value(self, schema: Schema) -> str:
        """See Value."""
        own = self._own(schema) if self.depth < _MOST_WRITTEN_DEPTH else ""
        return own or self.json(schema)

    def members(self, schema: Schema) -> str:
        """Keys and values of an object."""
        inner = _Braces(self.lark, self.json, self.quote, self.depth + 1)
        return _any_members(self.lark, schema, ":", ",", inner.value, order=str.lower)

    def _own(self, schema: Schema) -> str:
        """An expression in the notation, or "" where there is none for the schema."""
        inner = _Braces(self.lark, self.json, self.quote, self.depth + 1)
        keywords, own = set(schema), ""
        if keywords <= ANNOTATIONS:
            own = self.lark.any_of([self._anything(), self.json(schema)])
        elif stated := _stated_branches(schema):
            own = self.lark.any_of([inner.value(branch) for branch in stated])
        elif keywords <= _TEXT and "None" in _python_words(schema):
            own = self.lark.any_of([self.json(schema), '"None"'])
        else:
            match schema.get("type"):
                case "string" if keywords <= _TEXT:
                    own = self._string(schema)
                case "array" if keywords <= LIST:
                    own = self.lark.rule(_list(inner.value(_schema(schema.get("items", {})))))
                case "object" if keywords <= ANNOTATIONS | {"type"}:
                    own = self.lark.rule(self._object(self._anything()))
                case "object" if keywords <= OBJECT and "properties" in schema:
                    own = self.lark.rule(f'"{{" {self.members(schema)} "}}"')
        return own

    def _anything(self) -> str:
        """Any value."""

        def expression(name: str) -> str:
            text, number = self._text(), self.lark.terminal(_NUMBER)
            words = '"true" | "false" | "null" | "None"'
            return f"{text} | {number} | {words} | {_list(name)} | {self._object(name)}"

        return self.lark.recursive(expression)

    def _object(self, value: str) -> str:
        """An object of any keys, with these values."""
        pair = f'({self.lark.terminal(_BARE_KEY)} | {self._text()}) ":" {value}'
        return f'"{{" ({pair} ("," {pair})*)? "}}"'

    def _text(self) -> str:
        return f"{self.lark.text(self.quote)} {self.lark.text_before(self.quote)}"

    def _string(self, schema: Schema) -> str:
        quote = self.lark.text(self.quote)
        texts = [schema["const"]] if "const" in schema else keyword(schema, "enum", list)
        if texts is None:
            return self._text()
        if not all(isinstance(text, str) and self.quote not in text for text in texts):
            return ""
        return self.lark.any_of([f"{quote} {self.lark.text(text)} {quote}" for text in texts])


def _any_members(
    lark: Lark,
    schema: Schema,
    assign: str,
    comma: str,
    value: Value,
    order: Callable[[str], str] | None = None,
) -> str:
    """Keys and values of one of the schema's shapes, sorted by the `order` of the keys or, without
    one, as they are declared.
    """
    found = object_shapes(schema)
    if order is not None:
        found = [replace(shape, declared=_sorted(shape.declared, order)) for shape in found]
    of_shapes = [_members(lark, shape, assign, comma, value) for shape in found]
    return of_shapes[0] if len(of_shapes) == 1 else lark.any_of([one or '""' for one in of_shapes])


def _sorted(declared: Mapping[str, Any], order: Callable[[str], str]) -> Mapping[str, Any]:
    return {name: declared[name] for name in sorted(declared, key=order)}


def _members(lark: Lark, shape: Parameters, assign: str, comma: str, value: Value) -> str:
    """Keys and values in their order; those that are not required, or not."""
    needed, members = dict.fromkeys(shape.required), dict(shape.declared)
    # `first` begins with the first member that is written, `further` with a comma.
    first = further = ""
    others = [
        f"{lark.name_but(members, pattern)} {lark.text(assign)} {value(_schema(schema))}"
        for pattern, schema in other_parameters(shape)
    ]
    if others:
        pair = lark.any_of(others)
        further = lark.rule(f"({lark.text(comma)} {pair})*")
        first = lark.rule(f"({pair} {further})?")
    for key, of_key in reversed(members.items()):
        if of_key is False and key not in needed:
            continue
        name = key if _KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)
        pair = lark.rule(f"{lark.text(name + assign)} {value(_schema(of_key))}")
        with_comma = f"{lark.text(comma)} {pair}"
        if key in needed:
            first = lark.rule(f"{pair} {further}")
            further = lark.rule(f"{with_comma} {further}")
        else:
            # Where a later member is required, so is one of these.
            first = lark.rule(f"{pair} {further} | {first}" if first else f"({pair} {further})?")
            further = lark.rule(f"({with_comma})? {further}")
    return first


def _stated_branches(schema: Schema) -> Sequence[Schema]:
    """The alternatives of a schema that says nothing else."""
    kinds = schema.get("type")
    if set(schema) <= ANNOTATIONS | {"anyOf"}:
        return [_schema(branch) for branch in keyword(schema, "anyOf", list) or []]
    if isinstance(kinds, list) and not {"enum", "const"} & set(schema):
        return [{**schema, "type": kind} for kind in kinds]
    return []


def _schema(schema: Any) -> Schema:
    """A schema that is `true`, or what is none, allows anything."""
    return schema if isinstance(schema, dict) else {"not": {}} if schema is False else {}
