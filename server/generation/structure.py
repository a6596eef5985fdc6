"""Structured outputs: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from engine.values.request import Grammar, GrammarKind
from server.errors import UNSUPPORTED
from server.json_model import RequestModel

MAX_CHOICES = 1024

ANY_OBJECT = {"type": "object"}


def refuse(value: Any) -> Any:
    """Validate a field that is not supported: only null, false and empty values pass."""
    if value not in (None, False, "", [], {}):
        raise PydanticCustomError(UNSUPPORTED, "not supported")
    return value


Unsupported = SkipJsonSchema[Annotated[Any, AfterValidator(refuse)]]


class NamedSchema(RequestModel):
    name: str = Field("", max_length=256)
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(RequestModel):
    """OpenAI's. Where there is a schema it is kept to, `strict` or not."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"type": {"enum": ["text", "json_object"]}}},
                {
                    "properties": {"json_schema": {"type": "object"}},
                    "required": ["json_schema"],
                },
            ]
        }
    )

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("json_schema", "json_schema is missing")
        return self


Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),
]
JsonSchemaText = dict[str, Any] | str
"""A JSON schema, or its text."""


class StructuredOutputs(RequestModel):
    """vLLM's `structured_outputs`. At most one of them."""

    json_: JsonSchemaText | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: Unsupported = None
    whitespace_pattern: Unsupported = None
    disable_any_whitespace: Unsupported = None

    def grammars(self) -> Iterator[tuple[str, Grammar]]:
        """The grammars that the fields describe, each with its field's name."""
        if self.json_ is not None:
            yield "json", of_schema(self.json_)
        if self.json_object:
            yield "json_object", of_schema(ANY_OBJECT)
        if self.regex is not None:
            yield "regex", of_regex(self.regex)
        if self.choice is not None:
            yield "choice", of_choice(self.choice)
        if self.grammar is not None:
            yield "grammar", of_lark(self.grammar)


def of_format(format: ResponseFormat) -> Grammar | None:
    """What a `response_format` asks for; None for text."""
    if format.type == "json_schema" and format.json_schema is not None:
        return of_schema(format.json_schema.schema_)
    return of_schema(ANY_OBJECT) if format.type == "json_object" else None


def of_schema(schema: JsonSchemaText) -> Grammar:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def of_regex(pattern: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, pattern)


def of_choice(choices: list[str]) -> Grammar:
    """One of some texts, word for word."""
    quoted = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return Grammar(GrammarKind.LARK, f"start: {' | '.join(quoted)}")


def of_lark(grammar: str) -> Grammar:
    return Grammar(GrammarKind.LARK, grammar)
