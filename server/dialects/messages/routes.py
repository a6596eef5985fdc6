"""`POST /v1/messages`, whole and streamed: the blocks of an answer as content blocks; and
`/v1/messages/count_tokens`.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, get_args

from pydantic import BaseModel, Field
from pydantic_core import to_json
from typing_extensions import TypedDict

from engine.values.output import FinishReason, Usage
from engine.values.request import Request
from server.dialects.endpoint import Endpoints, named_events
from server.dialects.error_shapes import MessagesError, messages_error
from server.dialects.job import Job, StreamWriter, as_arguments, wire_json
from server.dialects.messages.read import as_chat, conversation
from server.dialects.messages.schema import CountTokensRequest, MessagesRequest
from server.errors import ApiError
from server.generation.choice import AnswerUsage, Block, Choice, Grew, Opened, Step
from server.generation.images import with_images
from server.generation.progress import ProgressBody
from server.generation.requests import ServedModel, prepare_chat, without_output
from server.http.stream import EVENT_STREAM, sse_event
from server.json_model import AnswerType
from server.record import RequestRecord

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class ThoughtTokens(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    """The prompt's tokens are the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThoughtTokens


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


ContentBlock: TypeAlias = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")
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


class TokenCount(BaseModel):
    input_tokens: int


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


Delta: TypeAlias = Annotated[
    TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta, Field(discriminator="type")
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


class MessageForm:
    """Writes one request's message."""

    def __init__(self, model: str, request: Request, max_tokens: int, *, is_marked: bool) -> None:
        """`max_tokens` is the value that the client requested. If the prompt `is_marked` (has
        `cache_control`), its computed tokens are reported as written to the cache.
        """
        self.request_id = request.id
        self._model = model
        self._is_marked = is_marked
        self._has_all_tokens = request.max_tokens == max_tokens

    def whole(self, choices: Sequence[Choice], usage: AnswerUsage) -> bytes:
        """The JSON of a MessageBody."""
        (choice,) = choices
        content = [_content(block, block.text) for block in choice.blocks]
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
        computed = usage.prompt_tokens - usage.cached_tokens
        thought = usage.reasoning_tokens if isinstance(usage, AnswerUsage) else 0
        return {
            "input_tokens": 0 if self._is_marked else computed,
            "cache_creation_input_tokens": computed if self._is_marked else 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": thought},
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
        return self._begin() + b"".join(map(_block_event, steps))

    def progress(self, body: ProgressBody) -> bytes:
        return self._begin() + _event({"type": "ping", "prompt_progress": body})

    def keep_alive(self) -> bytes:
        return self._begin() + _PING

    def failure(self, error: ApiError) -> bytes:
        return sse_event("error", wire_json(messages_error(error, self._form.request_id)))

    def end(self, usage: AnswerUsage) -> bytes:
        delta: MessageDelta = {
            "type": "message_delta",
            "delta": self._form.end(self._choice),
            "usage": self._form.usage(usage),
        }
        return _event(delta) + _event({"type": "message_stop"})

    def _begin(self) -> bytes:
        """The message's first event, once the number of cached tokens is known."""
        admission = self._choice.admission
        if self._has_begun or admission is None:
            return b""
        self._has_begun = True
        message = self._form.message([], self._form.usage(admission), None)
        return _event({"type": "message_start", "message": message})


def _block_event(step: Step) -> bytes:
    block = step.block
    if isinstance(step, Grew):
        return _delta_event(block, _DELTAS[block.kind] % to_json(step.text))
    if isinstance(step, Opened):
        content = _content(block, "")
        return _event(
            {"type": "content_block_start", "index": block.index, "content_block": content}
        )
    signed = _delta_event(block, _SIGNED) if block.kind == "reasoning" else b""
    return signed + _event({"type": "content_block_stop", "index": block.index})


def _delta_event(block: Block, delta: bytes) -> bytes:
    return sse_event(
        "content_block_delta",
        b'{"type":"content_block_delta","index":%d,"delta":%b}' % (block.index, delta),
    )


def _event(event: MessageEvent) -> bytes:
    return sse_event(event["type"], to_json(event))


router = Endpoints()


@router.generation(
    "/v1/messages",
    body=MessagesRequest,
    answer=MessageBody,
    stream=named_events(MESSAGE_EVENTS),
)
def create_message(body: MessagesRequest, model: ServedModel, record: RequestRecord) -> Job:
    chat = as_chat(body, model, record)
    is_marked = model.settings.engine.prefix_cache and record.cache_marks > 0
    request, plan = prepare_chat(chat, model, record)
    if body.max_tokens == 0:  # the prompt alone is computed, and cached
        request = without_output(request)
    max_tokens = 0 if body.is_prewarm else body.max_tokens
    form = MessageForm(model.name, request, max_tokens, is_marked=is_marked)
    writer = form.writer if body.stream else None
    return Job(model=model, requests=[request], plan=plan, render=form.whole, writer=writer)


@router.direct("/v1/messages/count_tokens", body=CountTokensRequest, answer=TokenCount)
def count_tokens(body: CountTokensRequest, model: ServedModel, record: RequestRecord) -> TokenCount:
    """The number of prompt tokens that the same request to /v1/messages would have."""
    salt = record.cache_salt(body.cache_salt)
    shown = with_images(conversation(body, model), model.engine, record)
    prompt = model.prompts.chat(shown, model.replays, salt)
    return TokenCount(input_tokens=len(prompt.tokens))
