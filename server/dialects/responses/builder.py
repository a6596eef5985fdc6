"""Responses of `/v1/responses`, whole and streamed."""

from collections.abc import Sequence
from itertools import count

from engine.values.output import FinishReason, OutputEvent
from server.dialects.dialect import generated
from server.dialects.openai import wire_finish_reason
from server.dialects.responses.output.answer import ResponseAnswer
from server.dialects.responses.output.items import Output
from server.dialects.responses.output.rendered_json import rendered_json
from server.dialects.responses.response_object import response_state, response_usage
from server.dialects.responses.task import ResponsesTask
from server.errors import ApiError
from server.schemas.responses.events import OutputItemEvent
from server.schemas.responses.response import ResponseState
from server.transport.sse import EVENT_STREAM, sse_event
from server.transport.unsent import kept_bytes


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
