"""A response's body as the chat request that it comes down to."""

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from server.dialects.responses.input.history import chat_messages
from server.dialects.responses.tools import RequestTools, chat_choice
from server.errors import invalid_field
from server.generation.roles import Roles
from server.schemas.chat import ChatRequest, Conversation
from server.schemas.common import SampledRequest
from server.schemas.responses.items import ConversationItem
from server.schemas.responses.request import InputTokensRequest, ResponsesRequest, TextFormat

Fields = dict[str, Any]

Chat = TypeVar("Chat", bound=Conversation)


def chat_body(body: ResponsesRequest, prompt: Fields) -> ChatRequest:
    """The request with the prompt that `prompt_fields` has made. Raises ApiError (400)."""
    sampled = body.model_fields_set & SampledRequest.model_fields.keys()
    fields: Fields = {name: getattr(body, name) for name in sampled} | prompt
    fields |= {
        "max_completion_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "thinking_budget": body.thinking_budget,
        "response_format": _format(body.text.format),
    }
    if body.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return _validated(ChatRequest, fields)


def conversation(prompt: Fields) -> Conversation:
    """What the prompt alone is made of. Raises ApiError (400)."""
    return _validated(Conversation, prompt)


def prompt_fields(
    body: InputTokensRequest,
    items: Sequence[ConversationItem],
    tools: RequestTools,
    roles: Roles,
) -> Fields:
    """The fields of a chat that make its prompt. `items` are the whole conversation."""
    return {
        "cache_salt": body.cache_salt,
        "messages": chat_messages(body.instructions, items, roles),
        "tools": tools.functions,
        "tool_choice": chat_choice(body.tool_choice),
        "reasoning_effort": body.reasoning.effort,
        "chat_template_kwargs": body.chat_template_kwargs,
    }


def _validated(model: type[Chat], fields: Fields) -> Chat:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise invalid_field(error) from None


def _format(format: TextFormat) -> Fields | None:
    match format.type:
        case "json_schema":
            named = {"name": format.name, "schema": format.schema_}
            return {"type": "json_schema", "json_schema": named}
        case "json_object":
            return {"type": "json_object"}
        case _:
            return None
