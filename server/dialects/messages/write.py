"""The answers of `/v1/messages`, whole and streamed: the blocks of an answer as content blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, cast, get_args

from pydantic import Field
from pydantic_core import to_json
from typing_extensions import TypedDict

from engine.values.output import FinishReason, Usage
from engine.values.request import Request
from server.dialects.error_shapes import MessagesError, messages_error
from server.dialects.job import StreamWriter, as_arguments, wire_json
from server.errors import ApiError
from server.generation.choice import AnswerUsage, Block, Choice, Grew, Opened, Step
from server.generation.progress import ProgressBody
from server.http.stream import EVENT_STREAM, sse_event
from server.json_model import AnswerType

StopReason = Literal[
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "compaction",
    "model_context_window_exceeded",
]


class ThoughtTokens(TypedDict):
    thinking_tokens: int


class _Tokens(TypedDict):
    """The prompt's tokens are the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class IterationUsage(_Tokens):
    """The tokens of one turn of the model: of a summary, or of the message."""

    type: Literal["compaction", "message"]


class MessageUsage(_Tokens):
    """The tokens of the message. Those of a summary are in `iterations` alone."""

    output_tokens_details: ThoughtTokens
    iterations: NotRequired[list[IterationUsage]]  # where the conversation was compacted


class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolReference(TypedDict):
    type: Literal["tool_reference"]
    name: str


class ToolAddition(TypedDict):
    type: Literal["tool_addition"]
    tool: ToolReference


class CompactionBlock(TypedDict):
    """A summary of all that is before it. Its content is null where it begins in a stream."""

    type: Literal["compaction"]
    content: str | None
    signature: str
    tool_changes: NotRequired[list[ToolAddition]]


ContentBlock: TypeAlias = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | CompactionBlock, Field(discriminator="type")
]


class MessageBody(TypedDict):
    """A message. `stop_reason` is null where it has only begun."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEnd(TypedDict):
    stop_reason: StopReason
    stop_sequence: str | None


class TextDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(TypedDict):
    type: Literal["signature_delta"]
    signature: str


class InputJsonDelta(TypedDict):
    """Slices of a call's input, as JSON text."""

    type: Literal["input_json_delta"]
    partial_json: str


class CompactionDelta(TypedDict):
    type: Literal["compaction_delta"]
    content: str


Delta: TypeAlias = Annotated[
    TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta | CompactionDelta,
    Field(discriminator="type"),
]


class MessageStart(TypedDict):
    type: Literal["message_start"]
    message: MessageBody


class Ping(TypedDict):
    type: Literal["ping"]
    prompt_progress: NotRequired[ProgressBody]  # with return_progress


class ContentBlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class ContentBlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: Delta


class ContentBlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class MessageDelta(TypedDict):
    """How the message ended, and its total usage."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(TypedDict):
    type: Literal["message_stop"]


MessageEvent = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
)
MESSAGE_EVENTS: Sequence[AnswerType] = (*get_args(MessageEvent), MessagesError)


SIGNATURE = "cm9vdHN0b2Nr"
"""The signature of all thinking blocks. Clients send it back, and it is never checked."""


@dataclass(frozen=True, slots=True)
class Compacted:
    """A summary that stands for the conversation, and the tokens of its turn."""

    block: CompactionBlock
    usage: AnswerUsage


class MessageForm:
    """Writes one request's message."""

    def __init__(
        self,
        model: str,
        request: Request,
        max_tokens: int,
        *,
        is_marked: bool,
        compacted: Compacted | None = None,
    ) -> None:
        """`max_tokens` is the value that the client requested. If the prompt `is_marked` (has
        `cache_control`), its computed tokens are reported as written to the cache. `compacted` was
        made before the answer, and is its first block.
        """
        self.compacted = compacted
        self.request_id = request.id
        self._model = model
        self._is_marked = is_marked
        self._has_all_tokens = request.max_tokens == max_tokens

    def whole(self, choices: Sequence[Choice], usage: AnswerUsage) -> bytes:
        """The JSON of a MessageBody."""
        (choice,) = choices
        first = [self.compacted.block] if self.compacted else []
        content = [*first, *(_content(block, block.text) for block in choice.blocks)]
        return to_json(self.message(content, self.usage(usage), self.end(choice)))

    def writer(self, choices: Sequence[Choice]) -> "MessageWriter":
        """The writer of a stream of the one choice."""
        (choice,) = choices
        return MessageWriter(self, choice)

    def message(
        self, content: list[ContentBlock], usage: MessageUsage, end: MessageEnd | None
    ) -> MessageBody:
        """The message; `end` is None where it has only begun."""
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": end["stop_reason"] if end else None,
            "stop_sequence": end["stop_sequence"] if end else None,
            "usage": usage,
        }

    def usage(self, usage: Usage) -> MessageUsage:
        """The tokens under Anthropic's names."""
        thought = usage.reasoning_tokens if isinstance(usage, AnswerUsage) else 0
        tokens = self._tokens(usage)
        details: ThoughtTokens = {"thinking_tokens": thought}
        found = cast(MessageUsage, {**tokens, "output_tokens_details": details})
        if self.compacted is not None:
            message: IterationUsage = {"type": "message", **tokens}
            found["iterations"] = [self.summary_usage(self.compacted.usage), message]
        return found

    def summary_usage(self, usage: Usage) -> IterationUsage:
        """The tokens of a summary's turn."""
        return {"type": "compaction", **self._tokens(usage)}

    def _tokens(self, usage: Usage) -> _Tokens:
        computed = usage.prompt_tokens - usage.cached_tokens
        return {
            "input_tokens": 0 if self._is_marked else computed,
            "cache_creation_input_tokens": computed if self._is_marked else 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }

    def end(self, choice: Choice) -> MessageEnd:
        """Why the message ended."""
        stopped_by = choice.stopped_by if isinstance(choice.stopped_by, str) else None
        return {"stop_reason": self._stop_reason(choice), "stop_sequence": stopped_by}

    def _stop_reason(self, choice: Choice) -> StopReason:
        if isinstance(choice.stopped_by, str):
            return "stop_sequence"
        if choice.finish_reason is FinishReason.LENGTH:
            return "max_tokens" if self._has_all_tokens else "model_context_window_exceeded"
        if choice.finish_reason is FinishReason.REPETITION:
            return "max_tokens"  # of those that there are, the one that says that it is incomplete
        return "tool_use" if choice.calls and not choice.cut_off_call else "end_turn"


def _content(block: Block, text: str) -> ContentBlock:
    """A block with this text, which is empty where the block begins."""
    match block.kind:
        case "call":
            given = as_arguments(text)
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": given}
        case "reasoning":
            signature = SIGNATURE if text else ""
            return {"type": "thinking", "thinking": text, "signature": signature}
        case "text":
            return {"type": "text", "text": text}


_DELTAS = {
    "text": b'{"type":"text_delta","text":%b}',
    "reasoning": b'{"type":"thinking_delta","thinking":%b}',
    "call": b'{"type":"input_json_delta","partial_json":%b}',
}
_SIGNED = b'{"type":"signature_delta","signature":%b}' % to_json(SIGNATURE)
_PING = sse_event("ping", b'{"type":"ping"}')


class MessageWriter(StreamWriter):
    """The events of one message.

    Until its first token or the first keep-alive nothing is written, and an error has a status of
    its own.
    """

    media_type = EVENT_STREAM

    def __init__(self, form: MessageForm, choice: Choice) -> None:
        self._form = form
        self._choice = choice
        self._has_begun = False

    def write(self, choice: int, steps: Sequence[Step]) -> bytes:
        n_before = 0 if self._form.compacted is None else 1
        return self.begin() + b"".join(_block_event(step, n_before) for step in steps)

    def progress(self, body: ProgressBody) -> bytes:
        return self.begin() + _event({"type": "ping", "prompt_progress": body})

    def keep_alive(self) -> bytes:
        return self.begin() + _PING

    def failure(self, error: ApiError) -> bytes:
        return sse_event("error", wire_json(messages_error(error, self._form.request_id)))

    def end(self, usage: AnswerUsage) -> bytes:
        delta: MessageDelta = {
            "type": "message_delta",
            "delta": self._form.end(self._choice),
            "usage": self._form.usage(usage),
        }
        return _event(delta) + _event({"type": "message_stop"})

    def begin(self) -> bytes:
        """The message's first events, once the number of cached tokens is known."""
        admission = self._choice.admission
        if self._has_begun or admission is None:
            return b""
        self._has_begun = True
        message = self._form.message([], self._form.usage(admission), None)
        compacted = self._form.compacted
        first = b"" if compacted is None else compaction_events(compacted.block)
        return _event({"type": "message_start", "message": message}) + first


def compaction_events(block: CompactionBlock) -> bytes:
    """The events of a summary, which is the first block of its message."""
    begun: CompactionBlock = {**block, "content": None}
    delta: CompactionDelta = {"type": "compaction_delta", "content": block["content"] or ""}
    return (
        _event({"type": "content_block_start", "index": 0, "content_block": begun})
        + _event({"type": "content_block_delta", "index": 0, "delta": delta})
        + _event({"type": "content_block_stop", "index": 0})
    )


def _block_event(step: Step, n_before: int) -> bytes:
    """The event of a block that has n_before others before those of the answer."""
    block, index = step.block, step.block.index + n_before
    if isinstance(step, Grew):
        return _delta_event(index, _DELTAS[block.kind] % to_json(step.text))
    if isinstance(step, Opened):
        content = _content(block, "")
        return _event({"type": "content_block_start", "index": index, "content_block": content})
    signed = _delta_event(index, _SIGNED) if block.kind == "reasoning" else b""
    return signed + _event({"type": "content_block_stop", "index": index})


def _delta_event(index: int, delta: bytes) -> bytes:
    return sse_event(
        "content_block_delta",
        b'{"type":"content_block_delta","index":%d,"delta":%b}' % (index, delta),
    )


def _event(event: MessageEvent) -> bytes:
    return sse_event(event["type"], to_json(event))
