"""Answers as Ollama sends them: line by line or whole, with durations, and vectors."""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic_core import to_json

from engine.values.model import Tokenizer
from engine.values.output import FinishReason
from engine.values.request import Request
from server.dialects.errors import ollama_error
from server.dialects.job import Job, StreamWriter, as_arguments, wire_json
from server.dialects.ollama.schema import DoneReason
from server.dialects.openai import chat_logprobs
from server.errors import ApiError
from server.generation.choice import AnswerUsage, Block, Choice, Closed, Grew, Step
from server.generation.plan import AnswerPlan
from server.generation.pooling import vector
from server.generation.requests import ServedModel
from server.http.stream import NDJSON, json_line

Fields = dict[str, Any]
"""Of a JSON object."""

Shape = Callable[[str, str, Sequence[Block]], Fields]
"""Makes the fields that have some content, reasoning and calls."""


def chat_shape(content: str, thinking: str = "", calls: Sequence[Block] = ()) -> Fields:
    """The fields of an OllamaChatAnswer."""
    message: Fields = {"role": "assistant", "content": content}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = [_tool_call(call) for call in calls]
    return {"message": message}


def generate_shape(content: str, thinking: str = "", calls: Sequence[Block] = ()) -> Fields:
    """The fields of an OllamaGenerateAnswer, which has no calls."""
    return {"response": content, **({"thinking": thinking} if thinking else {})}


def _tool_call(call: Block) -> Fields:
    arguments = as_arguments(call.text)
    function = {"index": call.call_index, "name": call.name, "arguments": arguments}
    return {"id": call.call_id, "function": function}


def answer_job(
    model: ServedModel,
    requests: Sequence[Request],
    plan: AnswerPlan | None,
    shape: Shape,
    arrived_ns: int,
    *,
    is_streamed: bool,
) -> Job:
    """The job of one answer. `arrived_ns` is when its request came, of `time.perf_counter_ns`."""
    form = OllamaForm(model, shape, arrived_ns)
    return Job(
        model=model,
        requests=requests,
        plan=plan,
        render=form.whole,
        writer=form.writer if is_streamed else None,
    )


class OllamaForm:
    """Writes one answer. Its times count from the submission of the request."""

    def __init__(self, model: ServedModel, shape: Shape, arrived_ns: int) -> None:
        self.shape = shape
        self._model = model.name
        self._tokenizer: Tokenizer = model.engine.tokenizer
        self._arrived_ns = arrived_ns
        self._submitted_ns = time.perf_counter_ns()

    def whole(self, choices: Sequence[Choice], usage: AnswerUsage) -> bytes:
        """The JSON of an OllamaAnswer. A call that is cut off is left out, as Ollama does."""
        (choice,) = choices
        calls = [call for call in choice.calls if call is not choice.cut_off_call]
        fields = self.shape(choice.content, choice.reasoning, calls)
        return to_json({**self.last(choice, usage), **self.logprobs(choice), **fields})

    def writer(self, choices: Sequence[Choice]) -> "OllamaWriter":
        """The writer of a stream of the one choice."""
        (choice,) = choices
        return OllamaWriter(self, choice, self._model)

    def last(self, choice: Choice, usage: AnswerUsage) -> Fields:
        """The fields of a finished answer, with its durations and counts."""
        return {
            **_head(self._model),
            "done": True,
            "done_reason": "stop" if choice.finish_reason is FinishReason.STOP else "length",
            **self._durations(choice),
            "prompt_eval_count": usage.prompt_tokens,
            "eval_count": usage.completion_tokens,
        }

    def logprobs(self, choice: Choice) -> Fields:
        """The field with the log-probabilities since the last call; none where there are none."""
        entries = choice.take_logprobs()
        return {"logprobs": chat_logprobs(self._tokenizer, entries)} if entries else {}

    def _durations(self, choice: Choice) -> Fields:
        now = time.perf_counter_ns()
        first_output_ns = choice.first_output_ns or now
        return {
            "total_duration": now - self._arrived_ns,
            "load_duration": self._submitted_ns - self._arrived_ns,
            "prompt_eval_duration": first_output_ns - self._submitted_ns,
            "eval_duration": now - first_output_ns,
        }


def without_answer(model: str, shape: Shape, reason: DoneReason) -> bytes:
    """The answer to a request that only loads a model, or unloads it."""
    return to_json({**_head(model), "done": True, "done_reason": reason, **shape("", "", ())})


def empty_line(model: str, shape: Shape) -> bytes:
    """A line of a stream without text, which clients append to the answer without effect."""
    return _line(to_json(model), _members(shape("", "", ())))


def _head(model: str) -> Fields:
    return {"model": model, "created_at": datetime.now(UTC)}


def _line(model: bytes, members: bytes) -> bytes:
    """A line of an unfinished stream with these members, which are JSON."""
    created = to_json(datetime.now(UTC))
    return json_line(b'{"model":%b,"created_at":%b,"done":false,%b}' % (model, created, members))


def _members(fields: Fields) -> bytes:
    """The JSON of an object without its braces."""
    return to_json(fields)[1:-1]


_BLANK = "\0"


class OllamaWriter(StreamWriter):
    """The lines of one answer. Calls come whole, each when it is complete; one that is cut off does
    not come.
    """

    media_type = NDJSON

    def __init__(self, form: OllamaForm, choice: Choice, model: str) -> None:
        self._form = form
        self._choice = choice
        self._model = to_json(model)
        self._empty = _members(form.shape("", "", ()))
        self._around = {
            "text": _members(form.shape(_BLANK, "", ())).split(to_json(_BLANK)),
            "reasoning": _members(form.shape("", _BLANK, ())).split(to_json(_BLANK)),
        }
        """The text before and after a block's text in the JSON of a line, by its kind."""

    def write(self, choice: int, steps: Sequence[Step]) -> bytes:
        """See StreamWriter. The first line has the log-probabilities of all of them."""
        logprobs = self._form.logprobs(self._choice)
        first = b"%b," % _members(logprobs) if logprobs else b""
        lines = list[bytes]()
        for step in steps:
            if members := self._step(step):
                lines.append(_line(self._model, first + members))
                first = b""
        if first:
            lines.append(_line(self._model, first + self._empty))
        return b"".join(lines)

    def keep_alive(self) -> bytes:
        """A line that says nothing: clients read each as JSON."""
        return _line(self._model, self._empty)

    def failure(self, error: ApiError) -> bytes:
        return json_line(wire_json(ollama_error(error)))

    def end(self, usage: AnswerUsage) -> bytes:
        last = {**self._form.last(self._choice, usage), **self._form.shape("", "", ())}
        return json_line(to_json(last))

    def _step(self, step: Step) -> bytes:
        """The members of a line that have the step; empty where it has no line."""
        block = step.block
        if block.kind == "call":
            is_whole = isinstance(step, Closed) and block is not self._choice.cut_off_call
            return _members(self._form.shape("", "", [block])) if is_whole else b""
        if not isinstance(step, Grew):
            return b""
        before, after = self._around[block.kind]
        return before + to_json(step.text) + after


Vectors = Sequence[Sequence[float]]


def vectors_job(
    model: ServedModel,
    requests: Sequence[Request],
    dimensions: int | None,
    fields: Callable[[Vectors, AnswerUsage], Fields],
) -> Job:
    """The job of embeddings in the order of the texts. `fields` makes the answer of them."""
    embedder = model.engine.card.embedder
    assert embedder is not None

    def render(choices: Sequence[Choice], usage: AnswerUsage) -> bytes:
        vectors = [vector(choice.pooled, embedder, dimensions).tolist() for choice in choices]
        return to_json(fields(vectors, usage))

    return Job(model=model, requests=requests, render=render)


class EmbedForm:
    """Writes the answer of `/api/embed`. Its times count from the submission of the request."""

    def __init__(self, model: str, arrived_ns: int) -> None:
        self._model = model
        self._arrived_ns = arrived_ns
        self._submitted_ns = time.perf_counter_ns()

    def fields(self, vectors: Vectors, usage: AnswerUsage | None) -> Fields:
        """The fields of an OllamaVectors. There is no usage where there was no text."""
        return {
            "model": self._model,
            "embeddings": vectors,
            "total_duration": time.perf_counter_ns() - self._arrived_ns,
            "load_duration": self._submitted_ns - self._arrived_ns,
            "prompt_eval_count": usage.prompt_tokens if usage else 0,
        }


def one_vector(vectors: Vectors, usage: AnswerUsage) -> Fields:
    """The fields of an OllamaVector, the answer of `/api/embeddings`, of one text."""
    (embedding,) = vectors
    return {"embedding": embedding}
