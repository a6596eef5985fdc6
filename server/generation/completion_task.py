"""A text completion as requests to the engine, one for each prompt."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from engine.values.model import Task
from engine.values.request import Request
from server.generation.completion_request import CompletionRequest, Prompt
from server.generation.engine_requests import (
    check_prompt,
    completion_requests,
    opening_token,
    with_bad_words,
)
from server.generation.models import ServedModel
from server.generation.tasks import check_task
from server.record import RequestRecord


async def prepare_completion(
    body: CompletionRequest, model: ServedModel, record: RequestRecord
) -> tuple[list[Request], list[str]]:
    """The engine's requests, one for each prompt, and each prompt as text where `echo` asks for it.

    Raises ApiError (400) for what the model cannot serve.
    """
    check_task(model, Task.GENERATE)
    wanted: list[Prompt] = [
        await _opening(model, record) if prompt == "" else prompt for prompt in body.prompt or [""]
    ]
    prompts = [await model.prompts.text(record, prompt) for prompt in wanted]
    requests = await model.workers.prepare(record, partial(_requests, body, prompts, model, record))
    echoes = [""] * len(prompts)
    if body.echo:
        echoes = [await model.prompts.echo(record, prompt) for prompt in wanted]
    return requests, echoes


async def _opening(model: ServedModel, record: RequestRecord) -> Prompt:
    """The prompt that an empty or absent text stands for: the tokenizer's special tokens, or else
    the model's opening token.
    """
    marked = list(await model.prompts.text(record, ""))
    return marked or [opening_token(model.engine.card)]


def _requests(
    body: CompletionRequest,
    prompts: Sequence[tuple[int, ...]],
    model: ServedModel,
    record: RequestRecord,
) -> list[Request]:
    card = model.engine.card
    for prompt in prompts:
        check_prompt(prompt, card, "prompt")
    constraint = model.planner.text_constraint(body.structure)
    requests = completion_requests(body, prompts, constraint, card, record)
    words = model.prompts.bad_words(body.bad_words)
    return [
        replace(with_bad_words(request, words, card), adapter=model.adapter) for request in requests
    ]
