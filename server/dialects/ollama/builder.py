"""Answers of `/api/chat` and `/api/generate`, whole and as lines of JSON."""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from engine.api import Engine
from engine.values.output import OutputEvent, TokenLogprob
from engine.values.request import Request
from server.dialects.dialect import generated, wire_json
from server.dialects.logprobs import chat_logprobs
from server.dialects.ollama.answer import Answer, Stopwatch, TextAnswer, TimedAnswer
from server.dialects.ollama.errors import ollama_error
from server.dialects.ollama.shapes import Said, Shape, generate_answer
from server.errors import ApiError
from server.generation.chat_task import ChatTask
from server.generation.completion_task import CompletionTask
from server.generation.events import UsageMeter
from server.generation.models import ServedModel
from server.parsing.parts import AnswerPart, CallArguments, CallBegun, Content, Reasoning
from server.schemas.ollama.answer import DoneReason, OllamaAnswer
from server.transport.sse import NDJSON, json_line


class OllamaBuilder:
    """A StreamingBuilder of one answer, of which `shape` makes a body."""

    def __init__(
        self,
        model: ServedModel,
        requests: Sequence[Request],
        meter: UsageMeter,
        new_answer: Callable[[], Answer],
        shape: Shape,
        watch: Stopwatch,
        *,
        is_streamed: bool,
    ) -> None:
        watch.asked()
        self.engine: Engine = model.engine
        self.requests = requests
        self.meter = meter
        self.is_streamed = is_streamed
        self._model = model.name
        self._new_answer = new_answer
        self._shape = shape
        self._watch = watch

    def writer(self) -> "OllamaWriter":
        return OllamaWriter(self)

    def new_choice(self) -> TimedAnswer:
        return TimedAnswer(self._new_answer(), self._watch)

    def whole(self, choices: Sequence[TimedAnswer]) -> bytes:
        (choice,) = choices
        answer = choice.answer
        said = Said(answer.content, answer.reasoning, answer.calls)
        return wire_json(self.last(said, choice.done_reason, **self.logprobs(choice.logprobs)))

    def line(self, said: Said, **fields: Any) -> OllamaAnswer:
        """A part of an answer that goes on."""
        return self._shape(said, **_head(self._model), done=False, **fields)

    def last(self, said: Said, reason: DoneReason, **fields: Any) -> OllamaAnswer:
        """The end of an answer, with what it took."""
        usage = self.meter.total
        return self._shape(
            said,
            **_head(self._model),
            done=True,
            done_reason=reason,
            **self._watch.durations(),
            prompt_eval_count=usage.prompt_tokens,
            eval_count=usage.completion_tokens,
            **fields,
        )

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The field of log-probabilities; none where there are none."""
        if not entries:
            return {}
        return {"logprobs": chat_logprobs(self.engine.tokenizer, entries).content}


def chat_builder(task: ChatTask, shape: Shape, watch: Stopwatch) -> OllamaBuilder:
    return OllamaBuilder(
        task.model,
        [task.request],
        task.meter,
        task.new_answer,
        shape,
        watch,
        is_streamed=task.chat.sampling.stream,
    )


def raw_builder(task: CompletionTask, watch: Stopwatch) -> OllamaBuilder:
    return OllamaBuilder(
        task.model,
        task.requests,
        task.meter,
        TextAnswer,
        generate_answer,
        watch,
        is_streamed=task.body.stream,
    )


def without_answer(model: str, shape: Shape, reason: DoneReason) -> OllamaAnswer:
    """The answer to a request that only loads a model, or unloads it."""
    return shape(Said(), **_head(model), done=True, done_reason=reason)


def empty_line(model: str, shape: Shape) -> bytes:
    """A line of a stream that goes on, without text: every client adds nothing to its answer."""
    return _line(shape(Said(), **_head(model), done=False))


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.now(UTC)}


class OllamaWriter:
    """A StreamWriter of lines. Calls come whole, each when it is complete."""

    media_type = NDJSON

    def __init__(self, builder: OllamaBuilder) -> None:
        self._builder = builder
        self._choice = builder.new_choice()
        self._begun = 0  # calls ...
        self._written = 0  # ... and those of them that have been written

    def events(self, choice: int, events: Sequence[OutputEvent]) -> bytes:
        output = generated(events)
        if not output:
            return b""  # until there is a token, an error has a status of its own
        parts = self._choice.add_all(output)
        lines = [said for part in parts for said in self._said(part)]
        if output[-1].finish_reason is not None:
            lines += self._calls()
        entries = [entry for event in output for entry in event.logprobs]
        if entries and not lines:
            lines.append(Said())
        logprobs = self._builder.logprobs(entries)  # of all the lines, in the first of them
        return b"".join(
            _line(self._builder.line(said, **({} if index else logprobs)))
            for index, said in enumerate(lines)
        )

    def kept_bytes(self, events: Sequence[OutputEvent]) -> int:
        return 0

    def keep_alive(self) -> bytes:
        """A line that says nothing: clients read each as JSON."""
        return _line(self._builder.line(Said()))

    def failure(self, error: ApiError) -> bytes:
        return json_line(wire_json(ollama_error(error)))

    def end(self) -> bytes:
        return _line(self._builder.last(Said(), self._choice.done_reason))

    def _said(self, part: AnswerPart) -> Iterator[Said]:
        match part:
            case Content(text):
                yield from self._calls()
                yield Said(content=text)
            case Reasoning(text):
                yield from self._calls()
                yield Said(thinking=text)
            case CallBegun():
                yield from self._calls()
                self._begun += 1
            case CallArguments():
                pass  # they are in the answer

    def _calls(self) -> Iterator[Said]:
        """The calls that have begun, which are complete."""
        if self._written < self._begun:
            calls = self._choice.answer.calls[self._written : self._begun]
            yield Said(calls=calls, first_call=self._written)
            self._written = self._begun


def _line(answer: OllamaAnswer) -> bytes:
    return json_line(wire_json(answer))
