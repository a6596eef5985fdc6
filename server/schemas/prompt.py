"""The body of routes that take a prompt or a chat, and generate nothing."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, PlainValidator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError

from server.schemas.base import NULL
from server.schemas.chat import MAX_MESSAGES, ChatConversation, Message
from server.schemas.completions import Prompt, WirePrompt, parse_prompts


def _parse_prompt(value: object) -> Prompt:
    prompts = parse_prompts(value)
    if len(prompts) != 1:
        raise PydanticCustomError("prompt", "one prompt at a time")
    return prompts[0]


WireOnePrompt = WirePrompt | Annotated[list[WirePrompt], Field(min_length=1, max_length=1)]
OnePrompt = Annotated[Prompt, PlainValidator(_parse_prompt, json_schema_input_type=WireOnePrompt)]


ONE_OF_BOTH: JsonSchemaValue = {
    "anyOf": [
        {
            "properties": {"messages": {"type": "array", "minItems": 1}, "prompt": NULL},
            "required": ["messages"],
        },
        {
            "properties": {"messages": NULL, "prompt": {"type": ["string", "array"]}},
            "required": ["prompt"],
        },
    ]
}


class PromptOrChat(ChatConversation):
    """A prompt as text or token ids, or a chat body."""

    model_config = ConfigDict(json_schema_extra=ONE_OF_BOTH)

    messages: list[Message] = Field(default_factory=list, max_length=MAX_MESSAGES, fail_fast=True)
    prompt: OnePrompt | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if bool(self.messages) == (self.prompt is not None):
            raise PydanticCustomError("prompt", "give either messages or prompt")
        return self
