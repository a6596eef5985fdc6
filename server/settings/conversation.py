"""Prompts of chats, and the parsers of answers."""

from typing import Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from server.parsing.registry import REASONING_FORMATS, TOOL_FORMATS


class ConversationSettings(BaseModel):
    tool_parser: str = Field(
        "auto",
        description="How the model writes tool calls: the name of a format, auto to tell it from "
        "the chat template, or none.",
    )
    reasoning_parser: str = Field(
        "auto",
        description="How the model marks its reasoning: the name of a format, auto to tell it "
        "from the chat template, or none.",
    )
    tool_guides: Literal["all", "strict-only"] = Field(
        "all",
        description="Which tool calls a grammar holds to the declared names and arguments, once "
        "they have begun: all, or only those of strict functions.",
    )
    json_schemas: Literal["closed", "literal"] = Field(
        "closed",
        description="How JSON schemas for an answer are read: closed, an object with `properties` "
        "has no others unless the schema says so, as in OpenAI's strict mode; literal, it may.",
    )
    strip_billing_header: bool = Field(
        True,
        description="Leave out of prompts the billing header with which Claude Code begins its "
        "system prompt: it differs between sessions, which would share nothing.",
    )

    @field_validator("tool_parser", "reasoning_parser")
    @classmethod
    def _known_parser(cls, name: str, info: ValidationInfo) -> str:
        known = TOOL_FORMATS if info.field_name == "tool_parser" else REASONING_FORMATS
        if name not in {"auto", "none", *known}:
            names = ", ".join(("auto", "none", *sorted(known)))
            raise PydanticCustomError("parser", "must be one of {names}", {"names": names})
        return name
