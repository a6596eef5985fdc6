"""The base classes of JSON objects: from clients, and for clients, where keys may be left out."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from server.errors import UNSUPPORTED

NULL: JsonSchemaValue = {"type": "null"}


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


class SparseModel(BaseModel):
    """A JSON object for a client. Keys that are not set are not sent: one whose default is None is
    never null, unless it can be nothing else.
    """

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        model = handler.resolve_ref_schema(schema)
        for name, field in cls.model_fields.items():
            if field.default is None:
                model["properties"][name] = _never_null(model["properties"][name])
        return schema


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
    """Metadata of a union of models: a value is validated by the model whose `type` it has, and by
    `default` where there is no such model. So its errors are those of one model.

    With `unknown`, a value of another type is refused in these words, in which `{kind}` is its
    type; one without a type is not.
    """

    def __init__(self, default: type[RequestModel], unknown: str | None = None) -> None:
        self._default = default
        self._unknown = unknown

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        models = get_args(source)
        names = {kind: model.__name__ for model in models for kind in _types(model)}

        def refuse_unknown(value: object) -> object:
            kind = type_of(value)
            if self._unknown and kind and kind not in names:
                raise PydanticCustomError(UNSUPPORTED, self._unknown, {"kind": kind[:64]})
            return value

        union = core_schema.tagged_union_schema(
            {model.__name__: handler.generate_schema(model) for model in models},
            lambda value: names.get(type_of(value), self._default.__name__),
        )
        return core_schema.no_info_before_validator_function(refuse_unknown, union)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """`anyOf`: an object whose type is left out may fit several models."""
        return {"anyOf": handler(schema)["oneOf"]}


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


def _never_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    del schema["default"]
    options = [option for option in schema.pop("anyOf", [NULL]) if option != NULL]
    return schema | (options[0] if len(options) == 1 else {"anyOf": options} if options else {})
