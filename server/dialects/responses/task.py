"""A response that is ready for the engine."""

from dataclasses import dataclass
from functools import partial

from engine.api import InvalidRequest, NoGrammars
from server.dialects.responses.input.chat_body import as_chat, conversation
from server.dialects.responses.input.references import (
    ResolvedInput,
    referenced_bytes,
    resolved_input,
)
from server.dialects.responses.input.wire_items import stored_items
from server.dialects.responses.output.items import OutputShape
from server.dialects.responses.output.rendered_json import rendered_json
from server.dialects.responses.response_object import ResponseTemplate, response_head
from server.dialects.responses.storage.store import ResponseStore
from server.dialects.responses.storage.stored import Conversation, StoredItem, StoredResponse
from server.dialects.responses.tools import (
    RequestTools,
    log_dropped,
    without_default_strict,
)
from server.errors import ApiError
from server.generation.chat import Chat
from server.generation.chat_task import ChatTask, chat_task
from server.generation.models import ServedModel
from server.generation.tokens import chat_tokens
from server.record import RequestRecord
from server.schemas.chat import Conversation as ChatConversation
from server.schemas.responses.output import OutputItem
from server.schemas.responses.request import InputTokensRequest, ResponsesRequest
from server.schemas.responses.response import ResponseState


@dataclass(frozen=True, slots=True)
class ResponsesTask:
    """A request as a chat task, with the form of its output and the store that it goes to."""

    body: ResponsesRequest
    chat: ChatTask
    template: ResponseTemplate
    shape: OutputShape
    context: Conversation  # the input, with all that it continues
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
            whole = Conversation([*map(_stored, state.output)], self.context)
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

    async def planned(body: ResponsesRequest) -> tuple[_Prepared, ChatTask]:
        prepared = await run(partial(_prepare, body, model, record, store, max_bytes))
        return prepared, await chat_task(prepared.chat, model, record)

    loosened = body.model_copy(update={"tools": without_default_strict(body.tools)})
    try:
        prepared, chat = await planned(body)
        if loosened.tools != body.tools:
            record.slot.release()  # others need not wait while a grammar is tried
            await model.engine.check(chat.request)
    except (ApiError, InvalidRequest, NoGrammars) as error:
        concerns_tools = isinstance(error, NoGrammars) or error.param == "tools"
        if not concerns_tools or loosened.tools == body.tools:
            raise
        body = loosened
        prepared, chat = await planned(body)
    head = response_head(body, prepared.tools, chat, f"resp_{record.id}")
    return ResponsesTask(
        body=body,
        chat=chat,
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

    def prepare() -> ChatConversation:
        return _read(body, model, record, store, max_bytes).prompt

    chat = await model.workers.prepare(record, prepare)
    return len(await chat_tokens(chat, model, record))


@dataclass(frozen=True, slots=True)
class _Read:
    """A prompt's references resolved, and what it is made of."""

    resolved: ResolvedInput
    tools: RequestTools
    prompt: ChatConversation


@dataclass(frozen=True, slots=True)
class _Prepared:
    chat: Chat
    tools: RequestTools
    context: Conversation


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
    context = Conversation(new, resolved.before)
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
