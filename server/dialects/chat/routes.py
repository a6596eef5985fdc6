"""`POST /v1/chat/completions`, and its `/render`."""

from functools import partial

from fastapi import Request
from starlette.responses import Response

from server.dialects.chat.schema import ChatChunk, ChatCompletion, ChatRequest
from server.dialects.chat.write import chat_job
from server.dialects.endpoint import GENERATION_ERRORS, MODEL_ERRORS, Endpoints, chunks
from server.dialects.job import (
    COMMENTS,
    respond,
    respond_without_engine,
    when_loaded,
)
from server.dialects.openai import RenderedRequest, check_requests, rendered_request
from server.generation.conversation import Chat
from server.generation.requests import ServedModel, prepare_chat
from server.generation.stream import TOKEN_BYTES
from server.service import RecordDependency, ServiceDependency

router = Endpoints()
render_router = Endpoints()


def as_chat(body: ChatRequest) -> Chat:
    """The older of two names counts where the newer is silent."""
    return Chat(
        conversation=body.conversation,
        sampling=body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        n=body.n,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structure=body.structure,
        parallel_calls=body.parallel_tool_calls and not body.functions,  # room for one call
        thinking_budget=body.thinking_budget,
        prediction=body.prediction.text if body.prediction else "",
        tools_field="functions" if body.functions else "tools",
    )


@router.endpoint(
    "POST",
    "/v1/chat/completions",
    answer=ChatCompletion,
    stream=chunks(ChatChunk),
    errors=GENERATION_ERRORS,
)
async def create_chat_completion(
    body: ChatRequest, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    service.check_priority(body.priority)

    async def begin(model: ServedModel) -> Response:
        chat = await model.workers.prepare(record, partial(as_chat, body))
        request, plan = await prepare_chat(chat, model, record)
        return await respond(chat_job(body, model, request, plan), http, service)

    keep_alive = COMMENTS if body.stream else None
    return await when_loaded(body.model, begin, http, service, keep_alive)


@render_router.endpoint(
    "POST", "/v1/chat/completions/render", answer=RenderedRequest, errors=MODEL_ERRORS
)
async def render_chat_completion(
    body: ChatRequest, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    """What is refused in a chat is refused here; nothing is generated."""
    model = await service.model(body.model, record)
    service.check_priority(body.priority)
    chat = await model.workers.prepare(record, partial(as_chat, body))
    request, _ = await prepare_chat(chat, model, record)
    await check_requests([request], model, record)
    return await respond_without_engine(
        lambda: rendered_request(request, body, model.name),
        TOKEN_BYTES * len(request.prompt),
        http,
        service,
    )
