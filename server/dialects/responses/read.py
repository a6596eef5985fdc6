"""The input of a response read into a chat: items, references to stored ones, earlier responses."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic, TypeGuard, TypeVar

from pydantic import TypeAdapter
from pydantic_core import PydanticCustomError

from server.dialects.files import FileFields
from server.dialects.responses.client_tools import FORM_BY_ITEM, output_text
from server.dialects.responses.items import (
    STORED,
    AdditionalToolsItem,
    ClientCallItem,
    ClientOutputItem,
    CompactionItem,
    ConfigurationUpdateItem,
    ConversationItem,
    CustomToolCallItem,
    ForeignItem,
    FunctionCallItem,
    FunctionTool,
    ImageContent,
    ItemReference,
    MessageItem,
    ReasoningItem,
    RefusalContent,
    TextContent,
    ToolOutputItem,
    ToolSearchCallItem,
    ToolSearchOutputItem,
)
from server.dialects.responses.output import unseal
from server.dialects.responses.schema import InputTokensRequest, ResponsesRequest
from server.dialects.responses.store import ResponseStore, StoredConversation, StoredItem
from server.dialects.responses.tools import RequestTools, function_name, is_enforceable
from server.errors import ApiError, InvalidField
from server.generation.compaction import compacted
from server.generation.conversation import (
    ROLES,
    Chat,
    Conversation,
    ImagePart,
    Message,
    Part,
    Text,
    check_choice,
    check_messages,
    texts,
)
from server.generation.foreign_history import foreign_note, joined
from server.generation.requests import ServedModel
from server.generation.seals import Seals, is_foreign
from server.generation.tools import Tool, ToolCall, custom_arguments
from server.json_size import check_json_size

Content = TextContent | RefusalContent | FileFields | ImageContent

MISSING_ID = "toolfound"
"""The id of a call that has none. Mistral's templates take nine letters and digits."""

FROM_CLIENTS = ("agent_message", "mcp_approval_response")
"""Foreign items that are not the model's. Neither are those of outputs of calls."""

MEDIA_NOTE = "(An image or a file stood here. This model reads text alone.)"


def chat_messages(
    instructions: str | None,
    items: Sequence[ConversationItem],
    seals: Seals,
    found: Iterable[Sequence[Tool]] = (),
    *,
    n_before: int = 0,
    takes_images: bool = True,
) -> list[Message]:
    """The conversation, with one system message at its head, if any. `found` are the tools of each
    item that has some. The first `n_before` items are of an earlier response. Where the model takes
    no images, a text says so in place of those in the outputs of tools, which no user has chosen.

    It has the instructions and the leading developer messages. Later developer messages stay where
    they are: at the head they would change the whole prompt, and nothing of it would be cached.
    """
    system, images = [instructions] if instructions else [], list[Part]()
    placed = [
        (item, f"input[{index - n_before}]" if index >= n_before else "")
        for index, item in enumerate(items)
        if not isinstance(item, ConfigurationUpdateItem)
    ]
    messages = _Messages(found, seals, takes_images=takes_images)
    n_leading = 0
    while n_leading < len(placed) and _is_system((leading := placed[n_leading])[0]):
        parts = _parts(leading[0].content, leading[1], "content")
        system.append("\n".join(part.text for part in parts if isinstance(part, Text)))
        images += [part for part in parts if isinstance(part, ImagePart)]
        n_leading += 1
    if system:
        parts = (*texts("\n\n".join(system)), *images)
        messages.add_turn(Message(role="system", parts=parts))
    for item, place in placed[n_leading:]:
        messages.add(item, place)
    return messages.complete()


def _parts(content: Iterable[Content], item: str, field: str) -> tuple[Part, ...]:
    """The parts of a message, which is this field of the item in the body; of a stored item without
    a place there, if `item` is empty.
    """
    return tuple(
        part.part(f"{item}.{field}[{index}]" if item else "previous_response_id")
        if isinstance(part, ImageContent)
        else Text(_text(part))
        for index, part in enumerate(content)
    )


class _Messages:
    """Builds messages from items: consecutive items of the model are one assistant message.

    These are reasoning, text and calls in any order and number, but never two texts in a row: those
    are two messages.
    """

    def __init__(
        self, found: Iterable[Sequence[Tool]], seals: Seals, *, takes_images: bool
    ) -> None:
        self._found = iter(found)
        self._seals = seals
        self._takes_images = takes_images
        self._turns: list[Message] = []
        self._call_ids = dict[str, str]()  # by the ids of their items
        self._begin_answer()

    def _begin_answer(self) -> None:
        self._texts, self._thoughts = list[str](), list[str]()
        self._calls = list[ToolCall]()
        self._ends_with_message = False

    def complete(self) -> list[Message]:
        self._end_answer()
        return self._turns

    def add(self, item: ConversationItem, place: str) -> None:
        """Add an item, which the body has in this place. Raises ApiError (400)."""
        match item:
            case MessageItem():
                self._add_message(item, place)
            case ReasoningItem():
                self._thoughts.append(_reasoning(item))
            case FunctionCallItem(call_id=id):
                name = function_name(item.name, item.namespace)
                self._calls.append(ToolCall(id, name, item.arguments))
            case CustomToolCallItem(call_id=id):
                name = function_name(item.name, item.namespace)
                self._calls.append(ToolCall(id, name, custom_arguments(item.input)))
            case ToolOutputItem():
                self._add_output(item, place)
            case ToolSearchCallItem() | ClientCallItem():
                form = FORM_BY_ITEM[item.type]
                arguments = json.dumps(form.arguments(item.model_dump()), ensure_ascii=False)
                call_id = item.call_id or item.id or MISSING_ID
                self._call_ids[item.id or call_id] = call_id
                self._calls.append(ToolCall(call_id, form.tool, arguments))
            case ClientOutputItem(id=id):
                call_id = item.call_id or self._call_ids.get(id or "") or id or MISSING_ID
                output = texts(output_text(item.output, item.status))
                self.add_turn(Message(role="tool", parts=output, answered_call=call_id))
            case ToolSearchOutputItem(call_id=id):
                tools = next(self._found)
                names = ", ".join(tool.name for tool in tools)
                output = texts(f"Found: {names}." if names else "Nothing was found.")
                self.add_turn(
                    Message(role="tool", parts=output, answered_call=id or MISSING_ID, tools=tools)
                )
            case AdditionalToolsItem():
                self.add_turn(Message(role="system", tools=next(self._found)))
            case CompactionItem():
                field = f"{place}.encrypted_content" if place else "previous_response_id"
                if (summary := self._seals.opened(item.encrypted_content, field)) is not None:
                    self._end_answer()
                    self._turns = compacted(self._turns, summary)
            case ForeignItem():
                self._add_foreign(item)
        self._ends_with_message = isinstance(item, MessageItem)

    def _add_message(self, item: MessageItem, place: str) -> None:
        if item.role != "assistant":
            said = _parts(item.content, place, "content")
            self.add_turn(Message(role=ROLES[item.role], parts=said))
            return
        if self._ends_with_message:
            self._end_answer()
        if any(isinstance(part, ImageContent) for part in item.content):
            message = "a message of role 'assistant' has no images"
            raise InvalidField(f"{place}.content" if place else "previous_response_id", message)
        self._texts += map(_text, item.content)

    def _add_output(self, item: ToolOutputItem, place: str) -> None:
        output = (
            _parts(item.output, place, "output")
            if self._takes_images
            else texts(*map(_text, item.output))
        )
        id = item.call_id or MISSING_ID
        self.add_turn(Message(role="tool", parts=output, answered_call=id))

    def _add_foreign(self, item: ForeignItem) -> None:
        note = foreign_note(item.type, item.model_dump())
        if note is not None and _is_from_client(item):
            self.add_turn(Message(role="user", parts=texts(note)))
        elif note is not None:
            self._texts.append(note)

    def add_turn(self, turn: Message) -> None:
        """Add what another role says."""
        self._end_answer()
        self._turns.append(turn)

    def _end_answer(self) -> None:
        """Add the assistant message. One of reasoning alone, which was cut off, is left out."""
        if self._texts or self._calls:
            answer = Message(
                role="assistant",
                parts=texts(joined(self._texts)) if self._texts else (),
                reasoning="".join(self._thoughts),
                calls=self._calls,
            )
            self._turns.append(answer)
        self._begin_answer()


def _is_foreign(item: ConversationItem) -> bool:
    match item:
        case CompactionItem():
            return is_foreign(item.encrypted_content)
        case _:
            return isinstance(item, ForeignItem)


def _is_system(item: ConversationItem) -> TypeGuard[MessageItem]:
    return isinstance(item, MessageItem) and ROLES[item.role] == "system"


def _is_from_client(item: ForeignItem) -> bool:
    return item.type in FROM_CLIENTS or item.type.endswith("_call_output")


def _text(part: Content) -> str:
    match part:
        case TextContent():
            return part.text
        case RefusalContent():
            return part.refusal
        case FileFields():
            return part.text or MEDIA_NOTE
        case ImageContent():
            return MEDIA_NOTE


def _reasoning(item: ReasoningItem) -> str:
    """The reasoning's text, or else that in `encrypted_content`, or else the summary."""
    if item.content:
        return "".join(part.text for part in item.content)
    sealed = unseal(item.encrypted_content or "")
    return sealed or "".join(part.text for part in item.summary)


def as_chat(body: ResponsesRequest, prompt: Conversation, model: ServedModel) -> Chat:
    """Raises ApiError (400)."""
    return Chat(
        conversation=prompt,
        sampling=body,
        max_tokens=body.max_output_tokens,
        logprobs=body.top_logprobs if body.wants_logprobs else None,
        structure=body.structure,
        parallel_calls=body.parallel_tool_calls,
        thinking_budget=body.thinking_choice.budget_of(reasons=model.planner.reasons),
    )


def _conversation(
    body: InputTokensRequest,
    items: Sequence[ConversationItem],
    tools: RequestTools,
    n_before: int,
    model: ServedModel,
    seals: Seals,
) -> Conversation:
    messages = chat_messages(
        body.instructions,
        items,
        seals,
        tools.found,
        n_before=n_before,
        takes_images=model.engine.card.images is not None,
    )
    choice = tools.choice(body.tool_choice)
    check_messages(messages, "input")
    check_choice(choice, [*tools.functions, *chain.from_iterable(tools.found)])
    return Conversation(
        messages=messages,
        tools=tools.functions,
        tool_choice=choice,
        cache_salt=body.cache_salt,
        **body.thinking_choice.conversation_fields,
    )


WITH_TOOLS = (AdditionalToolsItem, ToolSearchOutputItem)
_ITEMS = TypeAdapter(list[ConversationItem])


BodyT = TypeVar("BodyT", bound=InputTokensRequest)


@dataclass(frozen=True, slots=True)
class ReadInput(Generic[BodyT]):
    """A request's prompt and tools, and their sources: `items` are the request's own with resolved
    references, `before` is the response that it continues. `foreign` counts the items of other
    servers by their types, and `body` is the request as updates among the items configure it.
    """

    body: BodyT
    prompt: Conversation
    tools: RequestTools
    items: Sequence[ConversationItem]
    before: StoredConversation | None
    foreign: Counter[str]


def referenced_bytes(body: InputTokensRequest, store: ResponseStore, owner: str) -> int:
    """About how many bytes of stored items the body refers to."""
    previous = store.get(owner, body.previous_response_id or "")
    before = previous.conversation.total_bytes if previous else 0
    times = Counter(reference.id for _, reference in _references(body))
    return before + sum(n * store.item_bytes(owner, id) for id, n in times.items())


def read_input(
    body: BodyT,
    model: ServedModel,
    store: ResponseStore,
    owner: str,
    seals: Seals,
    max_bytes: int,
    is_strict: Callable[[FunctionTool], bool] = is_enforceable,
) -> ReadInput[BodyT]:
    """Called in a worker thread. `is_strict` decides for functions whose `strict` is left out.

    Raises ApiError (400) for items that make no prompt, for references to items that are not
    stored, and for more than `max_bytes` of referenced items: a short body can refer to long items
    repeatedly.
    """
    before = _previous(body.previous_response_id, store, owner)
    earlier = list(before or ())
    stored = [*earlier, *_referenced(body, store, owner)]
    _check_length(stored, max_bytes, "previous_response_id" if earlier else "input")
    parsed = iter(_ITEMS.validate_json(_json(stored), context=STORED))
    history = list(islice(parsed, len(earlier)))
    items = [next(parsed) if isinstance(item, ItemReference) else item for item in body.input]
    found = [item.tools for item in (*history, *items) if isinstance(item, WITH_TOOLS)]
    tools = RequestTools(body.tools, found, is_strict)
    body = _configured(body, [*history, *items])
    prompt = _conversation(body, [*history, *items], tools, len(history), model, seals)
    foreign = Counter(item.type for item in (*history, *items) if _is_foreign(item))
    return ReadInput(body, prompt, tools, items, before, foreign)


def _configured(body: BodyT, items: Sequence[ConversationItem]) -> BodyT:
    """The request with the effort and the form of the text that the last updates set. They replace
    `reasoning.effort` and `text.format`; an effort that contradicts what the request says of
    thinking under other names does not.
    """
    updates = [item for item in items if isinstance(item, ConfigurationUpdateItem)]
    formats = [update.text.format for update in updates if update.text]
    efforts = [update.reasoning.effort for update in updates if update.reasoning]
    if formats:
        text = body.text.model_copy(update={"format": formats[-1]})
        body = body.model_copy(update={"text": text})
    if effort := next(filter(None, reversed(efforts)), None):
        reasoning = body.reasoning.model_copy(update={"effort": effort})
        updated = body.model_copy(update={"reasoning": reasoning})
        with suppress(PydanticCustomError):
            updated.thinking_choice  # noqa: B018
            body = updated
    return body


def _previous(id: str | None, store: ResponseStore, owner: str) -> StoredConversation | None:
    if id is None:
        return None
    previous = store.get(owner, id)
    if previous is None:
        raise ApiError(
            400,
            f"Previous response with id '{id}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return previous.conversation


def _referenced(body: InputTokensRequest, store: ResponseStore, owner: str) -> list[StoredItem]:
    """The items that the references refer to, in their order."""
    stored = store.items(owner, (reference.id for _, reference in _references(body)))
    for index, reference in _references(body):
        if reference.id not in stored:
            raise InvalidField(f"input[{index}].id", f"Item with id '{reference.id}' not found.")
    return [stored[reference.id] for _, reference in _references(body)]


def _references(body: InputTokensRequest) -> Iterator[tuple[int, ItemReference]]:
    """Each with its index in the input."""
    for index, item in enumerate(body.input):
        if isinstance(item, ItemReference):
            yield index, item


def _check_length(stored: Sequence[StoredItem], max_bytes: int, field: str) -> None:
    if sum(len(item.json) for item in stored) > max_bytes:
        limit = f"at most {max_bytes} bytes (max_body_bytes)"
        raise InvalidField(field, f"the items that it stands for are too long: {limit}")
    try:
        check_json_size(_json(stored))
    except ValueError as error:
        raise InvalidField(field, f"what it stands for {error}") from None


def _json(stored: Sequence[StoredItem]) -> bytes:
    return b"[" + b",".join(item.json for item in stored) + b"]"
