"""An Exchange of Responses, whole and streamed."""

from collections.abc import Sequence
from itertools import count

from engine.types.output import FinishReason, OutputEvent
from server.dialects.openai import wire_finish_reason
from server.dialects.responses.envelope import response_news, response_usage
from server.dialects.responses.output.answer import ResponseAnswer
from server.dialects.responses.output.items import Output
from server.dialects.responses.output.spliced import spliced_json
from server.dialects.responses.task import ResponsesTask
from server.errors import ApiError
from server.schemas.responses.events import ItemNews
from server.schemas.responses.response import ResponseNews
from server.transport.unsent import kept_bytes


class ResponsesExchange:
    """An Exchange of one response, which has one sequence."""

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
        """The response, which is kept."""
        (answer,) = choices
        return self.task.keep(self.news(answer))

    def news(self, answer: ResponseAnswer) -> ResponseNews:
        """What an answer came to."""
        wire_finish_reason(answer.finish_reason)  # or it has none
        is_cut_off = answer.finish_reason is FinishReason.LENGTH
        return response_news(
            "incomplete" if is_cut_off else "completed",
            answer.output.items,
            usage=response_usage(self.meter),
        )


class ResponsesWriter:
    """A StreamWriter of typed events.

    Comments do not keep every client waiting (Codex counts events alone), so a keep-alive says
    again that the response is in progress.
    """

    def __init__(self, exchange: ResponsesExchange) -> None:
        self._exchange = exchange
        self._envelope = exchange.task.envelope
        self._answer = exchange.new_choice()
        self._has_begun = False

    def events(self, choice: int, events: Sequence[OutputEvent]) -> bytes:
        news = [event for event in events if event.admission is None]
        if not news:
            return b""  # until there is a token, an error has a status of its own
        return self._opening() + b"".join(map(_frame, self._answer.news(news)))

    def kept_bytes(self, events: Sequence[OutputEvent]) -> int:
        """The last events repeat the whole answer."""
        return sum(map(kept_bytes, events))

    def keep_alive(self) -> bytes:
        return self._opening() or self._status("response.in_progress", self._in_progress())

    def failure(self, error: ApiError) -> bytes:
        news = response_news("failed", self._answer.output.items, error=error)
        return self._opening() + self._status("response.failed", self._exchange.task.keep(news))

    def end(self) -> bytes:
        news = self._exchange.news(self._answer)
        return self._status(f"response.{news.status}", self._exchange.task.keep(news))

    def _opening(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        begun = self._in_progress()
        return self._status("response.created", begun) + self._status("response.in_progress", begun)

    def _in_progress(self) -> bytes:
        return self._envelope.json(response_news("in_progress"))

    def _status(self, type: str, response: bytes) -> bytes:
        number = next(self._exchange.numbers)
        head = f'event: {type}\ndata: {{"type":"{type}","sequence_number":{number},"response":'
        return head.encode() + response + b"}\n\n"


def _frame(event: ItemNews) -> bytes:
    return f"event: {event.type}\ndata: ".encode() + spliced_json(event) + b"\n\n"
