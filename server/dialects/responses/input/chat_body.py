"""A response's body as the chat that it comes down to."""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from server.dialects.responses.input.history import chat_messages
from server.dialects.responses.tools import RequestTools, chat_choice
from server.errors import invalid_field
from server.generation.chat import Chat, Structure
from server.generation.roles import Roles
from server.schemas.chat import Conversation
from server.schemas.responses.items import ConversationItem
from server.schemas.responses.request import InputTokensRequest, ResponsesRequest, TextFormat
from server.schemas.structure import ANY_OBJECT, of_schema

Fields = dict[str, Any]


def as_chat(body: ResponsesRequest, prompt: Conversation) -> Chat:
    return Chat(
        conversation=prompt,
        sampling=body,
        max_tokens=body.max_output_tokens,
        logprobs=body.top_logprobs if body.wants_logprobs else None,
        structure=_structure(body.text.format),
        parallel_calls=body.parallel_tool_calls,
        thinking_budget=body.thinking_budget,
    )


def conversation(
    body: InputTokensRequest,
    items: Sequence[ConversationItem],
    tools: RequestTools,
    roles: Roles,
) -> Conversation:
    """What makes the prompt, of which `items` are all. Raises ApiError (400)."""
    fields: Fields = {
        "cache_salt": body.cache_salt,
        "messages": chat_messages(body.instructions, items, roles),
        "tools": tools.functions,
        "tool_choice": chat_choice(body.tool_choice),
        "reasoning_effort": body.reasoning.effort,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    try:
        return Conversation.model_validate(fields)
    except ValidationError as error:
        raise invalid_field(error) from None


def _structure(format: TextFormat) -> Structure | None:
    if format.type == "text":
        return None
    return "text.format", of_schema(ANY_OBJECT if format.schema_ is None else format.schema_)
