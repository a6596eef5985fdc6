"""Answers as Ollama sends them: line by line or whole, with durations, and vectors."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from pydantic import BaseModel

from engine.api import Engine
from engine.values.output import FinishReason, OutputEvent, TokenLogprob
from engine.values.request import Request
from server.dialects.base import as_arguments, generated, wire_json
from server.dialects.errors import ollama_error
from server.dialects.logprobs import chat_logprobs
from server.dialects.ollama.schema import (
    DoneReason,
    OllamaAnswer,
    OllamaChatAnswer,
    OllamaFunction,
    OllamaGenerateAnswer,
    OllamaMessage,
    OllamaToolCall,
    OllamaVector,
    OllamaVectors,
)
from server.errors import ApiError
from server.generation.answer import WrittenCall
from server.generation.chat_task import ChatTask
from server.generation.completion_task import CompletionTask
from server.generation.embedding_task import EmbeddingTask
from server.generation.events import UsageMeter
from server.generation.models import ServedModel
from server.generation.pooled import PooledText
from server.generation.vectors import vector
from server.http.sse import NDJSON, json_line
from server.parsing.parts import AnswerPart, CallArguments, CallBegun, Content, Reasoning


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """The part of an answer in one line, or all of it. Its first call is number `first_call`."""

    content: str = ""
    thinking: str = ""
    calls: Sequence[WrittenCall] = field(default_factory=tuple)
    first_call: int = 0


class Shape(Protocol):
    """Makes a line of a part of the answer and the fields around it."""

    def __call__(self, delta: AnswerDelta, /, **fields: Any) -> OllamaAnswer: ...


def chat_answer(delta: AnswerDelta, /, **fields: Any) -> OllamaAnswer:
    extras: dict[str, Any] = {"thinking": delta.thinking} if delta.thinking else {}
    if delta.calls:
        extras["tool_calls"] = [
            _call(index, call) for index, call in enumerate(delta.calls, delta.first_call)
        ]
    message = OllamaMessage(role="assistant", content=delta.content, **extras)
    return OllamaChatAnswer(message=message, **fields)


def generate_answer(delta: AnswerDelta, /, **fields: Any) -> OllamaAnswer:
    extras = {"thinking": delta.thinking} if delta.thinking else {}
    return OllamaGenerateAnswer(response=delta.content, **extras, **fields)


def _call(index: int, call: WrittenCall) -> OllamaToolCall:
    arguments = as_arguments(call.arguments)
    function = OllamaFunction(index=index, name=call.name, arguments=arguments)
    return OllamaToolCall(id=call.id, function=function)


class Answer(Protocol):
    """Takes in a sequence's events: a ChatAnswer, or a TextAnswer."""

    calls: list[WrittenCall]
    finish_reason: FinishReason

    @property
    def content(self) -> str: ...

    @property
    def reasoning(self) -> str: ...

    def add_all(self, events: Iterable[OutputEvent]) -> list[AnswerPart]:
        """The parts that the events complete together."""
        ...


class TextAnswer:
    """The answer to a raw prompt, in which nothing is looked for."""

    reasoning = ""

    def __init__(self) -> None:
        self.calls: list[WrittenCall] = []
        self.finish_reason = FinishReason.LENGTH
        self._texts: list[str] = []

    @property
    def content(self) -> str:
        return "".join(self._texts)

    def add_all(self, events: Iterable[OutputEvent]) -> list[AnswerPart]:
        texts = []
        for event in events:
            texts.append(event.text)
            self.finish_reason = event.finish_reason or self.finish_reason
        self._texts += texts
        return [Content(text)] if (text := "".join(texts)) else []


class Stopwatch:
    """When a request arrived, was submitted to the engine, and had its first token."""

    def __init__(self) -> None:
        self._arrived_ns = self._submitted_ns = time.perf_counter_ns()
        self._first_token_ns: int | None = None

    def submitted(self) -> None:
        self._submitted_ns = time.perf_counter_ns()

    def first_token(self) -> None:
        if self._first_token_ns is None:
            self._first_token_ns = time.perf_counter_ns()

    def durations(self) -> dict[str, int]:
        """The answer's durations, now that it has ended."""
        now = time.perf_counter_ns()
        first = now if self._first_token_ns is None else self._first_token_ns
        return {
            "total_duration": now - self._arrived_ns,
            "load_duration": self._submitted_ns - self._arrived_ns,
            "prompt_eval_duration": first - self._submitted_ns,
            "eval_duration": now - first,
        }


class TimedAnswer:
    """An answer on a stopwatch. One that is not streamed keeps its log-probabilities."""

    def __init__(self, answer: Answer, watch: Stopwatch) -> None:
        self.answer = answer
        self.logprobs: list[TokenLogprob] = []
        self._watch = watch

    def add(self, event: OutputEvent) -> None:
        self.logprobs += event.logprobs
        self.add_all([event])

    def add_all(self, events: Sequence[OutputEvent]) -> list[AnswerPart]:
        """The parts that the events complete together."""
        if generated(events):
            self._watch.first_token()
        return self.answer.add_all(events)

    @property
    def done_reason(self) -> DoneReason:
        return "length" if self.answer.finish_reason is FinishReason.LENGTH else "stop"


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
        watch.submitted()
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
        delta = AnswerDelta(answer.content, answer.reasoning, answer.calls)
        return wire_json(self.last(delta, choice.done_reason, **self.logprobs(choice.logprobs)))

    def line(self, delta: AnswerDelta, **fields: Any) -> OllamaAnswer:
        """A part of an answer that goes on."""
        return self._shape(delta, **_head(self._model), done=False, **fields)

    def last(self, delta: AnswerDelta, reason: DoneReason, **fields: Any) -> OllamaAnswer:
        """The end of an answer, with what it took."""
        usage = self.meter.total
        return self._shape(
            delta,
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
    return shape(AnswerDelta(), **_head(model), done=True, done_reason=reason)


def empty_line(model: str, shape: Shape) -> bytes:
    """A line of a stream that goes on, without text: every client adds nothing to its answer."""
    return _line(shape(AnswerDelta(), **_head(model), done=False))


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
        lines = [delta for part in parts for delta in self._deltas(part)]
        if output[-1].finish_reason is not None:
            lines += self._calls()
        entries = [entry for event in output for entry in event.logprobs]
        if entries and not lines:
            lines.append(AnswerDelta())
        logprobs = self._builder.logprobs(entries)  # of all the lines, in the first of them
        return b"".join(
            _line(self._builder.line(delta, **({} if index else logprobs)))
            for index, delta in enumerate(lines)
        )

    def kept_bytes(self, events: Sequence[OutputEvent]) -> int:
        return 0

    def keep_alive(self) -> bytes:
        """A line that says nothing: clients read each as JSON."""
        return _line(self._builder.line(AnswerDelta()))

    def failure(self, error: ApiError) -> bytes:
        return json_line(wire_json(ollama_error(error)))

    def end(self) -> bytes:
        return _line(self._builder.last(AnswerDelta(), self._choice.done_reason))

    def _deltas(self, part: AnswerPart) -> Iterator[AnswerDelta]:
        match part:
            case Content(text):
                yield from self._calls()
                yield AnswerDelta(content=text)
            case Reasoning(text):
                yield from self._calls()
                yield AnswerDelta(thinking=text)
            case CallBegun():
                yield from self._calls()
                self._begun += 1
            case CallArguments():
                pass  # they are in the answer

    def _calls(self) -> Iterator[AnswerDelta]:
        """The calls that have begun, which are complete."""
        if self._written < self._begun:
            calls = self._choice.answer.calls[self._written : self._begun]
            yield AnswerDelta(calls=calls, first_call=self._written)
            self._written = self._begun


def _line(answer: OllamaAnswer) -> bytes:
    return json_line(wire_json(answer))


class OllamaEmbeddingBuilder(ABC):
    """A ResponseBuilder of embeddings, in the order of the texts."""

    def __init__(self, task: EmbeddingTask, watch: Stopwatch) -> None:
        watch.submitted()
        self.engine = task.model.engine
        self.requests = task.requests
        self.meter = task.meter
        self.task = task
        self.watch = watch

    def new_choice(self) -> PooledText:
        return PooledText()

    def whole(self, choices: Sequence[PooledText]) -> bytes:
        task = self.task
        found = (vector(one.pooled, task.embedder, task.body.dimensions) for one in choices)
        return wire_json(self.answer([each.tolist() for each in found]))

    @abstractmethod
    def answer(self, vectors: list[list[float]]) -> BaseModel: ...


class EmbedBuilder(OllamaEmbeddingBuilder):
    """The answer of `/api/embed`."""

    def answer(self, vectors: list[list[float]]) -> OllamaVectors:
        durations = self.watch.durations()
        return OllamaVectors(
            model=self.task.model.name,
            embeddings=vectors,
            total_duration=durations["total_duration"],
            load_duration=durations["load_duration"],
            prompt_eval_count=self.meter.total.prompt_tokens,
        )


class EmbeddingsBuilder(OllamaEmbeddingBuilder):
    """The answer of `/api/embeddings`, of one text."""

    def answer(self, vectors: list[list[float]]) -> OllamaVector:
        (embedding,) = vectors
        return OllamaVector(embedding=embedding)
