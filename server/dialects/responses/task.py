"""A Responses body as a request to the engine, and its answer as a response, whole or streamed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from engine.api import InvalidRequest, NoGrammars
from engine.values.output import FinishReason, OutputEvent
from server.dialects.base import generated
from server.dialects.openai import wire_finish_reason
from server.dialects.responses.answer import OutputItem, OutputItemEvent, ResponseState
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
from server.dialects.responses.write import Output, OutputShape, ResponseAnswer
from server.errors import ApiError
from server.generation.chat import Chat
from server.generation.chat_task import ChatTask, chat_task, chat_tokens
from server.generation.conversation import Conversation
from server.generation.models import ServedModel
from server.http.sse import EVENT_STREAM, sse_event
from server.http.unsent import kept_bytes
from server.record import RequestRecord


@dataclass(frozen=True, slots=True)
class ResponsesTask:
    """A request as a chat task, with the form of its output and the store that it goes to."""

    body: ResponsesRequest
    chat: ChatTask
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
    run = partial(model.workers.prepare, record)
    record.n_bytes += await run(partial(referenced_bytes, body, store, record.key))
    await run(partial(log_dropped, body.tools, record.id))

    async def planned(body: ResponsesRequest) -> tuple[_Prepared, ChatTask]:
        prepared = await run(partial(_prepare, body, model, record, store, max_bytes))
        return prepared, await chat_task(prepared.chat, model, record)

    loose_tools = await run(partial(without_default_strict, body.tools))
    try:
        prepared, chat = await planned(body)
        if loose_tools is not None:
            record.slot.release()  # others need not wait while a grammar is tried
            await model.engine.check(chat.request)
    except (ApiError, InvalidRequest, NoGrammars) as error:
        concerns_tools = isinstance(error, NoGrammars) or error.param == "tools"
        if not concerns_tools or loose_tools is None:
            raise
        body = body.model_copy(update={"tools": loose_tools})
        prepared, chat = await planned(body)

    def template() -> ResponseTemplate:
        return ResponseTemplate(response_head(body, prepared.tools, chat, f"resp_{record.id}"))

    return ResponsesTask(
        body=body,
        chat=chat,
        template=await run(template),
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
    named = partial(referenced_bytes, body, store, record.key)
    record.n_bytes += await model.workers.prepare(record, named)

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


class ResponsesBuilder:
    """A StreamingBuilder of one response, which has one sequence."""

    def __init__(self, task: ResponsesTask) -> None:
        self.task = task
        self.engine = task.chat.model.engine
        self.requests = [task.chat.request]
        self.meter = task.chat.meter
        self.is_streamed = task.body.stream
        self.numbers = count()

    def writer(self) -> "ResponsesWriter":
        return ResponsesWriter(self)

    def new_choice(self) -> ResponseAnswer:
        output = Output(self.task.shape, self.task.record.id, lambda: next(self.numbers))
        return ResponseAnswer(self.task.chat.new_answer(), output, self.engine.tokenizer)

    def whole(self, choices: Sequence[ResponseAnswer]) -> bytes:
        """The response, which is stored."""
        (answer,) = choices
        return self.task.store_response(self.state(answer))

    def state(self, answer: ResponseAnswer) -> ResponseState:
        """The response's state at the end of an answer."""
        wire_finish_reason(answer.finish_reason)  # raises if there is none
        is_cut_off = answer.finish_reason is FinishReason.LENGTH
        return response_state(
            "incomplete" if is_cut_off else "completed",
            answer.output.items,
            usage=response_usage(self.meter),
        )


class ResponsesWriter:
    """A StreamWriter of typed events.

    Codex times out between events and ignores comments, so a keep-alive repeats the event
    `response.in_progress`.
    """

    media_type = EVENT_STREAM

    def __init__(self, builder: ResponsesBuilder) -> None:
        self._builder = builder
        self._template = builder.task.template
        self._answer = builder.new_choice()
        self._has_begun = False

    def events(self, choice: int, events: Sequence[OutputEvent]) -> bytes:
        output = generated(events)
        if not output:
            return b""  # until there is a token, an error has a status of its own
        return self._opening() + b"".join(map(_event, self._answer.events(output)))

    def kept_bytes(self, events: Sequence[OutputEvent]) -> int:
        """The last events repeat the whole answer."""
        return sum(map(kept_bytes, events))

    def keep_alive(self) -> bytes:
        return self._opening() or self._status("response.in_progress", self._in_progress())

    def failure(self, error: ApiError) -> bytes:
        state = response_state("failed", self._answer.output.items, error=error)
        response = self._builder.task.store_response(state)
        return self._opening() + self._status("response.failed", response)

    def end(self) -> bytes:
        state = self._builder.state(self._answer)
        return self._status(f"response.{state.status}", self._builder.task.store_response(state))

    def _opening(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        begun = self._in_progress()
        return self._status("response.created", begun) + self._status("response.in_progress", begun)

    def _in_progress(self) -> bytes:
        return self._template.json(response_state("in_progress"))

    def _status(self, type: str, response: bytes) -> bytes:
        number = next(self._builder.numbers)
        head = f'{{"type":"{type}","sequence_number":{number},"response":'
        return sse_event(type, head.encode() + response + b"}")


def _event(event: OutputItemEvent) -> bytes:
    return sse_event(event.type, rendered_json(event))
