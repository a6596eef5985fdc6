"""A Responses body as a job for the engine, and the fields of the response that repeat the body."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic_core import to_json

from engine.api import InvalidRequest, NoGrammars
from engine.values.request import Request
from server.dialects.job import Job
from server.dialects.responses.read import (
    ReadInput,
    as_chat,
    read_input,
    referenced_bytes,
    stored_items,
)
from server.dialects.responses.schema import FunctionTool, InputTokensRequest, ResponsesRequest
from server.dialects.responses.store import ResponseStore, StoredConversation
from server.dialects.responses.tools import RequestTools, is_enforceable
from server.dialects.responses.write import ResponseForm
from server.errors import ApiError
from server.generation.conversation import Chat, Conversation
from server.generation.requests import ServedModel, chat_tokens, prepare_chat
from server.record import RequestRecord

ECHOED = (
    "background", "instructions", "max_output_tokens", "max_tool_calls", "metadata",
    "parallel_tool_calls", "previous_response_id", "prompt_cache_key", "safety_identifier", "store",
    "top_logprobs",
)  # fmt: skip
"""Fields of the body that the response repeats as they are."""

SAMPLING = ("frequency_penalty", "presence_penalty", "temperature", "top_p")
"""Fields that the response repeats with the model's own defaults."""

log = logging.getLogger("rootstock.responses")


async def responses_job(
    body: ResponsesRequest,
    model: ServedModel,
    record: RequestRecord,
    store: ResponseStore,
    max_bytes: int,
) -> tuple[Job, ResponseForm]:
    """The job, and how its response is written. `max_bytes` limits the stored items that the body
    may refer to.

    Raises ApiError (400) for what the model cannot serve, for references to what is not stored, and
    for too many bytes.
    """
    referenced = partial(referenced_bytes, body, store, record.key)
    record.n_bytes += await model.workers.prepare(record, referenced)
    roles = model.prompts.roles

    def read(is_strict: Callable[[FunctionTool], bool]) -> tuple[ReadInput, Chat]:
        tools = RequestTools(body.tools, is_strict)
        given = read_input(body, tools, roles, store, record.key, max_bytes)
        return given, as_chat(body, given.prompt)

    given, chat = await model.workers.prepare(record, partial(read, is_enforceable))
    if given.tools.hosted:
        log.info("request %s: no such tools here: %r", record.id, given.tools.hosted)
    try:
        request, plan = await prepare_chat(chat, model, record)
        if given.tools.has_default_strict:
            record.slot.release()  # others need not wait while a grammar is tried
            await model.engine.check(request)
    except (ApiError, InvalidRequest, NoGrammars) as error:
        concerns_tools = isinstance(error, NoGrammars) or error.param == "tools"
        if not concerns_tools or not given.tools.has_default_strict:
            raise
        given, chat = await model.workers.prepare(record, partial(read, lambda tool: False))
        request, plan = await prepare_chat(chat, model, record)

    make_form = partial(response_form, body, given, request, model, record, store)
    form = await model.workers.prepare(record, make_form)
    job = Job(
        model=model,
        requests=[request],
        plan=plan,
        render=form.whole,
        writer=form.writer if body.stream else None,
        tokenizer=form.tokenizer if body.wants_logprobs else None,
    )
    return job, form


def response_form(
    body: ResponsesRequest,
    given: ReadInput,
    request: Request,
    model: ServedModel,
    record: RequestRecord,
    store: ResponseStore,
) -> ResponseForm:
    """How the response is written, and its input as it is stored."""
    id = f"resp_{record.id}"
    new = [*stored_items(given.items, record.id)] if body.store else []
    return ResponseForm(
        id=id,
        head=to_json(_head(body, given.tools, request, model.name, id)),
        tools=given.tools.by_function,
        with_summary=body.reasoning.wants_summary,
        with_sealed_reasoning=body.wants_encrypted_reasoning,
        tokenizer=model.engine.tokenizer,
        record=record,
        context=StoredConversation(new, given.before),
        store=store if body.store else None,
        is_background=body.background,
    )


async def input_tokens(
    body: InputTokensRequest,
    model: ServedModel,
    record: RequestRecord,
    store: ResponseStore,
    max_bytes: int,
) -> int:
    """How many tokens the prompt of such a response would have. Raises what `responses_job` does
    for it.
    """
    named = partial(referenced_bytes, body, store, record.key)
    record.n_bytes += await model.workers.prepare(record, named)

    def read() -> Conversation:
        tools, roles = RequestTools(body.tools), model.prompts.roles
        return read_input(body, tools, roles, store, record.key, max_bytes).prompt

    prompt = await model.workers.prepare(record, read)
    return len(await chat_tokens(prompt, model, record))


def _head(
    body: ResponsesRequest, tools: RequestTools, request: Request, model: str, id: str
) -> dict[str, Any]:
    """The fields of the response that never change."""
    choice, reasoning = body.tool_choice, body.reasoning
    head = {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        **{name: getattr(body, name) for name in ECHOED},
        **{name: getattr(request.sampling, name) for name in SAMPLING},
        "reasoning": {
            "effort": reasoning.effort,
            "summary": reasoning.summary or reasoning.generate_summary,
        },
        "service_tier": "default",
        "text": body.text.model_dump(by_alias=True, exclude_none=True),
        "tool_choice": (
            choice if isinstance(choice, str) else choice.model_dump(exclude_none=True)
        ),
        "tools": tools.declared,
        "truncation": "disabled",
    }
    return head if body.user is None else {**head, "user": body.user}
