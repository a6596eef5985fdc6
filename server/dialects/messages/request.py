"""A Messages request as a ChatRequest."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from server.dialects.messages.conversation import block_texts, chat_messages
from server.errors import invalid_field
from server.generation.models import ServedModel
from server.record import RequestRecord
from server.schemas.chat import ChatRequest
from server.schemas.messages.request import CountTokensRequest, ThinkingParam
from server.schemas.messages.tools import ToolChoiceParam, ToolParam

BILLING_LINE = "x-anthropic-billing-header:"
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
EFFORTS = {"xhigh": "high", "max": "high"}
"""Anthropic's efforts that templates do not know, as the highest that they do."""

SAME = {"model", "max_tokens", "stream", "temperature", "top_p", "top_k"}
SAME |= {"cache_salt", "seed", "priority"}
"""Fields with the same name in a ChatRequest."""

MAX_LOGGED = 8  # types of tools, which are client input

log = logging.getLogger("rootstock.messages")

Fields = dict[str, Any]


async def as_chat(
    body: CountTokensRequest,
    model: ServedModel,
    record: RequestRecord,
    *,
    strip_billing_header: bool,
) -> ChatRequest:
    """The request, or as much of it as makes the prompt. Raises ApiError (400)."""

    def read() -> ChatRequest:
        system = _system(body.system, strip_billing_header=strip_billing_header)
        messages = chat_messages(system, body.messages, model.prompts.roles)
        try:
            return ChatRequest(
                messages=messages,
                continue_final_message=messages[-1].role == "assistant",
                **_tools(body.tools),
                **_choice(body.tool_choice),
                **_thinking(body, reasons=model.planner.reasons),
                **_generation(body),
            )
        except ValidationError as error:
            raise invalid_field(error) from None

    return await model.workers.prepare(record, read)


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
    return {
        "tool_choice": TOOL_CHOICES.get(choice.type, named),
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }


def _thinking(body: CountTokensRequest, *, reasons: bool) -> Fields:
    """The fields of reasoning. `thinking` is ignored for a model without reasoning: clients send it
    to all models.
    """
    effort = body.output_config.effort
    fields: Fields = {"reasoning_effort": EFFORTS.get(effort, effort) if effort else None}
    template: Fields = {}
    match body.thinking:
        case ThinkingParam(type="enabled", budget_tokens=budget) if reasons:
            fields["thinking_budget"] = budget
            template["enable_thinking"] = True
        case ThinkingParam(type="disabled") if reasons:
            template["enable_thinking"] = False
    return fields | {"chat_template_kwargs": template | body.chat_template_kwargs}


def _generation(body: CountTokensRequest) -> Fields:
    fields: Fields = body.model_dump(include=SAME | {"stop_sequences"}, exclude_none=True)
    fields["stop"] = fields.pop("stop_sequences", [])
    fields["max_tokens"] = fields.get("max_tokens") or None  # with 0 the answer is left out
    if format := body.output_config.format or body.output_format:
        schema = {"name": "answer", "schema": format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields
