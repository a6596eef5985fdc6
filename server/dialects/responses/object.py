"""The response object, in each state that it passes through."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from engine.values.request import Request
from server.dialects.base import wire_json
from server.dialects.responses.answer import (
    HasLogprobs,
    IncompleteDetails,
    InputTokensDetails,
    ItemEvent,
    OutputItem,
    OutputMessage,
    OutputTokensDetails,
    PartEvent,
    ResponseError,
    ResponseHead,
    ResponseState,
    ResponseStatus,
    ResponseUsage,
)
from server.dialects.responses.schema import ResponsesRequest
from server.dialects.responses.tools import RequestTools
from server.errors import ApiError
from server.generation.choice import AnswerUsage

BLANK = b'"logprobs":[]'
"""It contains quotes, so no text in JSON can equal it."""


def rendered_json(model: BaseModel) -> bytes:
    """As `wire_json`, with the rendered logprobs put in."""
    first, *rest = model.model_dump_json(exclude_unset=True).encode().split(BLANK)
    pieces = [first]
    for logprobs, piece in zip(_logprobs(model), rest, strict=True):
        pieces += (BLANK[:-1], logprobs, b"]", piece)
    return b"".join(pieces)


def _logprobs(model: BaseModel) -> Iterator[bytes]:
    """What replaces the blanks, in their order."""
    match model:
        case HasLogprobs():
            yield model.rendered_logprobs
        case PartEvent():
            yield from _logprobs(model.part)
        case ItemEvent():
            yield from _logprobs(model.item)
        case OutputMessage():
            for part in model.content:
                yield from _logprobs(part)
        case ResponseState():
            for item in model.output:
                yield from _logprobs(item)


PASSED_ON = frozenset({"context_length_exceeded", "rate_limit_exceeded"})
"""Error codes that clients act upon."""


class ResponseTemplate:
    """Response objects with one head. The head has the request's tools, and many events repeat it,
    so it is rendered once.
    """

    def __init__(self, head: ResponseHead) -> None:
        self.head = head
        self._json = wire_json(head)

    def json(self, state: ResponseState) -> bytes:
        return self._json[:-1] + b"," + rendered_json(state)[1:]


def response_head(
    body: ResponsesRequest, tools: RequestTools, model: str, request: Request, id: str
) -> ResponseHead:
    sampling = request.sampling
    return ResponseHead(
        id=id,
        object="response",
        created_at=int(time.time()),
        model=model,
        background=body.background,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata,
        frequency_penalty=sampling.frequency_penalty,
        max_tool_calls=body.max_tool_calls,
        parallel_tool_calls=body.parallel_tool_calls,
        presence_penalty=sampling.presence_penalty,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={
            "effort": body.reasoning.effort,
            "summary": body.reasoning.summary or body.reasoning.generate_summary,
        },
        safety_identifier=body.safety_identifier,
        service_tier="default",
        store=body.store,
        temperature=sampling.temperature,
        text=body.text.model_dump(by_alias=True, exclude_none=True, exclude_unset=True)
        | {"format": _format(body)},
        tool_choice=body.tool_choice
        if isinstance(body.tool_choice, str)
        else body.tool_choice.model_dump(exclude_none=True),
        tools=tools.declared,
        top_logprobs=body.top_logprobs,
        top_p=sampling.top_p,
        truncation="disabled",
        **_set(user=body.user),
    )


def response_state(
    status: ResponseStatus,
    output: Sequence[OutputItem] = (),
    *,
    usage: ResponseUsage | None = None,
    error: ApiError | None = None,
) -> ResponseState:
    is_cut_off = status == "incomplete"
    return ResponseState(
        status=status,
        completed_at=int(time.time()) if status == "completed" else None,
        error=None if error is None else response_error(error),
        incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut_off else None,
        output=list(output),
        usage=usage,
    )


def response_error(error: ApiError) -> ResponseError:
    """With one of the few codes that a response may have."""
    if error.code in PASSED_ON:
        code = str(error.code)
    else:
        code = "invalid_prompt" if error.status < 500 else "server_error"
    return ResponseError(code=code, message=str(error))


def response_usage(usage: AnswerUsage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=usage.cached_tokens, cache_write_tokens=0
        ),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def _set(**fields: Any) -> dict[str, Any]:
    """The fields that there are. The others are left out."""
    return {name: value for name, value in fields.items() if value is not None}


def _format(body: ResponsesRequest) -> dict[str, object]:
    return body.text.format.model_dump(by_alias=True, exclude_none=True, exclude_defaults=True) | {
        "type": body.text.format.type
    }
