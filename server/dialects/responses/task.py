"""A Responses body as a request to the engine, and its answer as a response, whole or streamed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from engine.api import InvalidRequest, NoGrammars
from engine.values.output import FinishReason, OutputEvent
from engine.values.request import Request
from server.dialects.base import Job
from server.dialects.openai import wire_finish_reason
from server.dialects.responses.answer import (
    OutputItem,
    OutputItemEvent,
    ResponseState,
    ResponseStatus,
)
from server.dialects.responses.object import (
    ResponseTemplate,
    rendered_json,
    response_head,
    response_state,
    response_usage,
)
from server.dialects.responses.read import (
    ResolvedInput,
    as_chat,
    conversation,
    referenced_bytes,
    resolved_input,
    stored_items,
)
from server.dialects.responses.schema import InputTokensRequest, ResponsesRequest
from server.dialects.responses.store import (
    ResponseStore,
    StoredConversation,
    StoredItem,
    StoredResponse,
)
from server.dialects.responses.tools import RequestTools, log_dropped, without_default_strict
from server.dialects.responses.write import Output, OutputShape, output_items
from server.errors import ApiError
from server.generation.choice import AnswerUsage, Choice, Step
from server.generation.conversation import Chat, Conversation
from server.generation.models import ServedModel
from server.generation.plan import AnswerPlan
from server.generation.requests import chat_tokens, prepare_chat
from server.record import RequestRecord
from server.transport.sse import EVENT_STREAM, sse_event
from server.transport.unsent import kept_bytes


@dataclass(frozen=True, slots=True)
class ResponsesTask:
    """A request as the engine's, with the form of its output and the store that it goes to."""

    body: ResponsesRequest
    model: ServedModel
    request: Request
    plan: AnswerPlan
    template: ResponseTemplate
    shape: OutputShape
    context: StoredConversation  # the input, with all that it continues
    record: RequestRecord
    store: ResponseStore

    @property
    def id(self) -> str:
        return self.template.head.id

    @property
    def owner(self) -> str:
        """The name of the API key that alone may retrieve it."""
        return self.record.key

    def store_response(self, state: ResponseState) -> bytes:
        """The response as JSON. It is stored unless the request has `store: false`."""
        json = self.template.json(state)
        if self.body.store:
            whole = StoredConversation([*map(_stored, state.output)], self.context)
            stored = StoredResponse(json, self.context, whole, self.body.background)
            self.store.put(self.record.client, self.owner, self.id, stored)
        return json


async def responses_task(
    body: ResponsesRequest,
    model: ServedModel,
    record: RequestRecord,
    store: ResponseStore,
    max_bytes: int,
) -> ResponsesTask:
    """`max_bytes` limits the stored items that the body may refer to.

    Raises ApiError (400) for what the model cannot serve, for references to what is not stored, and
    for too many bytes.
    """
    log_dropped(body.tools, record.id)
    record.n_bytes += referenced_bytes(body, store, record.key)
    run = partial(model.workers.prepare, record)

    async def planned(body: ResponsesRequest) -> tuple[_Prepared, Request, AnswerPlan]:
        prepared = await run(partial(_prepare, body, model, record, store, max_bytes))
        return prepared, *await prepare_chat(prepared.chat, model, record)

    loosened = body.model_copy(update={"tools": without_default_strict(body.tools)})
    try:
        prepared, request, plan = await planned(body)
        if loosened.tools != body.tools:
            record.slot.release()  # others need not wait while a grammar is tried
            await model.engine.check(request)
    except (ApiError, InvalidRequest, NoGrammars) as error:
        concerns_tools = isinstance(error, NoGrammars) or error.param == "tools"
        if not concerns_tools or loosened.tools == body.tools:
            raise
        body = loosened
        prepared, request, plan = await planned(body)
    head = response_head(body, prepared.tools, model.name, request, f"resp_{record.id}")
    return ResponsesTask(
        body=body,
        model=model,
        request=request,
        plan=plan,
        template=await run(partial(ResponseTemplate, head)),
        shape=OutputShape(
            prepared.tools, body.reasoning.asks_for_summary, body.wants_encrypted_reasoning
        ),
        context=prepared.context,
        record=record,
        store=store,
    )


async def input_tokens(
    body: InputTokensRequest,
    model: ServedModel,
    record: RequestRecord,
    store: ResponseStore,
    max_bytes: int,
) -> int:
    """How many tokens the prompt of such a response would have. Raises what `responses_task` does
    for it.
    """
    record.n_bytes += referenced_bytes(body, store, record.key)

    def prepare() -> Conversation:
        return _read(body, model, record, store, max_bytes).prompt

    chat = await model.workers.prepare(record, prepare)
    return len(await chat_tokens(chat, model, record))


@dataclass(frozen=True, slots=True)
class _Read:
    """A prompt's references resolved, and what it is made of."""

    resolved: ResolvedInput
    tools: RequestTools
    prompt: Conversation


@dataclass(frozen=True, slots=True)
class _Prepared:
    chat: Chat
    tools: RequestTools
    context: StoredConversation


def _prepare(
    body: ResponsesRequest,
    model: ServedModel,
    record: RequestRecord,
    store: ResponseStore,
    max_bytes: int,
) -> _Prepared:
    read = _read(body, model, record, store, max_bytes)
    resolved = read.resolved
    new = [*stored_items(resolved.items, record.id)] if body.store else []
    context = StoredConversation(new, resolved.before)
    return _Prepared(as_chat(body, read.prompt), read.tools, context)


def _read(
    body: InputTokensRequest,
    model: ServedModel,
    record: RequestRecord,
    store: ResponseStore,
    max_bytes: int,
) -> _Read:
    resolved = resolved_input(body, store, record.key, max_bytes)
    tools = RequestTools(body.tools)
    items = [*resolved.earlier, *resolved.items]
    return _Read(resolved, tools, conversation(body, items, tools, model.prompts.roles))


def _stored(item: OutputItem) -> StoredItem:
    return StoredItem(item.id, rendered_json(item))


def responses_job(task: ResponsesTask) -> Job:
    """The job of one response, which has one sequence."""
    has_logprobs = task.request.sampling.top_logprobs is not None
    return Job(
        model=task.model,
        requests=[task.request],
        plan=task.plan,
        tokenizer=task.model.engine.tokenizer if has_logprobs else None,
        render=partial(store_whole, task),
        writer=partial(ResponsesWriter, task) if task.body.stream else None,
    )


def store_whole(task: ResponsesTask, choices: Sequence[Choice], usage: AnswerUsage) -> bytes:
    """The response at the end of its answer, as JSON. It is stored."""
    (choice,) = choices
    items = output_items(choice, task.shape, task.record.id, task.model.engine.tokenizer)
    return task.store_response(_final_state(choice, items, usage))


def _final_state(choice: Choice, items: Sequence[OutputItem], usage: AnswerUsage) -> ResponseState:
    wire_finish_reason(choice.finish_reason)  # raises if there is none
    is_cut_off = choice.finish_reason is FinishReason.LENGTH
    status: ResponseStatus = "incomplete" if is_cut_off else "completed"
    return response_state(status, items, usage=response_usage(usage))


class ResponsesWriter:
    """A StreamWriter of typed events.

    Codex times out between events and ignores comments, so a keep-alive repeats the event
    `response.in_progress`.
    """

    media_type = EVENT_STREAM

    def __init__(self, task: ResponsesTask, choices: Sequence[Choice]) -> None:
        (self._choice,) = choices
        self._task = task
        self._numbers = count()
        self._output = Output(
            task.shape,
            task.record.id,
            lambda: next(self._numbers),
            task.model.engine.tokenizer,
        )
        self._has_begun = False

    def write(self, choice: int, steps: Sequence[Step]) -> bytes:
        opening = self._opening()
        is_cut_off = self._choice.finish_reason is FinishReason.LENGTH
        last = self._choice.blocks[-1] if is_cut_off and steps else None
        events = [
            _event(event)
            for step in steps
            for event in self._output.add(step, is_cut_off=step.block is last)
        ]
        return opening + b"".join(events)

    def kept_bytes(self, events: Sequence[OutputEvent]) -> int:
        """The last events repeat the whole answer."""
        return sum(map(kept_bytes, events))

    def keep_alive(self) -> bytes:
        return self._opening() or self._status("response.in_progress", self._in_progress())

    def failure(self, error: ApiError) -> bytes:
        state = response_state("failed", self._output.items, error=error)
        response = self._task.store_response(state)
        return self._opening() + self._status("response.failed", response)

    def end(self, usage: AnswerUsage) -> bytes:
        state = _final_state(self._choice, self._output.items, usage)
        return self._status(f"response.{state.status}", self._task.store_response(state))

    def _opening(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        begun = self._in_progress()
        return self._status("response.created", begun) + self._status("response.in_progress", begun)

    def _in_progress(self) -> bytes:
        return self._task.template.json(response_state("in_progress"))

    def _status(self, type: str, response: bytes) -> bytes:
        number = next(self._numbers)
        head = f'{{"type":"{type}","sequence_number":{number},"response":'
        return sse_event(type, head.encode() + response + b"}")


def _event(event: OutputItemEvent) -> bytes:
    return sse_event(event.type, rendered_json(event))
