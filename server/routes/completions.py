"""`POST /v1/completions`."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.generation import UsageMeter, generate_all
from server.render_completions import CompletionChunks, CompletionTask, completion
from server.routes.respond import rendered
from server.schemas.completions import Completion, CompletionRequest
from server.service import RecordDependency, Service, ServiceDependency
from server.sse import EventStreamResponse
from server.translate import check_prompt, completion_requests, sequences_per_prompt

router = APIRouter()


@router.post("/v1/completions", response_model=Completion)
async def create_completion(
    body: CompletionRequest, http: Request, service: ServiceDependency, record: RecordDependency
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
    generated = await generate_all(engine, requests, meter, http.receive)
    record.usage = meter.total
    return await rendered(lambda: completion(envelope, task, generated, meter.total))


async def _task(body: CompletionRequest, service: Service) -> CompletionTask:
    prompts = [await service.prompts.text(prompt) for prompt in body.prompt]
    for prompt in prompts:
        check_prompt(prompt, service.engine.card, "prompt")
    echoes = [""] * len(prompts)
    if body.echo:
        echoes = [await service.prompts.echo(prompt) for prompt in body.prompt]
    return CompletionTask(body, prompts, echoes, service.engine.tokenizer)
