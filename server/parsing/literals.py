"""Values in notations of models' own: converted to JSON while they stream, and their grammars.

Strings pass in slices, other values when they are complete. Where the text ends inside of an
object, that stays open: arguments that may lack their half must not look complete. `<` stands
only in strings: elsewhere it begins a marker, and all that is open before a marker is closed.

What grammars allow parses to arguments that conform to the function's schema. Where the notation
has no form for what a schema says, a value is written as JSON, which the readers take, too.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from server.parsing.lark import (
    Function,
    Lark,
    Schema,
    WriteCall,
    keyword,
    properties,
    required,
    undeclared,
)
from server.parsing.reader import AnswerPart, Content, Reader, Reading, gathered

WriteJson: TypeAlias = Callable[[str], AnswerPart]
ReadString: TypeAlias = Callable[[Reader, str, WriteJson], Reading[bool]]
"""Reads what follows the quote, that quote given, and writes a JSON string. Returns whether it came
to its end."""

_MOST_DEPTH = 64  # brackets inside of each other; what is deeper is passed on as a string
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_PYTHON_NUMBER = re.compile(r"[-+]?[\d.][\w.+-]{0,63}", re.ASCII)
_WORDS = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}
_BARE = re.compile(r"[^,<()\[\]{}]*")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Notation:
    """How values are written: strings between quotes, and which of the brackets lists have."""

    quotes: Mapping[str, ReadString]
    lists: Sequence[str] = ("[",)


def read_members(
    reader: Reader, notation: Notation, end: str, assign: str, part: WriteJson, depth: int = 0
) -> Reading[bool]:
    """Keys, `assign`, and values up to `end`, as a JSON object; whether that came to its end.

    What is no key with a value is dropped.
    """
    yield part("{")
    comma = ""
    while True:
        key, found = yield from _key(reader, notation, [assign, ",", end, "<"])
        if not found:
            return False
        if found in (end, "<"):
            reader.give_back(found if found == "<" else "")
            yield part("}")
            return True
        if found == assign:
            yield part(f"{comma}{key}: ")
            comma = ", "
            if not (yield from _value(reader, notation, part, depth)):
                return False


def quoted(text: str) -> str:
    """The text inside of a JSON string. Half of a character, which has no UTF-8, is an escape."""
    inside = json.dumps(text, ensure_ascii=False)[1:-1]
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", inside)


def scalar(text: str) -> str:
    """JSON for a number or a word of JSON or Python; text that is neither is a string."""
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text):
        return text
    if _PYTHON_NUMBER.fullmatch(text):
        try:
            return json.dumps(float(text) if "." in text else int(text, 0), allow_nan=False)
        except ValueError:
            pass
    return f'"{quoted(text)}"'


def _key(reader: Reader, notation: Notation, markers: Sequence[str]) -> Reading[tuple[str, str]]:
    """A key as a JSON string, and the marker after it, both consumed."""
    yield from reader.skip_space()
    if quote := (yield from reader.starts(list(notation.quotes))):
        key, ended = yield from gathered(notation.quotes[quote](reader, quote, Content))
        _, found = yield from reader.collect(markers)
        return key, found if ended else ""
    text, found = yield from reader.collect(markers)
    return f'"{quoted(text.strip())}"', found


def _value(reader: Reader, notation: Notation, part: WriteJson, depth: int) -> Reading[bool]:
    """One value; whether it came to its end."""
    yield from reader.skip_space()
    brackets = ["{", *notation.lists] if depth < _MOST_DEPTH else []
    begin = yield from reader.starts([*notation.quotes, *brackets])
    if begin in notation.quotes:
        return (yield from notation.quotes[begin](reader, begin, part))
    if begin == "{":
        return (yield from read_members(reader, notation, "}", ":", part, depth + 1))
    if begin:
        return (yield from _items(reader, notation, part, depth + 1))
    text = yield from _bare(reader)
    if text is None:
        return False
    yield part(scalar(text.strip()))
    return True


def _items(reader: Reader, notation: Notation, part: WriteJson, depth: int) -> Reading[bool]:
    """The rest of a list, which any bracket ends."""
    yield part("[")
    comma = ""
    while True:
        yield from reader.skip_space()
        quote = yield from reader.starts(list(notation.quotes))  # it may begin as a marker does
        reader.give_back(quote)
        following = quote or (yield from reader.peek())
        if not following:
            return False
        if following in tuple(")]}<"):
            reader.take(0 if following == "<" else 1)
            yield part("]")
            return True
        if following == ",":
            reader.take(1)
            continue
        if comma:
            yield part(comma)
        comma = ", "
        if not (yield from _value(reader, notation, part, depth)):
            return False


def _bare(reader: Reader) -> Reading[str | None]:
    """Text up to a comma or a bracket that it has not opened; None if the text ends before."""
    slices: list[str] = []
    depth = 0
    while True:
        text, at = reader.text, 0
        while at < len(text):
            match = _BARE.match(text, at)
            at = match.end() if match else at
            following = text[at : at + 1]
            if following == "<" or (depth == 0 and following in tuple(",)]}")):
                return "".join((*slices, reader.take(at)))
            depth += (following in tuple("([{")) - (following in tuple(")]}"))
            at += len(following)
        slices.append(reader.take(at))
        if reader.is_closed:
            return None
        yield None


Value: TypeAlias = Callable[[Schema], str]
"""An expression for a value that conforms to the schema."""

_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$defs", "definitions"})
_TEXT = _ANNOTATIONS | {"type", "enum", "const"}
_LIST = _ANNOTATIONS | {"type", "items"}
_OBJECT = _ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}
_MOST_WRITTEN_DEPTH = 8  # what is deeper is written as JSON
_KEY = re.compile(r"[^\s,:=<>\"'()\[\]{}](?:[^,:=<>\"'()\[\]{}]*[^\s,:=<>\"'()\[\]{}])?")


def keyword_call(lark: Lark, function: Function) -> str:
    """`name(key=value, other=value)`. Values are JSON, which Python nearly is."""
    values = _Json(lark, function)
    members = _members(lark, function.parameters, "=", ", ", values.value)
    return f"{lark.text(function.name + '(')} {members} {lark.text(')')}"


def braced_call(quote: str) -> WriteCall:
    """`name{key:value,other:value}`, strings between the quotes."""

    def call(lark: Lark, function: Function) -> str:
        values = _Braces(lark, _Json(lark, function), quote)
        members = _members(lark, function.parameters, ":", ",", values.value)
        return f"{lark.text(function.name + '{')} {members} {lark.text('}')}"

    return call


@dataclass(frozen=True, slots=True)
class _Json:
    """Values as JSON."""

    lark: Lark
    function: Function

    def value(self, schema: Schema) -> str:
        """See Value."""
        root = self.function.parameters
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return self.lark.json({**schema, **definitions}, strict=self.function.strict)


@dataclass(frozen=True, slots=True)
class _Braces:
    """Values with bare keys in braces, and with quotes of their own around strings."""

    lark: Lark
    json: _Json
    quote: str
    depth: int = 0

    def value(self, schema: Schema) -> str:
        """See Value."""
        own = self._own(schema) if self.depth < _MOST_WRITTEN_DEPTH else ""
        return own or self.json.value(schema)

    def _own(self, schema: Schema) -> str:
        """An expression in the notation, or "" where there is none for the schema."""
        inner = _Braces(self.lark, self.json, self.quote, self.depth + 1)
        keywords, kind = set(schema), schema.get("type")
        if branches := _branches(schema):
            return self.lark.any_of([inner.value(branch) for branch in branches])
        if kind == "string" and keywords <= _TEXT:
            return self._string(schema)
        if kind == "array" and keywords <= _LIST:
            item = inner.value(_schema(schema.get("items", {})))
            return self.lark.rule(f'"[" ({item} ("," {item})*)? "]"')
        if kind == "object" and keywords <= _OBJECT and "properties" in schema:
            members = _members(self.lark, schema, ":", ",", inner.value)
            return self.lark.rule(f'"{{" {members} "}}"')
        return ""

    def _string(self, schema: Schema) -> str:
        quote = self.lark.text(self.quote)
        texts = [schema["const"]] if "const" in schema else keyword(schema, "enum", list)
        if texts is None:
            return f"{quote} {self.lark.text_before(self.quote)}"
        if not all(isinstance(text, str) and self.quote not in text for text in texts):
            return ""
        return self.lark.any_of([f"{quote} {self.lark.text(text)} {quote}" for text in texts])


def _members(lark: Lark, schema: Schema, assign: str, comma: str, value: Value) -> str:
    """Keys and values in the order of their declaration; those that are not required, or not."""
    needed = required(schema)
    declared = properties(schema)
    members = declared | {key: {} for key in needed if key not in declared}
    # `first` begins with the first member that is written, `further` with a comma.
    first = further = ""
    if (others := undeclared(schema)) is not False:
        pair = lark.rule(f"{lark.name_but(members)} {lark.text(assign)} {value(_schema(others))}")
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


def _branches(schema: Schema) -> Sequence[Schema]:
    """The alternatives of a schema that says nothing else."""
    kinds = schema.get("type")
    if set(schema) <= _ANNOTATIONS | {"anyOf"}:
        return [_schema(branch) for branch in keyword(schema, "anyOf", list) or []]
    if isinstance(kinds, list) and not {"enum", "const"} & set(schema):
        return [{**schema, "type": kind} for kind in kinds]
    return []


def _schema(schema: Any) -> Schema:
    """A schema that is `true`, or what is none, allows anything."""
    return schema if isinstance(schema, dict) else {"not": {}} if schema is False else {}
