"""Writes responses: whole, as they are stored, and as streams of events.

Each block of the answer is an item of the response's output. An item is rendered once, and all
events and responses that have it repeat these bytes.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic_core import to_json

from engine.values.model import Tokenizer
from engine.values.output import FinishReason, OutputEvent, TokenLogprob
from server.dialects.job import StreamWriter
from server.dialects.openai import wire_finish_reason
from server.dialects.openai_logprobs import chat_logprobs
from server.dialects.responses.client_tools import CallForm
from server.dialects.responses.output import (
    ItemStatus,
    ResponseError,
    ResponseState,
    ResponseStatus,
    ResponseUsage,
    TurnUsage,
    seal,
)
from server.dialects.responses.store import (
    ResponseStore,
    StoredConversation,
    StoredItem,
    StoredResponse,
)
from server.dialects.responses.tools import ClientTool
from server.errors import ApiError
from server.generation.choice import AnswerUsage, Block, Choice, Closed, Grew, Opened, Step
from server.generation.progress import ProgressBody
from server.generation.stream import kept_bytes
from server.generation.tools import arguments_object, custom_input
from server.http.stream import EVENT_STREAM, sse_event
from server.record import RequestRecord

Event = tuple[str, bytes]
"""An event's type, and its JSON members beyond `type` and `sequence_number`."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of an item that has its text, the only member of the item's field `list`."""

    type: str
    list: str
    event: str  # the type of the part's events, without its end


@dataclass(frozen=True, slots=True)
class Kind:
    """Writes one kind of block."""

    item: str  # the item's type
    prefix: str  # of the item's id
    event: str  # the type of the text's events, without its end
    key: str  # the field of the text: in the part, or in the item if it has no parts
    empty: Mapping[str, bytes]  # fields of an item that begins, as JSON
    part: Part | None = None


KINDS = {
    "text": Kind(
        item="message",
        prefix="msg",
        event="response.output_text",
        key="text",
        empty={"role": b'"assistant"', "content": b"[]"},
        part=Part("output_text", "content", "response.content_part"),
    ),
    "reasoning": Kind(
        item="reasoning",
        prefix="rs",
        event="response.reasoning_text",
        key="text",
        empty={"summary": b"[]"},
        part=Part("reasoning_text", "content", "response.content_part"),
    ),
    "summary": Kind(
        item="reasoning",
        prefix="rs",
        event="response.reasoning_summary_text",
        key="text",
        empty={"summary": b"[]"},
        part=Part("summary_text", "summary", "response.reasoning_summary_part"),
    ),
    "call": Kind(
        item="function_call",
        prefix="fc",
        event="response.function_call_arguments",
        key="arguments",
        empty={"arguments": b'""'},
    ),
    "custom": Kind(
        item="custom_tool_call",
        prefix="ctc",
        event="response.custom_tool_call_input",
        key="input",
        empty={"input": b'""'},
    ),
}
"""`summary` is reasoning that is sent as its summary, `custom` a call of a custom tool."""

PASSED_ON = frozenset({"context_length_exceeded", "rate_limit_exceeded"})
"""Error codes that clients act upon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseForm:
    """Writes one response, and stores it. It keeps nothing else of the body."""

    id: str
    head: bytes  # the fields that never change, as a JSON object: many events repeat them
    tools: Mapping[str, ClientTool]  # by the names of their functions
    with_summary: bool  # reasoning is sent as its summary
    with_sealed_reasoning: bool
    tokenizer: Tokenizer
    record: RequestRecord
    context: StoredConversation  # the input, with all that it continues
    store: ResponseStore | None  # None: it is not stored
    is_background: bool
    first: Sequence[StoredItem] = ()  # items of the output that were made before the answer
    first_usage: AnswerUsage | None = None

    @property
    def kept_bytes(self) -> int:
        """What it keeps of the body, and of the stored items that it names."""
        return len(self.head) + self.context.total_bytes

    def whole(self, choices: Sequence[Choice], usage: AnswerUsage) -> bytes:
        """The JSON of the complete ResponseBody, which is stored."""
        (choice,) = choices
        items = list[StoredItem]()
        for block in choice.blocks:
            item = item_of(self, block)
            item.add_logprobs(block.logprobs)
            items.append(item.complete(_item_status(choice, block)))
        return self.stored(_status(choice), items, usage=self.usage(usage))

    def writer(self, choices: Sequence[Choice]) -> "ResponseWriter":
        """The writer of a stream of the one choice."""
        (choice,) = choices
        return ResponseWriter(self, choice)

    def usage(self, usage: AnswerUsage) -> ResponseUsage:
        """The tokens under the names of `/v1/responses`."""
        turn = cast(ResponseUsage, turn_usage(usage))
        if self.first_usage is not None:
            turn["compaction"] = turn_usage(self.first_usage)
        return turn

    def output_index(self, block: Block) -> int:
        """The place of a block's item in the output."""
        return len(self.first) + block.index

    def json(
        self,
        status: ResponseStatus,
        items: Sequence[StoredItem] = (),
        *,
        usage: ResponseUsage | None = None,
        error: ApiError | None = None,
    ) -> bytes:
        """The JSON of the ResponseBody in some state."""
        is_cut_off = status == "incomplete"
        state: ResponseState = {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None if error is None else _error(error),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut_off else None,
            "usage": usage,
        }
        output = b",".join(item.json for item in items)
        return b'%b,%b,"output":[%b]}' % (self.head[:-1], to_json(state)[1:-1], output)

    def stored(
        self,
        status: ResponseStatus,
        items: Sequence[StoredItem] = (),
        *,
        usage: ResponseUsage | None = None,
        error: ApiError | None = None,
    ) -> bytes:
        """The JSON of the ResponseBody as it ends, which is stored if the client wants that."""
        items = [*self.first, *items]
        json = self.json(status, items, usage=usage, error=error)
        if self.store is not None:
            whole = StoredConversation(items, self.context)
            response = StoredResponse(json, self.context, whole, self.is_background)
            self.store.put(self.record.client, self.record.key, self.id, response)
        return json


class Item:
    """A block as an item of a response's output."""

    def __init__(self, form: ResponseForm, block: Block, tool: ClientTool) -> None:
        self._form = form
        self._block = block
        self._logprobs = list[bytes]()  # each some members of a JSON list
        match block.kind:
            case "text":
                self._kind = KINDS["text"]
            case "reasoning":
                self._kind = KINDS["summary" if form.with_summary else "reasoning"]
            case "call":
                self._kind = KINDS["custom" if tool.is_custom else "call"]
        self._id = f"{self._kind.prefix}_{form.record.id}{block.index:02x}"
        self._tool = tool
        index = f',"{self._kind.part.list}_index":0' if self._kind.part else ""
        self._index = form.output_index(block)
        self._at = f'"item_id":"{self._id}","output_index":{self._index}{index}'.encode()

    def opened(self) -> Iterator[Event]:
        """The events of its beginning."""
        yield self._item_event("response.output_item.added", self._json("in_progress", {}))
        if part := self._kind.part:
            yield f"{part.event}.added", b'%b,"part":%b' % (self._at, self._part(b'""'))

    def grew(self, text: str, logprobs: Sequence[TokenLogprob]) -> Iterator[Event]:
        """The events of more text. The input of a custom tool is read when it is complete."""
        added = self.add_logprobs(logprobs)
        if self._kind is not KINDS["custom"]:
            yield self._text_event("delta", "delta", to_json(text), added)

    def closed(self, item: StoredItem) -> Iterator[Event]:
        """The events that end the item; `item` is the result."""
        text = self._text()
        if self._kind is KINDS["custom"]:
            yield self._text_event("delta", "delta", text, b"")
        yield self._text_event("done", self._kind.key, text, b",".join(self._logprobs))
        if part := self._kind.part:
            yield f"{part.event}.done", b'%b,"part":%b' % (self._at, self._part(text))
        yield self._item_event("response.output_item.done", item.json)

    def add_logprobs(self, logprobs: Sequence[TokenLogprob]) -> bytes:
        """Add the log-probabilities of the next tokens of its text. Returns them as members of a
        JSON list.
        """
        if not logprobs:
            return b""
        self._logprobs.append(to_json(chat_logprobs(self._form.tokenizer, logprobs))[1:-1])
        return self._logprobs[-1]

    def complete(self, status: ItemStatus) -> StoredItem:
        """The item with all of its text."""
        kind, text = self._kind, self._text()
        fields = {kind.part.list: b"[%b]" % self._part(text)} if kind.part else {kind.key: text}
        if self._block.kind == "reasoning" and self._form.with_sealed_reasoning:
            fields["encrypted_content"] = to_json(seal(self._block.text))
        return StoredItem(self._id, self._json(status, fields))

    def _text(self) -> bytes:
        text = self._block.text
        return to_json(custom_input(text) if self._kind is KINDS["custom"] else text)

    def _json(self, status: ItemStatus, fields: Mapping[str, bytes]) -> bytes:
        head = {"id": self._id, "type": self._kind.item, "status": status}
        if self._block.kind == "call":
            head |= {"call_id": self._block.call_id, "name": self._tool.name}
            if self._tool.namespace:
                head["namespace"] = self._tool.namespace
        return _json_object(head, {**self._kind.empty, **fields})

    def _part(self, text: bytes) -> bytes:
        assert self._kind.part is not None
        fields = {"text": text}
        if self._kind is KINDS["text"]:
            fields |= {"annotations": b"[]", "logprobs": b"[%b]" % b",".join(self._logprobs)}
        return _json_object({"type": self._kind.part.type}, fields)

    def _item_event(self, type: str, item: bytes) -> Event:
        return type, b'"output_index":%d,"item":%b' % (self._index, item)

    def _text_event(self, end: str, key: str, text: bytes, logprobs: bytes) -> Event:
        members = b'%b,"%b":%b' % (self._at, key.encode(), text)
        if self._kind is KINDS["text"]:
            members += b',"logprobs":[%b]' % logprobs
        elif self._kind is KINDS["call"] and end == "done":
            members += b',"name":%b' % to_json(self._tool.name)
        return f"{self._kind.event}.{end}", members


class FormedCall:
    """A call of a tool whose calls are items of a kind of their own. They are made of its complete
    arguments, so nothing is sent before. A call that is cut off, or whose arguments make no such
    item, is a function call: no client runs half a command.
    """

    def __init__(self, form: ResponseForm, block: Block, call_form: CallForm) -> None:
        self._block = block
        self._index = form.output_index(block)
        self._form = call_form
        self._head = {
            "id": f"{call_form.prefix}_{form.record.id}{block.index:02x}",
            "type": call_form.item,
            "call_id": block.call_id,
        }
        self._fields: dict[str, Any] | None = None
        self._function_call = Item(form, block, ClientTool(block.name))

    def opened(self) -> Iterator[Event]:
        return iter(())

    def grew(self, text: str, logprobs: Sequence[TokenLogprob]) -> Iterator[Event]:
        return iter(())

    def add_logprobs(self, logprobs: Sequence[TokenLogprob]) -> bytes:
        return b""

    def complete(self, status: ItemStatus) -> StoredItem:
        """The item with all that the call says."""
        arguments = arguments_object(self._block.text, "on") if status == "completed" else None
        self._fields = None if arguments is None else self._form.fields(arguments)
        if self._fields is None:
            return self._function_call.complete(status)
        return StoredItem(self._head["id"], self._json("completed"))

    def closed(self, item: StoredItem) -> Iterator[Event]:
        """All events of the item, which is complete."""
        if self._fields is None:
            yield from self._function_call.opened()
            yield from self._function_call.grew(self._block.text, ())
            yield from self._function_call.closed(item)
            return
        yield self._event("response.output_item.added", b'"item":%b' % self._json("in_progress"))
        if self._form.tool == "shell":
            for index, command in enumerate(self._fields["action"]["commands"]):
                yield from self._command_events(index, command)
        yield self._event("response.output_item.done", b'"item":%b' % item.json)

    def _command_events(self, index: int, command: str) -> Iterator[Event]:
        for end, key, text in (
            ("added", "command", ""),
            ("delta", "delta", command),
            ("done", "command", command),
        ):
            members = to_json({"command_index": index, key: text})[1:-1]
            yield self._event(f"response.shell_call_command.{end}", members)

    def _event(self, type: str, members: bytes) -> Event:
        return type, b'"output_index":%d,%b' % (self._index, members)

    def _json(self, status: ItemStatus) -> bytes:
        return to_json({**self._head, "status": status, **(self._fields or {})})


def item_of(form: ResponseForm, block: Block) -> Item | FormedCall:
    """The item of a block."""
    tool = form.tools.get(block.name) or ClientTool(block.name)  # or the model made it up
    if block.kind == "call" and tool.form is not None:
        return FormedCall(form, block, tool.form)
    return Item(form, block, tool)


class ResponseWriter(StreamWriter):
    """The typed events of one response.

    Codex times out between events and ignores comments, so a keep-alive repeats the event
    `response.in_progress`.
    """

    media_type = EVENT_STREAM
    _item: "Item | FormedCall"  # of the latest block

    def __init__(self, form: ResponseForm, choice: Choice) -> None:
        self._form = form
        self._choice = choice
        self._items: list[StoredItem] = []  # the complete ones
        self._n_events = 0

    def write(self, choice: int, steps: Sequence[Step]) -> bytes:
        return self.opening() + b"".join(
            self.event(type, members) for step in steps for type, members in self._events(step)
        )

    def kept_bytes(self, events: Sequence[OutputEvent]) -> int:
        """The last events repeat the whole answer."""
        return sum(map(kept_bytes, events))

    def progress(self, body: ProgressBody) -> bytes:
        members = b'"response":%b,%b' % (
            self._in_progress(),
            to_json({"prompt_progress": body})[1:-1],
        )
        return self.opening() + self.event("response.in_progress", members)

    def keep_alive(self) -> bytes:
        return self.opening() or self._status("response.in_progress", self._in_progress())

    def failure(self, error: ApiError) -> bytes:
        response = self._form.stored("failed", self._items, error=error)
        return self.opening() + self._status("response.failed", response)

    def end(self, usage: AnswerUsage) -> bytes:
        status = _status(self._choice)
        response = self._form.stored(status, self._items, usage=self._form.usage(usage))
        return self.ending(status, response)

    def ending(self, status: ResponseStatus, response: bytes) -> bytes:
        """The last event: the response as it ended."""
        return self._status(f"response.{status}", response)

    def _events(self, step: Step) -> Iterator[Event]:
        match step:
            case Opened(block):
                self._item = item_of(self._form, block)
                yield from self._item.opened()
            case Grew(_, text, logprobs):
                yield from self._item.grew(text, logprobs)
            case Closed(block):
                self._items.append(self._item.complete(_item_status(self._choice, block)))
                yield from self._item.closed(self._items[-1])

    def opening(self) -> bytes:
        """The first events, once."""
        if self._n_events:
            return b""
        begun = self._form.json("in_progress")
        opened = [self._status(f"response.{each}", begun) for each in ("created", "in_progress")]
        opened += [self.whole_item(*indexed) for indexed in enumerate(self._form.first)]
        return b"".join(opened)

    def whole_item(self, index: int, item: StoredItem) -> bytes:
        """The events of an item that is sent at once."""
        return b"".join(self.item_event(end, index, item.json) for end in ("added", "done"))

    def item_event(self, end: str, index: int, item: bytes) -> bytes:
        """The event of an item's beginning or end, in this place of the output."""
        members = b'"output_index":%d,"item":%b' % (index, item)
        return self.event(f"response.output_item.{end}", members)

    def _in_progress(self) -> bytes:
        return self._form.json("in_progress")

    def _status(self, type: str, response: bytes) -> bytes:
        return self.event(type, b'"response":%b' % response)

    def event(self, type: str, members: bytes) -> bytes:
        """An event with these members, as JSON, beyond `type` and `sequence_number`."""
        number, self._n_events = self._n_events, self._n_events + 1
        head = f'{{"type":"{type}","sequence_number":{number},'
        return sse_event(type, b"%b%b}" % (head.encode(), members))


def _json_object(fields: Mapping[str, object], rendered: Mapping[str, bytes]) -> bytes:
    """A JSON object of the fields, and of `rendered` ones, which are JSON."""
    members = b",".join(b'"%b":%b' % (name.encode(), json) for name, json in rendered.items())
    return b"%b,%b}" % (to_json(fields)[:-1], members)


def _status(choice: Choice) -> ResponseStatus:
    """The status of a response at the end of its answer. Raises ApiError (500) before that."""
    is_cut_off = wire_finish_reason(choice.finish_reason) != "stop"
    return "incomplete" if is_cut_off or choice.cut_off_call else "completed"


def _item_status(choice: Choice, block: Block) -> ItemStatus:
    is_cut_off = choice.finish_reason is not FinishReason.STOP and block is choice.blocks[-1]
    return "incomplete" if is_cut_off or block is choice.cut_off_call else "completed"


def _error(error: ApiError) -> ResponseError:
    """The error of a response, with one of the few codes that it may have."""
    if error.code in PASSED_ON:
        code = str(error.code)
    else:
        code = "invalid_prompt" if error.status < 500 else "server_error"
    return {"code": code, "message": str(error)}


def turn_usage(usage: AnswerUsage) -> TurnUsage:
    """The tokens of one turn of the model."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
