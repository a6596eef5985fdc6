"""A response that is ready for the engine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from anyio import to_thread
from pydantic import TypeAdapter

from server.dialects.responses.envelope import Envelope, response_head
from server.dialects.responses.input.chat_body import chat_body
from server.dialects.responses.input.wire_items import stored_items
from server.dialects.responses.kept.store import ResponseStore, StoredItem, StoredResponse
from server.dialects.responses.output.items import OutputShape
from server.dialects.responses.toolbox import Toolbox, log_dropped
from server.errors import ApiError, invalid
from server.generation.chat_task import ChatTask, chat_task
from server.models import ServedModel
from server.record import RequestRecord
from server.schemas.chat import ChatRequest
from server.schemas.responses.items import ConversationItem, InputItem, ItemReference
from server.schemas.responses.output import OutputItem
from server.schemas.responses.request import ResponsesRequest
from server.schemas.responses.response import ResponseNews

_ITEMS = TypeAdapter(list[ConversationItem])


@dataclass(frozen=True, slots=True)
class ResponsesTask:
    """What the engine is asked, what its answer is made into, and where it is kept."""

    body: ResponsesRequest
    chat: ChatTask
    envelope: Envelope
    shape: OutputShape
    context: Sequence[StoredItem]  # all items that it is made from
    record: RequestRecord
    store: ResponseStore

    @property
    def id(self) -> str:
        return self.envelope.head.id

    @property
    def owner(self) -> str:
        """Who alone may ask for it again."""
        return self.record.key

    def keep(self, news: ResponseNews) -> bytes:
        """The response as JSON, which is stored unless the client does not want that."""
        json = self.envelope.json(news)
        if self.body.store:
            output = tuple(map(_stored, news.output))
            stored = StoredResponse(json, self.context, output, self.body.background)
            self.store.put(self.owner, self.id, stored)
        return json


async def responses_task(
    body: ResponsesRequest, model: ServedModel, record: RequestRecord, store: ResponseStore
) -> ResponsesTask:
    """Raises ApiError (400) for what the model cannot serve, and what is not stored."""
    log_dropped(body.tools, record.id)
    prepared = await to_thread.run_sync(
        _prepare, body, model, store, record
    )  # histories may be long
    chat = await chat_task(prepared.chat, model, record)
    head = response_head(body, prepared.toolbox, chat, f"resp_{record.id}")
    return ResponsesTask(
        body=body,
        chat=chat,
        envelope=await to_thread.run_sync(Envelope, head),
        shape=OutputShape(
            prepared.toolbox, body.reasoning.asks_for_summary, body.wants_encrypted_reasoning
        ),
        context=prepared.context,
        record=record,
        store=store,
    )


@dataclass(frozen=True, slots=True)
class _Prepared:
    chat: ChatRequest
    toolbox: Toolbox
    context: tuple[StoredItem, ...]


def _prepare(
    body: ResponsesRequest, model: ServedModel, store: ResponseStore, record: RequestRecord
) -> _Prepared:
    before = _earlier(body, store, record.key)
    items = _resolved(body.input, store, record.key)
    toolbox = Toolbox(body.tools)
    conversation = [*_parsed(before), *items]
    chat = chat_body(body, conversation, toolbox, model.prompts.roles)
    new = stored_items(items, record.id) if body.store else ()
    return _Prepared(chat, toolbox, (*before, *new))


def _earlier(body: ResponsesRequest, store: ResponseStore, owner: str) -> Sequence[StoredItem]:
    """All items up to the end of the response that is continued."""
    id = body.previous_response_id
    if id is None:
        return ()
    previous = store.get(owner, id)
    if previous is None:
        raise ApiError(
            400,
            f"Previous response with id '{id}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return (*previous.input, *previous.output)


def _resolved(
    items: Iterable[InputItem], store: ResponseStore, owner: str
) -> list[ConversationItem]:
    """The items, references replaced by what they refer to."""
    resolved: list[ConversationItem] = []
    for index, item in enumerate(items):
        if not isinstance(item, ItemReference):
            resolved.append(item)
            continue
        stored = store.item(owner, item.id)
        if stored is None:
            message = f"input[{index}].id: Item with id '{item.id}' not found."
            raise invalid(message, f"input[{index}].id")
        resolved += _parsed([stored])
    return resolved


def _parsed(stored: Iterable[StoredItem]) -> list[ConversationItem]:
    return _ITEMS.validate_json(b"[" + b",".join(item.json for item in stored) + b"]")


def _stored(item: OutputItem) -> StoredItem:
    return StoredItem(item.id, item.model_dump_json(exclude_unset=True).encode())
