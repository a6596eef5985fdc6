"""`/v1/responses`: create, count, get, delete, cancel, and what a response is made from."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic_core import to_json
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import Response

from engine.api import InvalidRequest, NoGrammars
from engine.values.request import Request
from server.dialects.endpoint import MODEL_ERRORS, Endpoints, named_events
from server.dialects.job import COMMENTS, Job, json_response, when_loaded
from server.dialects.responses.answer import (
    RESPONSE_EVENTS,
    DeletedResponse,
    InputItemList,
    InputTokens,
    ResponseBody,
)
from server.dialects.responses.background import BackgroundDependency
from server.dialects.responses.read import (
    ReadInput,
    as_chat,
    read_input,
    referenced_bytes,
    stored_items,
)
from server.dialects.responses.schema import FunctionTool, InputTokensRequest, ResponsesRequest
from server.dialects.responses.store import (
    ResponseStore,
    StoredConversation,
    StoreDependency,
    StoredResponse,
)
from server.dialects.responses.tools import RequestTools, is_enforceable
from server.dialects.responses.write import ResponseForm
from server.errors import UNSUPPORTED, ApiError, InvalidField, invalid
from server.generation.conversation import Chat
from server.generation.requests import ServedModel, prepare_chat
from server.record import RequestRecord
from server.service import Context, RecordDependency

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
    """The job of a request and the writer of its response. `max_bytes` limits the stored items that
    the body may refer to.

    Raises ApiError (400) for what the model cannot serve, for references to items that are not
    stored, and for too many bytes.
    """
    referenced = partial(referenced_bytes, body, store, record.key)
    record.n_bytes += await model.workers.prepare(record, referenced)

    def read(is_strict: Callable[[FunctionTool], bool]) -> tuple[ReadInput, Chat]:
        given = read_input(body, model, store, record.key, max_bytes, is_strict)
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
    """The form that writes the response, and its input as it is stored."""
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
    """The number of tokens of the prompt of such a response. Raises what `responses_job` does for
    it.
    """
    named = partial(referenced_bytes, body, store, record.key)
    record.n_bytes += await model.workers.prepare(record, named)
    read = partial(read_input, body, model, store, record.key, max_bytes)
    prompt = (await model.workers.prepare(record, read)).prompt
    return len(await model.prompts.chat(record, prompt, model.replays))


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


router = Endpoints(prefix="/v1/responses")


class ResponseId(StringConvertor):
    """The id of a response as part of a path: any text but the names of other routes."""

    regex = "(?!(?:input_tokens|compact)$)[^/]+"


register_url_convertor("response", ResponseId())


NO_COMPACTING = (
    "compact: OpenAI's servers shorten a conversation here, into items that they alone can read. "
    "In its place ask for a summary with POST /v1/responses, and begin the next conversation with "
    "that; or let the client compact, as Codex does for other servers."
)


@router.generation("", answer=ResponseBody, stream=named_events(RESPONSE_EVENTS))
async def create_response(
    body: ResponsesRequest,
    context: Context,
    store: StoreDependency,
    background: BackgroundDependency,
) -> Response:
    max_bytes = context.service.settings.max_body_bytes

    async def make(model: ServedModel) -> Job | bytes:
        job, form = await responses_job(body, model, context.record, store, max_bytes)
        return background.start(job, form) if body.background else job

    keep_alive = COMMENTS if body.stream else None
    return await when_loaded(body.model, make, context, keep_alive)


@router.endpoint("POST", "/input_tokens", errors=MODEL_ERRORS)
async def count_input_tokens(
    body: InputTokensRequest, context: Context, store: StoreDependency
) -> InputTokens:
    """The number of prompt tokens that the same request to /v1/responses would have."""
    max_bytes = context.service.settings.max_body_bytes
    model = await context.model(body.model)
    tokens = await input_tokens(body, model, context.record, store, max_bytes)
    return InputTokens(object="response.input_tokens", input_tokens=tokens)


@router.post("/compact", include_in_schema=False)
async def compact() -> None:
    """Refused, in words that say what to do."""
    raise invalid(NO_COMPACTING, None, UNSUPPORTED)


@router.endpoint("GET", "/{id:response}", answer=ResponseBody, errors=(400, 404))
async def get_response(
    id: str,
    record: RecordDependency,
    store: StoreDependency,
    background: BackgroundDependency,
    stream: Annotated[bool, Query(include_in_schema=False)] = False,
) -> Response:
    if stream:
        message = "a response is streamed where it is made, and not again"
        raise InvalidField("stream", message, UNSUPPORTED)
    if running := background.find(record.key, id):
        return json_response(running.json("in_progress"))
    return json_response(_stored(store, record.key, id).json)


@router.endpoint("DELETE", "/{id:response}", errors=(404,))
async def delete_response(
    id: str, record: RecordDependency, store: StoreDependency, background: BackgroundDependency
) -> DeletedResponse:
    """Deletes a response. An unfinished one is cancelled."""
    await background.cancel(record.key, id)
    if not store.delete(record.key, id):
        raise _not_found(id)
    return DeletedResponse(id=id, object="response", deleted=True)


@router.endpoint("POST", "/{id:response}/cancel", answer=ResponseBody, errors=(400, 404))
async def cancel_response(
    id: str, record: RecordDependency, store: StoreDependency, background: BackgroundDependency
) -> Response:
    """Cancels a background response. A finished one is unchanged."""
    await background.cancel(record.key, id)
    stored = _stored(store, record.key, id)
    if not stored.is_background:
        raise invalid("Only responses made with background can be cancelled.", "response_id")
    return json_response(stored.json)


@router.endpoint("GET", "/{id:response}/input_items", answer=InputItemList, errors=(400, 404))
async def list_input_items(
    id: str,
    context: Context,
    store: StoreDependency,
    background: BackgroundDependency,
    after: Annotated[str, Query(max_length=256)] = "",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
) -> Response:
    """The items of the prompt except instructions, including those of earlier responses that this
    one continues.
    """
    service, record = context.service, context.record
    running = background.find(record.key, id)
    given = running.context if running else _stored(store, record.key, id).input
    page = partial(_page, given, order, after, limit)
    return json_response(await service.workers.run(record.client, given.total_bytes, page))


def _page(given: StoredConversation, order: str, after: str, limit: int) -> bytes:
    """The JSON of an InputItemList. Raises ApiError (400) for an `after` that is no item's id."""
    items = list(given) if order == "asc" else list(given)[::-1]
    first = 0
    if after:
        ids = [item.id for item in items]
        if after not in ids:
            raise InvalidField("after", "there is no such item")
        first = ids.index(after) + 1
    page = items[first : first + limit]
    ends = [page[0].id, page[-1].id] if page else [None, None]
    rest = {"first_id": ends[0], "last_id": ends[1], "has_more": first + limit < len(items)}
    data = b",".join(item.json for item in page)
    return b'{"object":"list","data":[%b],%b' % (data, to_json(rest)[1:])


def _stored(store: ResponseStore, owner: str, id: str) -> StoredResponse:
    """Raises ApiError (404)."""
    stored = store.get(owner, id)
    if stored is None:
        raise _not_found(id)
    return stored


def _not_found(id: str) -> ApiError:
    message = f"Response with id '{id[:64]}' not found."
    return ApiError(404, message, param="response_id", code="response_not_found")
