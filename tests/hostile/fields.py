"""Every field of every route that takes a text, a list or an object, found in the daemon's own
OpenAPI document.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any]

MAX_DEPTH = 8
FEW_TOKENS = {
    "max_tokens": 4,
    "max_output_tokens": 16,
    "num_predict": 4,
}
"""What limits the answer wherever a body may say so: preparing a request is what is measured."""
ASSISTANTS_OWN = frozenset({"tool_calls", "function_call", "reasoning_content", "refusal"})
"""Members of messages that count where the role is the assistant's."""
SHORT_CHARACTERS = 1000

Step: TypeAlias = tuple[str | None, Mapping[str, Any]]
"""Into a list (None), or into the member with that name; and the object's other members, without
which it is refused."""


@dataclass(frozen=True, slots=True)
class Field:
    """A place in the body of a route. `item` is the least that a list in this place may hold."""

    method: str
    route: str
    steps: tuple[Step, ...] = ()
    kinds: frozenset[str] = frozenset()  # of JSON Schema's types
    item: Any = None
    is_short: bool = False  # of texts: all but short ones, or certain words, are refused

    @property
    def name(self) -> str:
        """The place as `messages[].content`."""
        parts = ("[]" if step is None else f".{step}" for step, _ in self.steps)
        return "".join(parts).removeprefix(".")

    def body(self, value: object) -> dict[str, Any]:
        """A body that has the value in this place."""
        for step, others in reversed(self.steps):
            value = [value] if step is None else {**others, step: value}
        assert isinstance(value, dict)
        return value


def fields(document: Schema) -> Iterator[Field]:
    """All fields of JSON bodies, those within the items of lists and within objects included."""
    walk = _Walk(document)
    for route, methods in document["paths"].items():
        for method, operation in methods.items():
            if not isinstance(operation, Mapping):
                continue
            media = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if media is None:  # no body, or a form
                continue
            path = re.sub(r"\{[^}]*\}", "x", route)
            example = with_few_tokens(media["example"])
            yield from walk.object(Field(method.upper(), path), media["schema"], example)


def with_few_tokens(value: Any) -> Any:
    """A body's example, of which the answer is short."""
    if not isinstance(value, dict):
        return value
    few = {name: most for name, most in FEW_TOKENS.items() if name in value}
    return {name: with_few_tokens(one) for name, one in value.items()} | few


class _Walk:
    def __init__(self, document: Schema) -> None:
        self._schemas = document["components"]["schemas"]

    def object(
        self, at: Field, schema: Schema, least: Mapping[str, Any], within: tuple[str, ...] = ()
    ) -> Iterator[Field]:
        """The fields of an object of which `least` is an example."""
        name = schema.get("$ref", "")
        if len(at.steps) >= MAX_DEPTH or (name and name in within):
            return
        properties = self._resolved(schema).get("properties", {})
        few = {key: value for key, value in FEW_TOKENS.items() if key in properties}
        for key, one in properties.items():
            others = {name: value for name, value in {**least, **few}.items() if name != key}
            if key in ASSISTANTS_OWN and "role" in others:
                others["role"] = "assistant"
            step = replace(at, steps=(*at.steps, (key, others)))
            yield from self._value(step, one, (*within, name))

    def _value(self, at: Field, schema: Schema, within: tuple[str, ...]) -> Iterator[Field]:
        options = list(self._options(schema))
        kinds = frozenset(kind for one in options for kind in _kinds(one))
        items = [one["items"] for one in options if "items" in one]
        if kinds & {"string", "array", "object"}:
            texts = [one for one in options if "string" in _kinds(one)]
            yield replace(
                at,
                kinds=kinds,
                item=self.least(items[0]) if items else None,
                is_short=all(map(_is_short, texts)),
            )
        for one in options:
            if "items" in one:
                item = replace(at, steps=(*at.steps, (None, {})))
                yield from self._value(item, one["items"], within)
            elif "properties" in one:
                yield from self.object(at, one, self.least(one), within)

    def _options(self, schema: Schema) -> Iterator[Schema]:
        """The schemas of which a value may follow one."""
        resolved = self._resolved(schema)
        named = {"$ref": schema["$ref"]} if "$ref" in schema else {}
        branches = resolved.get("anyOf") or resolved.get("oneOf") or ()
        if "properties" in resolved or not branches:
            yield {**resolved, **named}
            return
        for branch in branches:
            yield from self._options(branch)

    def least(self, schema: Schema) -> Any:
        """About the smallest value that is accepted."""
        schema = next(iter(self._options(schema)))
        if "const" in schema or "enum" in schema:
            words = schema.get("enum", [schema.get("const")])
            return "user" if "user" in words else words[0]
        kind = next(iter(_kinds(schema)), "object")
        if kind == "array":
            return [self.least(schema["items"])] * schema.get("minItems", 0)
        if kind == "object":
            named, conditions = schema.get("properties", {}), schema.get("anyOf", ())
            required = [*schema.get("required", ())]
            required += [name for one in conditions for name in one.get("required", ())][:1]
            return {name: self.least(named[name]) for name in required if name in named}
        text = "x" * max(1, schema.get("minLength", 1))
        return {"string": text, "boolean": False, "null": None}.get(kind, schema.get("minimum", 1))

    def _resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            found: Schema = self._schemas[schema["$ref"].rpartition("/")[2]]
            schema = found
        return schema


def _is_short(schema: Schema) -> bool:
    is_certain = not {"const", "enum", "pattern"}.isdisjoint(schema)
    return is_certain or schema.get("maxLength", SHORT_CHARACTERS + 1) <= SHORT_CHARACTERS


def _kinds(schema: Schema) -> list[str]:
    """JSON Schema's types that a schema without alternatives allows."""
    stated = schema.get("type")
    if stated is None:
        values = [schema["const"]] if "const" in schema else schema.get("enum", ())
        return ["string"] if any(isinstance(value, str) for value in values) else []
    return list(stated) if isinstance(stated, list) else [stated]
