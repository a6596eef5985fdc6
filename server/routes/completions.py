"""`POST /v1/completions`."""

from collections.abc import Sequence
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from engine.types import ModelCard
from server.dialects.completions import CompletionChunks, CompletionTask, completion
from server.dialects.delivery import EventStreamResponse
from server.generation.engine_requests import (
    check_prompt,
    completion_requests,
    opening_token,
    sequences_per_prompt,
)
from server.generation.events import Generated, UsageMeter, generate_all
from server.openapi import errors, json_body, stream_of
from server.routes.respond import rendered
from server.schemas.completions import Completion, CompletionRequest, Prompt
from server.service import JsonBody, RecordDependency, Service, ServiceDependency
from server.transport.unsent import unsent_of

router = APIRouter()

CompletionBody = Annotated[CompletionRequest, Depends(JsonBody(CompletionRequest))]


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses=stream_of(Completion) | errors(400, 404, 408, 413, 429, 503),
    openapi_extra=json_body(CompletionRequest),
)
async def create_completion(
    body: CompletionBody, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    service.check_model(body.model)
    service.check_priority(body.priority)
    engine = service.engine
    task = await _task(body, service)
    requests = completion_requests(body, task.prompts, engine.card, record)
    envelope = service.envelope(f"cmpl-{record.id}")
    meter = UsageMeter(sequences_per_prompt(body))
    if body.stream:
        chunks = CompletionChunks(envelope, task, meter if body.include_usage else None)
        return EventStreamResponse(
            engine, requests, chunks, meter, service.settings.keepalive_seconds
        )
    generated = await generate_all(
        engine, requests, Generated, meter, http.receive, unsent_of(http.scope)
    )
    record.usage = meter.total
    return await rendered(lambda: completion(envelope, task, generated, meter))


async def _task(body: CompletionRequest, service: Service) -> CompletionTask:
    wanted = [await _opening(service)] if body.prompt is None else body.prompt
    prompts = [await service.prompts.text(prompt) for prompt in wanted]
    await to_thread.run_sync(_check, prompts, service.engine.card)
    echoes = [""] * len(prompts)
    if body.echo:
        echoes = [await service.prompts.echo(prompt) for prompt in wanted]
    return CompletionTask(body, prompts, echoes, service.engine.tokenizer)


async def _opening(service: Service) -> Prompt:
    """The default prompt: the beginning of a text, as the tokenizer marks it or else the model."""
    marked = list(await service.prompts.text(""))
    return marked or [opening_token(service.engine.card)]


def _check(prompts: Sequence[tuple[int, ...]], card: ModelCard) -> None:
    for prompt in prompts:
        check_prompt(prompt, card, "prompt")
