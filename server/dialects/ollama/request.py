"""Ollama's chats and prompts as Chats, and a raw prompt as a text completion."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import ValidationError

from server.dialects.ollama.conversation import chat_messages
from server.errors import invalid, invalid_field
from server.generation.chat import Chat, Structure
from server.generation.models import ServedModel
from server.schemas.chat import Conversation, Message, TextPart
from server.schemas.common import NO_LIMIT, SampledRequest
from server.schemas.completions import CompletionRequest
from server.schemas.errors import UNSUPPORTED
from server.schemas.ollama.request import (
    OllamaAsking,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from server.schemas.structure import ANY_OBJECT, NamedSchema, ResponseFormat, of_schema
from server.schemas.tools import ChatFunctionTool

SAME = {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "stop"}
"""Options with the same name in a SampledRequest."""

EFFORTS = {"max": "high"}
"""Ollama's efforts that templates do not know, as the highest that they do."""

Fields = dict[str, Any]


def as_chat(body: OllamaChatRequest, model: ServedModel) -> Chat:
    """Raises ApiError (400)."""
    return _chat(body, chat_messages(body.messages), body.tools, model)


def prompt_as_chat(body: OllamaGenerateRequest, model: ServedModel) -> Chat:
    """What the user says, behind what the system does. Raises ApiError (400)."""
    messages = [_said("user", body.prompt)]
    if body.system:
        messages.insert(0, _said("system", body.system))
    return _chat(body, messages, (), model)


def _said(role: Literal["system", "user"], text: str) -> Message:
    return Message(role=role, content=[TextPart(type="text", text=text)])


def raw_completion(body: OllamaGenerateRequest) -> CompletionRequest:
    """A prompt that goes past the chat template, `system` with it."""
    return CompletionRequest(
        prompt=[body.prompt],
        max_tokens=_max_tokens(body),
        logprobs=body.n_logprobs,
        response_format=_response_format(body),
        **_sampled(body),
    )


def _chat(
    body: OllamaAsking,
    messages: Sequence[Message],
    tools: Sequence[ChatFunctionTool],
    model: ServedModel,
) -> Chat:
    try:
        conversation = Conversation(
            messages=list(messages),
            tools=list(tools),
            cache_salt=body.cache_salt,
            continue_final_message=messages[-1].is_open,
            **_reasoning(body, model),
        )
    except ValidationError as error:
        raise invalid_field(error) from None
    return Chat(
        conversation=conversation,
        sampling=SampledRequest(**_sampled(body)),
        max_tokens=_max_tokens(body),
        logprobs=body.n_logprobs,
        structure=_structure(body),
    )


def _reasoning(body: OllamaAsking, model: ServedModel) -> Fields:
    """The template's fields of reasoning."""
    if body.think and not model.planner.reasons:
        message = f'"{model.name}" does not support thinking'  # the CLI looks for these words
        raise invalid(message, "think", UNSUPPORTED)
    match body.think:
        case None:
            return {}
        case str(effort):
            template = {"enable_thinking": True}
            known = EFFORTS.get(effort, effort)
            return {"reasoning_effort": known, "chat_template_kwargs": template}
        case switch:
            return {"chat_template_kwargs": {"enable_thinking": switch}}


def _sampled(body: OllamaAsking) -> Fields:
    options = body.options
    fields: Fields = options.model_dump(include=SAME, exclude_none=True)
    return fields | {
        "stream": body.stream,
        "cache_salt": body.cache_salt,
        "repetition_penalty": options.repeat_penalty,
        "seed": None if options.seed is None or options.seed < 0 else options.seed,
    }


def _max_tokens(body: OllamaAsking) -> int:
    asked = body.options.num_predict
    return asked if asked is not None and asked > 0 else NO_LIMIT


def _structure(body: OllamaAsking) -> Structure | None:
    schema = _schema(body)
    return None if schema is None else ("format", of_schema(schema))


def _response_format(body: OllamaAsking) -> ResponseFormat | None:
    if (schema := _schema(body)) is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=NamedSchema(schema=schema))


def _schema(body: OllamaAsking) -> dict[str, Any] | None:
    match body.format:
        case dict(schema):
            return schema
        case "json":
            return ANY_OBJECT
        case _:
            return None
