"""JSON objects from clients, and for clients: their base classes."""

from collections.abc import Callable, Mapping
from operator import methodcaller
from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from server.errors import UNSUPPORTED

NULL: JsonSchemaValue = {"type": "null"}
OBJECT: JsonSchemaValue = {"type": "object"}


class RequestModel(BaseModel):
    """A JSON object from a client: unknown fields are accepted, null is the same as absent, and a
    number without a fraction is an integer, as JSON Schema has it: `10.0` is 10.

    Lists are limited, and validated up to the first error (`fail_fast`): pydantic would make an
    error of each item.
    """

    EXAMPLE: ClassVar[Mapping[str, object]]
    """Of a class that is the body of a route: a body for `/openapi.json`. It names no model, so
    the daemon answers it with 200 whatever model is served.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _as_json_schema_has_it(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: integral_to_int(value) for key, value in data.items() if value is not None}
        return data

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The JSON schema, in which what may be absent may be null."""
        schema = handler(core_schema)
        model = handler.resolve_ref_schema(schema)
        for name, field in model["properties"].items():
            if name not in model.get("required", ()):
                model["properties"][name] = _nullable(field)
        return schema


AnswerType = type[BaseModel] | type[Mapping[str, object]]
"""The type of a JSON object for a client: a TypedDict, or a model where Python code has objects of
it. `/openapi.json` describes both, and what is written of either is not validated again.
"""


def any_of(*schemas: JsonSchemaValue) -> ConfigDict:
    """The configuration of a model whose JSON also fits one of these schemas: a validator enforces
    that in Python.
    """
    return ConfigDict(json_schema_extra={"anyOf": list(schemas)})


def of_type(*types: str | None) -> JsonSchemaValue:
    """The JSON schema of an object with one of these types; None: with none."""
    return {"properties": {"type": {"enum": list(types)} if types[1:] else {"const": types[0]}}}


def present(**members: JsonSchemaValue) -> JsonSchemaValue:
    """The JSON schema of an object that has all of these members."""
    return {"properties": members, "required": list(members)}


def refused(message: str = "not supported") -> AfterValidator:
    """Refuses a field that is not supported, in these words: only empty values pass, and false."""

    def check(value: Any) -> Any:
        if value:
            raise PydanticCustomError(UNSUPPORTED, message)
        return value

    return AfterValidator(check)


def at_most(limit: int) -> BeforeValidator:
    """Limits the entries of an object before they are validated: a dict has no `fail_fast`."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > limit:
            raise PydanticCustomError("too_many", "at most {limit} entries", {"limit": limit})
        return value

    return BeforeValidator(check)


def integral_to_int(value: object) -> object:
    """A float without a fraction as an integer; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def type_of(value: object) -> str:
    """The `type` of an object, from a client or read already; empty where there is none."""
    match vars(value) if isinstance(value, RequestModel) else value:
        case {"type": str(kind)}:
            return kind
        case _:
            return ""


class ByType:
    """Metadata of a union of models: a value is validated by the model whose `type` it has, so its
    errors are those of one model.

    Where there is no such model, `default` validates it; without a default it is refused in the
    words of `untyped`, and the places that errors name have its type in them. A value of another
    type is validated by `foreign`, a model of the union, or else refused in the words of `unknown`,
    in which `{kind}` is its type.
    """

    def __init__(
        self,
        default: type[RequestModel] | None = None,
        *,
        foreign: type[RequestModel] | None = None,
        unknown: str | None = None,
        untyped: str | None = None,
    ) -> None:
        self._default = default
        self._foreign = foreign
        self._unknown = unknown
        self._untyped = untyped

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        choices, names = dict[str, CoreSchema](), dict[str, str]()
        for option in get_args(source):
            model = option if isinstance(option, type) else get_args(option)[0]
            schema = handler.generate_schema(option)
            kinds = _types(model)
            by_name = self._default is not None or model is self._foreign
            names |= {kind: model.__name__ if by_name else kind for kind in kinds}
            choices |= dict.fromkeys([model.__name__] if by_name else kinds, schema)

        def refuse_unknown(value: object) -> object:
            kind = type_of(value)
            if self._unknown and kind and kind not in names:
                raise PydanticCustomError(UNSUPPORTED, self._unknown, {"kind": kind[:64]})
            return value

        default = self._default.__name__ if self._default else None
        other = self._foreign.__name__ if self._foreign else default

        def choice(value: object) -> str | None:
            kind = type_of(value)
            return names.get(kind, other) if kind else default

        union = core_schema.tagged_union_schema(
            choices,
            choice,
            custom_error_type=UNSUPPORTED if self._untyped else None,
            custom_error_message=self._untyped,
        )
        return core_schema.no_info_before_validator_function(refuse_unknown, union)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Described as `anyOf` where several models may take an object: where its type may be left
        out, or be any.
        """
        described = handler(schema)
        is_open = self._default or self._foreign
        return {"anyOf": described["oneOf"]} if is_open else described


class ReadAs:
    """Metadata of a field whose JSON is validated by a model, or a union of models. The field's
    value is what the validated model's `value()` returns, or else `make` of it.
    """

    def __init__(self, model: Any, make: Callable[[Any], object] = methodcaller("value")) -> None:
        self._model = model
        self._make = make

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler.generate_schema(self._model)
        return core_schema.no_info_after_validator_function(self._make, schema)


def other_types(*models: type[RequestModel]) -> JsonSchemaValue:
    """The JSON schema of a `type` that none of these models has."""
    return {"not": {"enum": [kind for model in models for kind in _types(model)]}}


def _types(model: type[RequestModel]) -> tuple[str, ...]:
    """The values that a model's `type` may have; none where it may be any text."""
    annotation = model.model_fields["type"].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _nullable(schema: JsonSchemaValue) -> JsonSchemaValue:
    if NULL in schema.get("anyOf", ()):
        return schema
    about: JsonSchemaValue = {
        name: schema.pop(name) for name in ("title", "default") if name in schema
    }
    return {"anyOf": [*schema.get("anyOf", [schema]), NULL], **about}
