"""The base class of all JSON objects from clients."""

from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

NULL: JsonSchemaValue = {"type": "null"}


class RequestModel(BaseModel):
    """A JSON object from a client: unknown fields are accepted, and null is the same as absent.

    Lists are limited, and validated up to the first error (`fail_fast`): pydantic would make an
    error of each item.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The same in the schema: what may be absent may be null."""
        schema = handler(core_schema)
        model = handler.resolve_ref_schema(schema)
        for name, field in model["properties"].items():
            if name not in model.get("required", ()):
                model["properties"][name] = _nullable(field)
        return schema


def type_of(value: object) -> str:
    """The `type` of an object, from a client or read already; empty where there is none."""
    match vars(value) if isinstance(value, RequestModel) else value:
        case {"type": str(kind)}:
            return kind
        case _:
            return ""


def _nullable(schema: JsonSchemaValue) -> JsonSchemaValue:
    if NULL in schema.get("anyOf", ()):
        return schema
    about: JsonSchemaValue = {
        name: schema.pop(name) for name in ("title", "default") if name in schema
    }
    return {"anyOf": [*schema.get("anyOf", [schema]), NULL], **about}
