"""`POST /v1/chat/completions`."""

from functools import partial
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from server.dialects.chat import ChatChunks, chat_completion, no_logprobs
from server.dialects.delivery import EventStreamResponse
from server.dialects.logprobs import chat_logprobs
from server.generation.answer import ChatAnswer, WholeAnswer
from server.generation.engine_requests import chat_request
from server.generation.events import UsageMeter, generate_all
from server.generation.history import found_replays, template_arguments
from server.openapi import errors, json_body, stream_of
from server.routes.respond import rendered
from server.schemas.chat import ChatChunk, ChatCompletion, ChatRequest
from server.service import JsonBody, RecordDependency, ServiceDependency
from server.transport.unsent import unsent_of

router = APIRouter()

ChatBody = Annotated[ChatRequest, Depends(JsonBody(ChatRequest))]


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses=stream_of(ChatChunk) | errors(400, 404, 408, 413, 429, 503),
    openapi_extra=json_body(ChatRequest),
)
async def create_chat_completion(
    body: ChatBody, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    service.check_model(body.model)
    service.check_priority(body.priority)
    engine = service.engine
    replays = found_replays(service.replays, body)
    prompt = await service.prompts.chat(body.messages, template_arguments(body), replays)
    plan = await to_thread.run_sync(service.answers.plan, body, prompt)  # grammars may be long
    request = chat_request(body, prompt, plan, engine.card, record)
    envelope = service.envelope(f"chatcmpl-{record.id}")
    meter = UsageMeter(request.n)
    logprobs = partial(chat_logprobs, engine.tokenizer) if body.logprobs else no_logprobs

    def new_answer() -> ChatAnswer:
        return ChatAnswer(plan, meter, partial(service.replays.remember, body.cache_salt))

    if body.stream:
        chunks = ChatChunks(envelope, logprobs, new_answer, meter, body.include_usage)
        return EventStreamResponse(
            engine, [request], chunks, meter, service.settings.keepalive_seconds
        )
    choices = await generate_all(
        engine,
        [request],
        lambda: WholeAnswer(new_answer()),
        meter,
        http.receive,
        unsent_of(http.scope),
    )
    record.usage = meter.total
    return await rendered(lambda: chat_completion(envelope, choices, meter, logprobs))
