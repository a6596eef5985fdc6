"""The tools of a request, and how the model is to choose among them."""

import re
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from server.schemas.base import NULL, RequestModel
from server.schemas.errors import UNSUPPORTED
from server.schemas.messages.content import Markable
from server.schemas.tools import FUNCTION_NAME

HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset")
"""How the types of those begin that Anthropic's servers run themselves."""


class ToolParam(Markable):
    """A tool with a schema is the client's to run. Others Anthropic runs, or has the schema of."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {
                    "properties": {
                        "name": {"type": "string", "pattern": FUNCTION_NAME},
                        "input_schema": {"type": "object"},
                    },
                    "required": ["name", "input_schema"],
                },
                {
                    "properties": {
                        "type": {"type": "string", "pattern": f"^({'|'.join(HOSTED)})"},
                        "input_schema": NULL,
                    },
                    "required": ["type"],
                },
            ]
        }
    )

    type: str = Field("custom", max_length=64)
    name: str = Field("", max_length=256)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool = False

    @property
    def is_hosted(self) -> bool:
        return self.input_schema is None and self.type.startswith(HOSTED)

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.is_hosted:
            return self
        if self.input_schema is None and self.type != "custom":
            message = "tools of type '{kind}' are not supported; declare one with an input_schema"
            raise PydanticCustomError(UNSUPPORTED, message, {"kind": self.type})
        if self.input_schema is None:
            raise PydanticCustomError("tool", "input_schema is missing")
        if not re.fullmatch(FUNCTION_NAME, self.name):
            message = "the name must match {pattern}"
            raise PydanticCustomError("tool", message, {"pattern": FUNCTION_NAME})
        return self


class ToolChoiceParam(RequestModel):
    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"type": {"enum": ["auto", "any", "none"]}}},
                {
                    "properties": {"name": {"type": "string", "pattern": FUNCTION_NAME}},
                    "required": ["name"],
                },
            ]
        }
    )

    type: Literal["auto", "any", "tool", "none"]
    name: str = Field("", max_length=256)
    disable_parallel_tool_use: bool = False
