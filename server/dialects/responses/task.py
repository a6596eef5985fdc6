"""A response that is ready for the engine."""

from dataclasses import dataclass
from functools import partial

from server.dialects.responses.envelope import Envelope, response_head
from server.dialects.responses.input.chat_body import chat_body
from server.dialects.responses.input.recalled import named_bytes, recalled
from server.dialects.responses.input.wire_items import stored_items
from server.dialects.responses.kept.store import ResponseStore
from server.dialects.responses.kept.stored import Conversation, StoredItem, StoredResponse
from server.dialects.responses.output.items import OutputShape
from server.dialects.responses.output.spliced import spliced_json
from server.dialects.responses.toolbox import Toolbox, log_dropped
from server.generation.chat_task import ChatTask, chat_task
from server.generation.models import ServedModel
from server.record import RequestRecord
from server.schemas.chat import ChatRequest
from server.schemas.responses.output import OutputItem
from server.schemas.responses.request import ResponsesRequest
from server.schemas.responses.response import ResponseNews


@dataclass(frozen=True, slots=True)
class ResponsesTask:
    """What the engine is asked, what its answer is made into, and where it is kept."""

    body: ResponsesRequest
    chat: ChatTask
    envelope: Envelope
    shape: OutputShape
    context: Conversation  # all that it is made from
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
            whole = Conversation([*map(_stored, news.output)], self.context)
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
    """`max_bytes` is the most that the body can name of what is stored.

    Raises ApiError (400) for what the model cannot serve, what is not stored, and what is too much.
    """
    log_dropped(body.tools, record.id)
    record.n_bytes += named_bytes(body, store, record.key)
    run = partial(model.workers.prepare, record)
    prepared = await run(partial(_prepare, body, model, record, store, max_bytes))
    chat = await chat_task(prepared.chat, model, record)
    head = response_head(body, prepared.toolbox, chat, f"resp_{record.id}")
    return ResponsesTask(
        body=body,
        chat=chat,
        envelope=await run(partial(Envelope, head)),
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
    context: Conversation


def _prepare(
    body: ResponsesRequest,
    model: ServedModel,
    record: RequestRecord,
    store: ResponseStore,
    max_bytes: int,
) -> _Prepared:
    said = recalled(body, store, record.key, max_bytes)
    toolbox = Toolbox(body.tools)
    chat = chat_body(body, [*said.earlier, *said.items], toolbox, model.prompts.roles)
    new = [*stored_items(said.items, record.id)] if body.store else []
    return _Prepared(chat, toolbox, Conversation(new, said.before))


def _stored(item: OutputItem) -> StoredItem:
    return StoredItem(item.id, spliced_json(item))
