"""`/v1/responses`: create, count, get, delete, cancel, and what a response is made from."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, TypeVar

from fastapi import Query
from pydantic_core import to_json
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import Response

from engine.api import InvalidRequest, NoGrammars
from engine.values.request import Request
from server.dialects.endpoint import GENERATION_ERRORS, MODEL_ERRORS, Endpoints, named_events
from server.dialects.job import COMMENTS, Job, Postponed, json_response, respond_with
from server.dialects.responses.background import BackgroundDependency
from server.dialects.responses.compacting import (
    CompactionForm,
    SummaryForm,
    as_before,
    compaction_item,
    is_trigger,
)
from server.dialects.responses.items import FunctionTool
from server.dialects.responses.output import (
    RESPONSE_EVENTS,
    CompactedResponse,
    DeletedResponse,
    InputItemList,
    InputTokens,
    ResponseBody,
    ResponseHead,
)
from server.dialects.responses.read import (
    ReadInput,
    as_chat,
    read_input,
    referenced_bytes,
)
from server.dialects.responses.schema import (
    CompactRequest,
    InputTokensRequest,
    ResponsesRequest,
)
from server.dialects.responses.store import (
    ResponseStore,
    StoredConversation,
    StoreDependency,
    StoredResponse,
)
from server.dialects.responses.tools import RequestTools, is_enforceable
from server.dialects.responses.wire_items import stored_items
from server.dialects.responses.write import ResponseForm
from server.dialects.summaries import SummaryDone, SummaryTurn, summary_sampling
from server.errors import UNSUPPORTED, ApiError, ContextTooLong, InvalidField, invalid
from server.fairness import LARGE_BYTES
from server.generation.compaction import summarized, threshold
from server.generation.conversation import Conversation
from server.generation.foreign_history import log_dropped, log_foreign
from server.generation.images import with_images
from server.generation.request_fields import PromptCacheOptions, SampledRequest
from server.generation.requests import ServedModel, prepare_chat
from server.http.stream import client_waiting
from server.record import RequestRecord
from server.service import ArrivedBody, Context, RecordDependency

InputT = TypeVar("InputT", bound=InputTokensRequest)
T = TypeVar("T")
IsStrict = Callable[[FunctionTool], bool]

log = logging.getLogger("rootstock.responses")


@dataclass(frozen=True, slots=True)
class _Referenced:
    bytes: int  # about how many of stored items a body refers to


@dataclass(frozen=True, slots=True)
class ResponseMaker:
    """Prepares one request."""

    model: ServedModel
    context: Context
    store: ResponseStore

    @property
    def record(self) -> RequestRecord:
        return self.context.record

    async def job(self, body: ArrivedBody[ResponsesRequest]) -> tuple[Job, ResponseForm]:
        """The job of a request and the writer of its response. A grammar for functions whose
        `strict` was left out is tried first; if it fails they are not strict. A conversation that
        is to be compacted is summarized first.

        Raises ApiError (400) for what the model cannot serve, for references to items that are not
        stored, and for too many bytes; and Postponed.
        """
        made = await self.in_worker(body, self.trial)
        is_strict: IsStrict = is_enforceable
        if isinstance(made, Request):
            try:
                await self.model.engine.check(made)
            except (InvalidRequest, NoGrammars) as error:
                if not _concerns_tools(error):
                    raise
                is_strict = _never
            made = await self.in_worker(body, lambda parsed: self.prepare(parsed, is_strict))
        if isinstance(made, SummaryTurn):
            if body.postpones:
                raise Postponed
            done = await made.run(self.context)
            made = await self.in_worker(body, lambda parsed: self.prepare(parsed, is_strict, done))
            assert not isinstance(made, SummaryTurn), "it is summarized once"
        return made

    async def in_worker(self, body: ArrivedBody[InputT], function: Callable[[InputT], T]) -> T:
        """Call a function with the parsed body in a worker: a second time, among large calls, where
        the body refers to many bytes of stored items.
        """

        def call(parsed: InputT) -> T | _Referenced:
            n_bytes = referenced_bytes(parsed, self.store, self.record.key)
            return function(parsed) if n_bytes <= LARGE_BYTES else _Referenced(n_bytes)

        made = await body.run(call)
        return await body.run(function, made.bytes) if isinstance(made, _Referenced) else made

    def trial(self, body: ResponsesRequest) -> Request | SummaryTurn | tuple[Job, ResponseForm]:
        """The engine's request if its grammar has to be tried, else what `prepare` returns."""
        given = self.read(body, is_enforceable)
        if not given.tools.has_default_strict or is_trigger(given.items):
            return self.prepare(body, is_enforceable)
        try:
            chat = as_chat(given.body, given.prompt, self.model)
            request, _ = prepare_chat(chat, self.model, self.record)
        except ApiError as error:
            if not _concerns_tools(error):
                raise
            return self.prepare(body, _never)
        return request

    def read(self, body: InputT, is_strict: IsStrict = is_enforceable) -> ReadInput[InputT]:
        """The prompt, the tools and the items of the body."""
        service, owner = self.context.service, self.record.key
        max_bytes = service.settings.max_body_bytes
        return read_input(body, self.model, self.store, owner, service.seals, max_bytes, is_strict)

    def prepare(
        self, body: ResponsesRequest, is_strict: IsStrict, done: SummaryDone | None = None
    ) -> tuple[Job, ResponseForm] | SummaryTurn:
        """The job and the form; or the turn that has to come first, unless it is `done`.
        `is_strict` decides for functions whose `strict` is left out.
        """
        model, record = self.model, self.record
        given = self.read(body, is_strict)
        body = given.body
        log_dropped(given.tools.hosted, record.id)
        log_foreign(given.foreign, record.id)
        if is_trigger(given.items):
            return self._summary(given)
        prompt = given.prompt
        if done is not None and done.summary is not None:
            prompt = summarized(prompt, done.summary.text)
        request, plan = prepare_chat(as_chat(body, prompt, model), model, record)
        if done is None and self._is_to_be_compacted(body, len(request.prompt)):
            with suppress(ContextTooLong):  # it has room for the answer, and none for a summary
                return self._turn(body, prompt)
        form = response_form(given, request, model, record, self.store)
        if done is not None and done.summary is not None:
            first = compaction_item(done.summary, self.context.service.seals, record)
            form = replace(form, first=[first], first_usage=done.usage)
        job = Job(
            model=model,
            requests=[request],
            plan=plan,
            render=form.whole,
            writer=form.writer if body.stream else None,
            tokenizer=form.tokenizer if body.wants_logprobs else None,
            form_bytes=form.kept_bytes,
        )
        return job, form

    def _is_to_be_compacted(self, body: ResponsesRequest, prompt_tokens: int) -> bool:
        if not body.context_management or body.is_prewarm:
            return False
        asked = body.context_management[0].compact_threshold
        return prompt_tokens >= threshold(asked, self.model.engine.card)

    def compact(self, body: CompactRequest) -> Job:
        """The job that compacts a conversation."""
        previous = self.store.get(self.record.key, body.previous_response_id or "")
        if previous is not None:
            body = as_before(body, previous.json)
        given = self.read(body)
        log_foreign(given.foreign, self.record.id)
        sampling = SampledRequest(
            cache_salt=body.cache_salt,
            priority=body.priority,
            prompt_cache_options=PromptCacheOptions(keep=body.prompt_cache_options.keep),
        )
        turn = SummaryTurn.of(given.prompt, self.model, self.record, sampling)
        return CompactionForm(turn, self.context).job()

    def _summary(self, given: ReadInput[ResponsesRequest]) -> tuple[Job, ResponseForm]:
        """The job of a response that is a summary, and its form."""
        body = given.body
        turn = self._turn(body, given.prompt)
        form = response_form(given, turn.request, self.model, self.record, self.store)
        return SummaryForm(form, turn, self.context).job(is_streamed=body.stream), form

    def _turn(self, body: ResponsesRequest, prompt: Conversation) -> SummaryTurn:
        """The turn in which the conversation of the body is summarized."""
        return SummaryTurn.of(prompt, self.model, self.record, summary_sampling(body))

    def count(self, body: InputTokensRequest) -> int:
        """The number of tokens of the prompt."""
        salt = self.record.cache_salt(body.cache_salt)
        shown = with_images(self.read(body).prompt, self.model.engine, self.record)
        return len(self.model.prompts.chat(shown, self.model.replays, salt).tokens)


def _never(tool: FunctionTool) -> bool:
    return False


def _concerns_tools(error: Exception) -> bool:
    return isinstance(error, NoGrammars) or getattr(error, "param", None) == "tools"


def response_form(
    given: ReadInput[ResponsesRequest],
    request: Request,
    model: ServedModel,
    record: RequestRecord,
    store: ResponseStore,
) -> ResponseForm:
    """The form that writes the response, and its input as it is stored."""
    id, body = f"resp_{record.id}", given.body
    new = [*stored_items(given.items, record)] if body.store else []
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


def _head(
    body: ResponsesRequest, tools: RequestTools, request: Request, model: str, id: str
) -> ResponseHead:
    """The fields of the response that never change. Sampling values that the body leaves out are
    those of the model.
    """
    choice, reasoning, sampling = body.tool_choice, body.reasoning, request.sampling
    head: ResponseHead = {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "background": body.background,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
        "store": body.store,
        "top_logprobs": body.top_logprobs,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "reasoning": {
            "effort": body.thinking_choice.effort,
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
    if body.user is not None:
        head["user"] = body.user
    return head


router = Endpoints(prefix="/v1/responses")


class ResponseId(StringConvertor):
    """The id of a response as part of a path: any text but the names of other routes."""

    regex = "(?!(?:input_tokens|compact)$)[^/]+"


register_url_convertor("response", ResponseId())


@router.endpoint(
    "POST",
    "",
    body=ResponsesRequest,
    answer=ResponseBody,
    stream=named_events(RESPONSE_EVENTS),
    errors=GENERATION_ERRORS,
)
async def create_response(
    context: Context, store: StoreDependency, background: BackgroundDependency
) -> Response:
    body = await context.arrived(ResponsesRequest)

    async def make(model: ServedModel) -> Job | bytes:
        job, form = await ResponseMaker(model, context, store).job(body)
        body.replace(job.kept_bytes)
        return background.start(job, form) if body.head.background else job

    return await respond_with(body, context, make, COMMENTS if body.head.stream else None)


@router.endpoint("POST", "/input_tokens", body=InputTokensRequest, errors=MODEL_ERRORS)
async def count_input_tokens(context: Context, store: StoreDependency) -> InputTokens:
    """The number of prompt tokens that the same request to /v1/responses would have."""
    body = await context.arrived(InputTokensRequest)
    async with client_waiting(context.http.receive):
        await body.find()
        model = await body.hold()
        maker = ResponseMaker(model, context, store)
        tokens = await maker.in_worker(body, maker.count)
    return InputTokens(object="response.input_tokens", input_tokens=tokens)


@router.endpoint(
    "POST",
    "/compact",
    body=CompactRequest,
    answer=CompactedResponse,
    errors=GENERATION_ERRORS,
)
async def compact(context: Context, store: StoreDependency) -> Response:
    """A summary that stands for a conversation, as an item for the next requests."""
    body = await context.arrived(CompactRequest)

    async def make(model: ServedModel) -> Job:
        maker = ResponseMaker(model, context, store)
        job = await maker.in_worker(body, maker.compact)
        body.replace(job.kept_bytes)
        return job

    return await respond_with(body, context, make)


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
