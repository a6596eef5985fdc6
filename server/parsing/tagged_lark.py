"""Grammars of calls whose parameters stand between tags. What they allow parses to arguments that
conform to the function's schema, except for a string's `format`, and for text that reads as an
object or a list where the schema allows strings and these.
"""

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from server.parsing.lark import (
    ANY_TEXT,
    Function,
    Lark,
    Schema,
    WriteCall,
    keyword,
    properties,
    required,
    undeclared,
)
from server.parsing.tagged_calls import Tags
from server.parsing.typed_values import KINDS, kind, kinds, listed, target


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
    needed, declared = required(function.parameters), properties(function.parameters)
    expressions = []
    for key, schema in declared.items():
        values = [
            f"{lark.text(tags.opening(key, kind))} {value} {lark.text(tags.line)}"
            for kind, value in _values(lark, function, tags, schema)
        ]
        optional = "" if key in needed else "?"
        expressions.append(f"({lark.any_of(values)}){optional}")
    if (others := undeclared(function.parameters)) is not False:
        expressions.append(f"({_other(lark, function, tags, others)})*")
    return " ".join(expressions)


def _other(lark: Lark, function: Function, tags: Tags, schema: Any) -> str:
    """A parameter that is not declared."""
    name, stand_in = lark.name_but(properties(function.parameters)), "name"
    written = []
    for type_, value in _values(lark, function, tags, schema):
        begin, _, end = tags.opening(stand_in, type_).rpartition(stand_in)
        written.append(f"{lark.text(begin)} {name} {lark.text(end)} {value}")
    return f"({lark.any_of(written)}) {lark.text(tags.line)}"


def _values(lark: Lark, function: Function, tags: Tags, schema: Any) -> Iterator[tuple[str, str]]:
    """A type, and an expression for a value of it with its end tag, for each way to write one."""
    root = function.parameters
    close = lark.text(tags.trim.written + tags.parameter.end)
    for branch in [*_branches(schema, root)] or [{}]:
        if constants := _constants(branch):
            for value in constants:
                is_text = isinstance(value, str)
                text = lark.text(value) if is_text else lark.json({"const": value}, strict=True)
                yield kind(value), f"{text} {close}"
            continue
        for name in sorted(kinds(branch, root) or KINDS):
            if name == "string":
                yield from (("string", text) for text in _strings(lark, function, tags, branch))
            else:
                only = {**branch, "type": name, **_definitions(branch, root)}
                yield name, f"{lark.json(only, strict=function.strict)} {close}"


def _strings(lark: Lark, function: Function, tags: Tags, schema: Schema) -> Iterator[str]:
    """Expressions for a string as text with its end tag, one for each way to quote it."""
    patterns = list(_patterns(schema)) if function.strict else []
    for quotes in tags.quotes:
        text = lark.text_before(quotes.end or tags.parameter.end, [quotes.pattern, *patterns])
        close = lark.text(tags.parameter.end) if quotes.end else ""
        yield f"{lark.text(quotes.begin)} {text} {close}"


def _patterns(schema: Schema) -> Iterator[str]:
    """What a schema says of a string's length and form, as regular expressions for all of it."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        yield f"(?s:.{{{least},{most}}})"
    if pattern := keyword(schema, "pattern", str):
        escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern).replace("\n", r"\n")
        begin = "" if pattern.startswith("^") else ANY_TEXT
        end = "" if pattern.endswith("$") else ANY_TEXT
        yield f"{begin}(?:{escaped.removeprefix('^').removesuffix('$')}){end}"


def _branches(schema: Any, root: Schema) -> Iterator[Schema]:
    """The alternatives of a schema, references followed; none where it refers to itself alone."""
    waiting, seen = deque([schema]), set[int]()
    while waiting:
        branch = waiting.popleft()
        if not isinstance(branch, Mapping):
            branch = {}
        if id(branch) in seen:
            continue
        seen.add(id(branch))
        if isinstance(branch.get("$ref"), str):
            waiting.appendleft(target(branch["$ref"], root))
            continue
        choices = branch.get("anyOf") or branch.get("oneOf") or branch.get("allOf")
        if isinstance(choices, list) and ("allOf" not in branch or len(choices) == 1):
            waiting += choices
        else:
            yield branch


def _constants(schema: Schema) -> Sequence[Any]:
    return [schema["const"]] if "const" in schema else listed(schema, "enum")


def _definitions(schema: Schema, root: Schema) -> Schema:
    """What references in the schema need to lead somewhere when it stands alone."""
    if '"$ref"' not in json.dumps(schema):
        return {}
    return {key: root[key] for key in ("$defs", "definitions") if key in root}
