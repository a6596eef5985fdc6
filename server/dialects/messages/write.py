"""Messages, whole and streamed: the parts of an answer as content blocks."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from engine.values.output import FinishReason, OutputEvent, Usage
from server.dialects.base import as_arguments, generated, wire_json
from server.dialects.errors import messages_error
from server.dialects.messages.answer import (
    Block,
    BlockDelta,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageBody,
    MessageDelta,
    MessageEnd,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SignatureDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ThoughtTokens,
    ToolUseBlock,
)
from server.errors import ApiError
from server.generation.answer import ChatAnswer
from server.generation.chat_task import ChatTask
from server.http.sse import EVENT_STREAM, sse_event
from server.parsing.parts import AnswerPart, CallArguments, CallBegun, Content, Reasoning

SIGNATURE = "cm9vdHN0b2Nr"
"""The signature of all thinking blocks. Clients send it back, and it is never checked."""

BlockEvent: TypeAlias = ContentBlockStart | ContentBlockDelta | ContentBlockStop


def _continues(part: AnswerPart, last: AnswerPart | None) -> bool:
    """Whether a part belongs to the same block as the last one."""
    match part:
        case CallBegun():
            return False
        case CallArguments():
            return True
        case _:
            return type(part) is type(last)


class BlockStream:
    """The events of one answer's blocks, one block after the other."""

    def __init__(self) -> None:
        self._index = -1
        self._last: AnswerPart | None = None

    def events(self, parts: Iterable[AnswerPart]) -> Iterator[BlockEvent]:
        for part in parts:
            if not _continues(part, self._last):
                yield from self.close()
                self._index += 1
                yield ContentBlockStart(
                    type="content_block_start", index=self._index, content_block=_begun(part)
                )
            self._last = part
            if (delta := _delta(part)) is not None:
                yield self._delta(delta)

    def close(self) -> Iterator[BlockEvent]:
        """The end of the open block, if there is one."""
        if isinstance(self._last, Reasoning):
            yield self._delta(SignatureDelta(type="signature_delta", signature=SIGNATURE))
        if self._last is not None:
            yield ContentBlockStop(type="content_block_stop", index=self._index)
        self._last = None

    def _delta(self, delta: BlockDelta) -> ContentBlockDelta:
        return ContentBlockDelta(type="content_block_delta", index=self._index, delta=delta)


def _begun(part: AnswerPart) -> Block:
    match part:
        case CallBegun(_, id, name):
            return ToolUseBlock(type="tool_use", id=id, name=name, input={})
        case Reasoning():
            return ThinkingBlock(type="thinking", thinking="", signature="")
        case _:
            return TextBlock(type="text", text="")


def _delta(part: AnswerPart) -> BlockDelta | None:
    match part:
        case Content(text):
            return TextDelta(type="text_delta", text=text)
        case Reasoning(text):
            return ThinkingDelta(type="thinking_delta", thinking=text)
        case CallArguments(_, text):
            return InputJsonDelta(type="input_json_delta", partial_json=text)
        case CallBegun():
            return None


class WholeMessage:
    """The blocks of an answer that is not streamed."""

    def __init__(self, answer: ChatAnswer) -> None:
        self.answer = answer
        self._last: AnswerPart | None = None
        self._blocks: list[tuple[AnswerPart, list[str]]] = []  # a first part and texts

    def add(self, event: OutputEvent) -> None:
        for part in self.answer.add(event):
            if not _continues(part, self._last):
                self._blocks.append((part, []))
            self._last = part
            if not isinstance(part, CallBegun):
                self._blocks[-1][1].append(part.text)

    def blocks(self) -> list[Block]:
        return [_block(first, "".join(texts)) for first, texts in self._blocks]


def _block(first: AnswerPart, text: str) -> Block:
    match first:
        case CallBegun(_, id, name):
            return ToolUseBlock(type="tool_use", id=id, name=name, input=as_arguments(text))
        case Reasoning():
            return ThinkingBlock(type="thinking", thinking=text, signature=SIGNATURE)
        case _:
            return TextBlock(type="text", text=text)


PING = Ping(type="ping")


class MessagesBuilder:
    """A StreamingBuilder of Messages, for a request with this `max_tokens`. The tokens of a prompt
    that were computed are reported as written to the cache if the prompt `is_marked` (has
    `cache_control`).
    """

    def __init__(self, task: ChatTask, max_tokens: int, *, is_marked: bool) -> None:
        self.engine = task.model.engine
        self.requests = [task.request]
        self.meter = task.meter
        self.is_streamed = task.chat.sampling.stream
        self.new_answer = task.new_answer
        self.request_id = task.request.id
        self._model = task.model.name
        self._is_marked = is_marked
        self._has_all_tokens = task.request.max_tokens == max_tokens

    def writer(self) -> "MessageWriter":
        return MessageWriter(self)

    def new_choice(self) -> WholeMessage:
        return WholeMessage(self.new_answer())

    def whole(self, choices: Sequence[WholeMessage]) -> bytes:
        (choice,) = choices
        end = self.end(choice.answer)
        usage, blocks = self.total_usage(), choice.blocks()
        return wire_json(self.message(blocks, usage, end.stop_reason, end.stop_sequence))

    def message(
        self,
        content: list[Block],
        usage: MessageUsage,
        stop_reason: StopReason | None = None,
        stop_sequence: str | None = None,
    ) -> MessageBody:
        return MessageBody(
            id=f"msg_{self.request_id}",
            type="message",
            role="assistant",
            model=self._model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=usage,
        )

    def total_usage(self) -> MessageUsage:
        return self.usage(self.meter.total)

    def usage(self, usage: Usage) -> MessageUsage:
        computed = usage.prompt_tokens - usage.cached_tokens
        return MessageUsage(
            input_tokens=0 if self._is_marked else computed,
            cache_creation_input_tokens=computed if self._is_marked else 0,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            output_tokens_details=ThoughtTokens(thinking_tokens=self.meter.reasoning_tokens),
        )

    def end(self, answer: ChatAnswer) -> MessageEnd:
        stopped_by = answer.stopped_by if isinstance(answer.stopped_by, str) else None
        return MessageEnd(stop_reason=self._stop_reason(answer), stop_sequence=stopped_by)

    def _stop_reason(self, answer: ChatAnswer) -> StopReason:
        if isinstance(answer.stopped_by, str):
            return "stop_sequence"
        if answer.finish_reason is FinishReason.LENGTH:
            return "max_tokens" if self._has_all_tokens else "model_context_window_exceeded"
        return "tool_use" if answer.calls else "end_turn"


class MessageWriter:
    """A StreamWriter of one message's events.

    Until its first token or the first keep-alive nothing is written, and an error has a status of
    its own.
    """

    media_type = EVENT_STREAM

    def __init__(self, builder: MessagesBuilder) -> None:
        self._builder = builder
        self._answer = builder.new_answer()
        self._blocks = BlockStream()
        self._admission: Usage | None = None
        self._has_begun = False

    def events(self, choice: int, events: Sequence[OutputEvent]) -> bytes:
        self._admission = events[0].admission or self._admission
        output = generated(events)
        if not output:
            return b""
        begin = self._begin()
        blocks = [*self._blocks.events(self._answer.add_all(output))]
        if output[-1].finish_reason is not None:
            blocks += self._blocks.close()
        return begin + b"".join(map(_event, blocks))

    def kept_bytes(self, events: Sequence[OutputEvent]) -> int:
        return 0

    def keep_alive(self) -> bytes:
        return self._begin() + _event(PING)

    def failure(self, error: ApiError) -> bytes:
        return _event(messages_error(error, self._builder.request_id))

    def end(self) -> bytes:
        builder = self._builder
        delta = MessageDelta(
            type="message_delta", delta=builder.end(self._answer), usage=builder.total_usage()
        )
        return _event(delta) + _event(MessageStop(type="message_stop"))

    def _begin(self) -> bytes:
        """The message's first event, once the number of cached tokens is known."""
        if self._has_begun or self._admission is None:
            return b""
        self._has_begun = True
        message = self._builder.message([], self._builder.usage(self._admission))
        return _event(MessageStart(type="message_start", message=message))


def _event(event: MessageEvent) -> bytes:
    return sse_event(event.type, wire_json(event))
