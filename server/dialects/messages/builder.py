"""Responses of `/v1/messages`, whole and streamed."""

from collections.abc import Sequence

from engine.values.output import FinishReason, OutputEvent, Usage
from server.dialects.dialect import generated, wire_json
from server.dialects.messages.blocks import BlockStream, WholeMessage
from server.dialects.messages.errors import messages_error
from server.errors import ApiError
from server.generation.answer import ChatAnswer
from server.generation.chat_task import ChatTask
from server.schemas.messages.answer import (
    Block,
    MessageBody,
    MessageDelta,
    MessageEnd,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    StopReason,
    ThoughtTokens,
)
from server.transport.sse import EVENT_STREAM, sse_event

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
