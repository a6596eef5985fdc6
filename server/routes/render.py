"""`POST /v1/chat/completions/render`, `/v1/completions/render`: what the engine would be asked."""

from collections.abc import Sequence

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from engine.values.request import Request
from server.dialects.chat_request import as_chat
from server.generation.chat_task import chat_task
from server.generation.completion_task import completion_task
from server.generation.models import ServedModel
from server.openapi import errors, json_body
from server.record import RequestRecord
from server.routes.chat import ChatBody
from server.routes.completions import CompletionBody
from server.routes.delivery import respond_without_engine
from server.schemas.chat import ChatRequest
from server.schemas.common import GenerationRequest
from server.schemas.completions import CompletionRequest
from server.schemas.render import RenderedRequest, RenderedRequests, RenderedSampling
from server.service import RecordDependency, ServiceDependency
from server.transport.unsent import TOKEN_BYTES

router = APIRouter()


@router.post(
    "/v1/chat/completions/render",
    response_model=RenderedRequest,
    responses=errors(400, 403, 404, 408, 413, 503),
    openapi_extra=json_body(ChatRequest),
)
async def render_chat_completion(
    body: ChatBody, http: HttpRequest, service: ServiceDependency, record: RecordDependency
) -> Response:
    """What is refused in a chat is refused here; nothing is generated."""
    model = await service.model(body.model, record)
    service.check_priority(body.priority)
    task = await chat_task(as_chat(body), model, record)
    await _check([task.request], model, record)
    return await respond_without_engine(
        lambda: _rendered(task.request, body, model.name),
        TOKEN_BYTES * len(task.request.prompt),
        http,
        service,
    )


@router.post(
    "/v1/completions/render",
    response_model=RenderedRequests,
    responses=errors(400, 403, 404, 408, 413, 503),
    openapi_extra=json_body(CompletionRequest),
)
async def render_completion(
    body: CompletionBody, http: HttpRequest, service: ServiceDependency, record: RecordDependency
) -> Response:
    """One entry for each prompt."""
    model = await service.model(body.model, record)
    service.check_priority(body.priority)
    task = await completion_task(body, model, record)
    await _check(task.requests, model, record)
    return await respond_without_engine(
        lambda: RenderedRequests([_rendered(each, body, model.name) for each in task.requests]),
        TOKEN_BYTES * sum(map(len, task.prompts)),
        http,
        service,
    )


async def _check(requests: Sequence[Request], model: ServedModel, record: RequestRecord) -> None:
    """Raises what the engine would. A grammar may wait for its trial: no other request does."""
    record.slot.release()
    for request in requests:
        await model.engine.check(request)


def _rendered(request: Request, body: GenerationRequest, model: str) -> RenderedRequest:
    sampling = request.sampling
    return RenderedRequest(
        request_id=request.id,
        model=model,
        token_ids=list(request.prompt),
        sampling_params=RenderedSampling(
            n=request.n,
            max_tokens=request.max_tokens,
            min_tokens=sampling.min_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias={str(token): bias for token, bias in sampling.logit_bias.items()},
            seed=sampling.seed,
            stop=list(request.stop),
            stop_token_ids=sorted(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            logprobs=sampling.top_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            skip_special_tokens=request.skip_special_tokens,
        ),
        stream=body.stream,
        cache_salt=body.cache_salt or None,
        priority=request.priority,
    )
