"""`POST /v1/messages`, `/v1/messages/count_tokens`."""

from dataclasses import replace

from fastapi import Request
from starlette.responses import Response

from server.dialects.endpoint import GENERATION_ERRORS, MODEL_ERRORS, Endpoints, named_events
from server.dialects.job import COMMENTS, respond, when_loaded
from server.dialects.messages.answer import MESSAGE_EVENTS, MessageBody, TokenCount
from server.dialects.messages.read import as_chat, conversation
from server.dialects.messages.schema import CountTokensRequest, MessagesRequest
from server.dialects.messages.write import messages_job
from server.generation.requests import ServedModel, chat_tokens, prepare_chat
from server.service import RecordDependency, ServiceDependency

router = Endpoints()


@router.endpoint(
    "POST",
    "/v1/messages",
    answer=MessageBody,
    stream=named_events(MESSAGE_EVENTS),
    errors=GENERATION_ERRORS,
)
async def create_message(
    body: MessagesRequest, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    settings = service.settings
    service.check_priority(body.priority)

    async def begin(model: ServedModel) -> Response:
        strips = settings.strip_billing_header
        chat = await as_chat(body, model, record, strip_billing_header=strips)
        is_marked = settings.prefix_cache and record.cache_marks > 0
        request, plan = await prepare_chat(chat, model, record)
        if body.max_tokens == 0:  # the prompt alone is computed, and cached
            request = replace(request, max_tokens=0, constraint=None, thinking_budget=None)
        job = messages_job(body, model, request, plan, is_marked=is_marked)
        return await respond(job, http, service)

    keep_alive = COMMENTS if body.stream else None
    return await when_loaded(body.model, begin, http, service, keep_alive)


@router.endpoint("POST", "/v1/messages/count_tokens", errors=MODEL_ERRORS)
async def count_tokens(
    body: CountTokensRequest, service: ServiceDependency, record: RecordDependency
) -> TokenCount:
    """Those of the prompt that the same request to /v1/messages would have."""
    model, settings = await service.model(body.model, record), service.settings
    strip = settings.strip_billing_header
    prompt = await conversation(body, model, record, strip_billing_header=strip)
    return TokenCount(input_tokens=len(await chat_tokens(prompt, model, record)))
