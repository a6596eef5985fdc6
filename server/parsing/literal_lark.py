"""Grammars of calls that are written in a notation of their own.

What they allow parses to arguments that conform to the function's schema. Where the notation has
no form for what a schema says, a value is written as JSON, which the readers take, too.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from server.parsing.lark import Function, Lark, Schema, keyword, properties, required, undeclared

Value: TypeAlias = Callable[[Schema], str]
"""An expression for a value that conforms to the schema."""

_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$defs", "definitions"})
_TEXT = _ANNOTATIONS | {"type", "enum", "const"}
_LIST = _ANNOTATIONS | {"type", "items"}
_OBJECT = _ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}
_MOST_DEPTH = 8  # what is deeper is written as JSON
_KEY = re.compile(r"[^\s,:=<>\"'()\[\]{}](?:[^,:=<>\"'()\[\]{}]*[^\s,:=<>\"'()\[\]{}])?")


def keyword_call(lark: Lark, function: Function) -> str:
    """`name(key=value, other=value)`. Values are JSON, which Python nearly is."""
    values = _Json(lark, function)
    members = _members(lark, function.parameters, "=", ", ", values.value)
    return f"{lark.text(function.name + '(')} {members} {lark.text(')')}"


def braced_call(quote: str) -> Callable[[Lark, Function], str]:
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
        own = self._own(schema) if self.depth < _MOST_DEPTH else ""
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
            # Where a member behind is required, so is one of these.
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
