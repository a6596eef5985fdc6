"""A Messages request as a Chat."""

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel, ValidationError

from server.dialects.messages.conversation import block_texts, chat_messages
from server.errors import invalid_field
from server.generation.chat import Chat, Structure
from server.generation.models import ServedModel
from server.record import RequestRecord
from server.schemas.chat import Conversation
from server.schemas.common import SampledRequest
from server.schemas.messages.request import CountTokensRequest, MessagesRequest, ThinkingParam
from server.schemas.messages.tools import ToolChoiceParam, ToolParam
from server.schemas.structure import of_schema

BILLING_LINE = "x-anthropic-billing-header:"
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
EFFORTS = {"xhigh": "high", "max": "high"}
"""Anthropic's efforts that templates do not know, as the highest that they do."""

SAME = {
    *("model", "stream", "temperature", "top_p", "top_k"),
    *("cache_salt", "seed", "priority", "speculate"),
}
"""Fields with the same name in a SampledRequest."""

MAX_LOGGED = 8  # types of tools, which are client input

log = logging.getLogger("rootstock.messages")

Fields = dict[str, Any]


async def as_chat(
    body: MessagesRequest,
    model: ServedModel,
    record: RequestRecord,
    *,
    strip_billing_header: bool,
) -> Chat:
    """Raises ApiError (400)."""

    def read() -> Chat:
        return _chat(body, _conversation(body, model, strip_billing_header), model)

    return await model.workers.prepare(record, read)


async def conversation(
    body: CountTokensRequest,
    model: ServedModel,
    record: RequestRecord,
    *,
    strip_billing_header: bool,
) -> Conversation:
    """What makes the prompt. Raises ApiError (400)."""
    read = partial(_conversation, body, model, strip_billing_header)
    return await model.workers.prepare(record, read)


def _conversation(
    body: CountTokensRequest, model: ServedModel, strip_billing_header: bool
) -> Conversation:
    system = _system(body.system, strip_billing_header=strip_billing_header)
    messages = chat_messages(system, body.messages, model.prompts.roles)
    try:
        return Conversation(
            cache_salt=body.cache_salt,
            messages=messages,
            continue_final_message=messages[-1].role == "assistant",
            **_tools(body.tools),
            **_choice(body.tool_choice),
            **_reasoning(body, reasons=model.planner.reasons),
        )
    except ValidationError as error:
        raise invalid_field(error) from None


def _chat(body: MessagesRequest, prompt: Conversation, model: ServedModel) -> Chat:
    choice = body.tool_choice
    return Chat(
        conversation=prompt,
        sampling=_sampling(body),
        max_tokens=body.max_tokens or None,  # with 0 the answer is left out
        structure=_structure(body),
        parallel_calls=choice is None or not choice.disable_parallel_tool_use,
        thinking_budget=_budget(body.thinking) if model.planner.reasons else None,
    )


def _system(blocks: Iterable[BaseModel], *, strip_billing_header: bool) -> list[str]:
    said = block_texts(blocks)
    if strip_billing_header:
        said = [_without_billing_line(text) for text in said]
    return [text for text in said if text]


def _without_billing_line(text: str) -> str:
    """Claude Code begins its system prompt with a line that differs from session to session."""
    line, _, rest = text.partition("\n")
    return rest if line.startswith(BILLING_LINE) else text


def _tools(tools: Sequence[ToolParam]) -> Fields:
    if kinds := sorted({tool.type for tool in tools if tool.is_hosted}):
        log.info("left out, as they run at Anthropic alone: tools of types %r", kinds[:MAX_LOGGED])
    return {"tools": [_function(tool) for tool in tools if not tool.is_hosted]}


def _function(tool: ToolParam) -> Fields:
    declared: Fields = {"name": tool.name, "description": tool.description}
    declared |= {"parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": declared}


def _choice(choice: ToolChoiceParam | None) -> Fields:
    if choice is None:
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": TOOL_CHOICES.get(choice.type, named)}


def _reasoning(body: CountTokensRequest, *, reasons: bool) -> Fields:
    """The template's fields of reasoning. `thinking` is ignored for a model without reasoning:
    clients send it to all models.
    """
    effort = body.output_config.effort
    fields: Fields = {"reasoning_effort": EFFORTS.get(effort, effort) if effort else None}
    template: Fields = {}
    match body.thinking:
        case ThinkingParam(type="enabled") if reasons:
            template["enable_thinking"] = True
        case ThinkingParam(type="disabled") if reasons:
            template["enable_thinking"] = False
    return fields | {"chat_template_kwargs": template | body.chat_template_kwargs}


def _budget(thinking: ThinkingParam | None) -> int | None:
    match thinking:
        case ThinkingParam(type="enabled", budget_tokens=budget):
            return budget
        case _:
            return None


def _sampling(body: MessagesRequest) -> SampledRequest:
    fields: Fields = body.model_dump(include=SAME, exclude_none=True)
    return SampledRequest(stop=body.stop_sequences, **fields)


def _structure(body: MessagesRequest) -> Structure | None:
    format = body.output_config.format or body.output_format
    return None if format is None else ("output_config.format", of_schema(format.schema_))
