"""A Responses body as a request to the engine, and its answer as a response, whole or streamed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    StoredItem,
    StoredResponse,
)
from server.dialects.responses.tools import RequestTools, flat, is_enforceable, log_dropped
from server.dialects.responses.write import Output, OutputShape, ResponseAnswer
from server.errors import ApiError
from server.generation.chat import Chat
from server.generation.chat_task import ChatTask, chat_task, chat_tokens
from server.generation.conversation import Conversation
from server.generation.models import ServedModel
from server.record import RequestRecord
from server.transport.sse import EVENT_STREAM, sse_event
from server.transport.unsent import kept_bytes


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
    log_dropped(body.tools, record.id)
    record.n_bytes += referenced_bytes(body, store, record.key)
    roles = model.prompts.roles

    async def planned(is_strict: Callable[[FunctionTool], bool]) -> tuple[ReadInput, ChatTask]:
        def read() -> tuple[ReadInput, Chat]:
            tools = RequestTools(body.tools, is_strict)
            read = read_input(body, tools, roles, store, record.key, max_bytes)
            return read, as_chat(body, read.prompt)

        read_body, chat = await model.workers.prepare(record, read)
        return read_body, await chat_task(chat, model, record)

    leaves_strict_open = any(
        isinstance(tool, FunctionTool) and tool.strict is None for tool, _ in flat(body.tools)
    )
    try:
        read, chat = await planned(is_enforceable)
        if leaves_strict_open:
            record.slot.release()  # others need not wait while a grammar is tried
            await model.engine.check(chat.request)
    except (ApiError, InvalidRequest, NoGrammars) as error:
        concerns_tools = isinstance(error, NoGrammars) or error.param == "tools"
        if not concerns_tools or not leaves_strict_open:
            raise
        read, chat = await planned(lambda tool: False)

    def complete() -> ResponsesTask:
        head = response_head(body, read.tools, chat, f"resp_{record.id}")
        stored = stored_items(read.items, record.id) if body.store else ()
        return ResponsesTask(
            body=body,
            chat=chat,
            template=ResponseTemplate(head),
            shape=OutputShape(
                read.tools, body.reasoning.wants_summary, body.wants_encrypted_reasoning
            ),
            context=StoredConversation([*stored], read.before),
            record=record,
            store=store,
        )

    return await model.workers.prepare(record, complete)


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

    def read() -> Conversation:
        tools, roles = RequestTools(body.tools), model.prompts.roles
        return read_input(body, tools, roles, store, record.key, max_bytes).prompt

    prompt = await model.workers.prepare(record, read)
    return len(await chat_tokens(prompt, model, record))


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
