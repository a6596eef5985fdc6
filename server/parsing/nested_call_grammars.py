"""Grammars of calls in which objects and lists are tags within tags, named as their members are.

What they allow parses to arguments that conform to the function's schema. Where a schema says more
of an object or a list than the notation has a form for, a strict function has JSON there, which the
parsers take, too; another one has tags without it.
"""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from server.parsing.call_grammars import (
    ANNOTATIONS,
    LIST,
    OBJECT,
    branches,
    check_exact,
    constants,
    object_shapes,
    other_parameters,
    tagged_values,
)
from server.parsing.json_schema import KINDS, kinds, listed
from server.parsing.lark import Function, Lark, Schema, WriteCall
from server.parsing.parameters import Parameters
from server.parsing.tagged_calls import Tags

ITEM = "item"
"""The tag of a list's item."""

_NAME = r"/[^<>\/\s][^<>\/\n]{0,63}/"


def nested_call(tags: Tags, before_tags: str) -> WriteCall:
    """The rest of a call's head, from the function's name on, and the parameters. Each tag follows
    the text `before_tags`; the tags' `parameter.end` is all of an end tag but the name and `>`.
    """

    def call(lark: Lark, function: Function) -> str:
        check_exact(function)
        head = lark.text(function.name + tags.heads.call[1] + tags.call.head_end)
        nested = _Nested(lark, function, tags, before_tags)
        return f"{head} {nested.members(function.parameters)}"

    return call


@dataclass(frozen=True, slots=True)
class _Nested:
    """Values of one function. `path` has the schemas that a value is within, by identity."""

    lark: Lark
    function: Function
    tags: Tags
    before_tags: str
    path: Set[int] = field(default_factory=frozenset)

    def members(self, schema: Schema) -> str:
        """All members in the order of their declaration, those that are not required or not, and
        after them others, where the schema allows some.
        """
        found = object_shapes(schema, self.function.parameters)
        of_shapes = [self._of_shape(shape) for shape in found]
        if len(of_shapes) == 1:
            return of_shapes[0]
        return self.lark.any_of([one or '""' for one in of_shapes])

    def _of_shape(self, shape: Parameters) -> str:
        needed = dict.fromkeys(shape.required)
        expressions = []
        for key, schema in shape.declared.items():
            if schema is not False or key in needed:
                optional = "" if key in needed else "?"
                expressions.append(f"({self._member(key, schema)}){optional}")
        others = []
        for pattern, schema in other_parameters(shape):
            name = self.lark.name_but(shape.declared, pattern)
            begin = self.lark.text(self.tags.parameter.begin)
            others.append(f'{begin} {name} ">" {self._value(schema)} {name} ">"')
        if others:
            expressions.append(f"({self.lark.any_of(others)})*")
        return " ".join(expressions)

    def _member(self, key: str, schema: Any) -> str:
        begin = self.lark.text(f"{self.tags.parameter.begin}{key}{self.tags.parameter.head_end}")
        return f"{begin} {self._value(schema)} {self.lark.text(key + '>')}"

    def _value(self, schema: Any) -> str:
        """A value, and the end tag up to the name."""
        return self.lark.any_of([one for branch in self._branches(schema) for one in branch])

    def _branches(self, schema: Any) -> list[list[str]]:
        root = self.function.parameters
        is_recursive = id(schema) in self.path
        inner = _Nested(
            self.lark, self.function, self.tags, self.before_tags, self.path | {id(schema)}
        )
        found = [*branches(schema, root)] or [{}]
        return [inner._of_branch(branch, is_recursive=is_recursive) for branch in found]

    def _of_branch(self, branch: Schema, *, is_recursive: bool) -> list[str]:
        if branch.keys() <= ANNOTATIONS:
            return [self._anything()]
        types = set(kinds(branch, self.function.parameters) or KINDS)
        nested = set[str]()
        if not (constants(branch) or is_recursive):
            nested = {name for name in types & {"array", "object"} if self._has_form(branch, name)}
        written = []
        if rest := sorted(types - nested):
            scalars = {**branch, "type": rest}
            written += [
                one for _, one in tagged_values(self.lark, self.function, self.tags, scalars)
            ]
        end = self.lark.text(self.tags.parameter.end)
        if "array" in nested:
            item = self._member(ITEM, branch.get("items", {}))
            written.append(f"({item})* {end}")
        if "object" in nested:
            written.append(f"{self._object(branch)} {end}")
        return written

    def _object(self, branch: Schema) -> str:
        if branch.keys() <= ANNOTATIONS | {"type"}:
            return f"({self._any_member(self._anything())})*"
        return self.members(branch)

    def _has_form(self, branch: Schema, name: str) -> bool:
        """Whether an object or a list of this schema can be written in tags."""
        if not self.function.strict:
            return not listed(branch, "prefixItems")
        return branch.keys() <= (LIST if name == "array" else OBJECT)

    def _anything(self) -> str:
        """Any value, and the end tag up to the name."""

        def expression(name: str) -> str:
            end = self.tags.parameter.end
            first = self.before_tags[0]
            text = self.lark.text_before(end, [rf"[^\{first}](?s:.*)"])
            return f"{text} | ({self._any_member(name)})* {self.lark.text(end)}"

        return self.lark.recursive(expression)

    def _any_member(self, value: str) -> str:
        name, begin = self.lark.terminal(_NAME), self.lark.text(self.tags.parameter.begin)
        return f'{begin} {name} ">" {value} {name} ">"'
