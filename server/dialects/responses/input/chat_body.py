"""A response's body as the chat request that it comes down to."""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from server.dialects.responses.input.history import chat_messages
from server.dialects.responses.tools import RequestTools, chat_choice
from server.errors import invalid_field
from server.generation.roles import Roles
from server.schemas.chat import ChatRequest
from server.schemas.common import SampledRequest
from server.schemas.responses.items import ConversationItem
from server.schemas.responses.request import ResponsesRequest, TextFormat


def chat_body(
    body: ResponsesRequest,
    items: Sequence[ConversationItem],
    tools: RequestTools,
    roles: Roles,
) -> ChatRequest:
    """`items` are the whole conversation. Raises ApiError (400)."""
    sampled = body.model_fields_set & SampledRequest.model_fields.keys()
    fields: dict[str, Any] = {name: getattr(body, name) for name in sampled}
    fields |= {
        "messages": chat_messages(body.instructions, items, roles),
        "max_completion_tokens": body.max_output_tokens,
        "tools": tools.functions,
        "tool_choice": chat_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort,
        "thinking_budget": body.thinking_budget,
        "chat_template_kwargs": body.chat_template_kwargs,
        "response_format": _format(body.text.format),
    }
    if body.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise invalid_field(error) from None


def _format(format: TextFormat) -> dict[str, Any] | None:
    match format.type:
        case "json_schema":
            named = {"name": format.name, "schema": format.schema_}
            return {"type": "json_schema", "json_schema": named}
        case "json_object":
            return {"type": "json_object"}
        case _:
            return None
