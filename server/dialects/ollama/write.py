"""Answers as Ollama sends them: line by line or whole, with durations, and vectors."""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from pydantic_core import to_json

from engine.values.model import Tokenizer
from engine.values.output import FinishReason
from engine.values.request import Request
from server.dialects.error_shapes import ollama_error
from server.dialects.job import Job, StreamWriter, as_arguments, wire_json
from server.dialects.ollama.schema import (
    DoneReason,
    OllamaAnswer,
    OllamaChatContent,
    OllamaGenerateContent,
    OllamaMessage,
    OllamaToolCall,
    OllamaVector,
    OllamaVectors,
)
from server.dialects.openai_logprobs import TokenLogprobBody, chat_logprobs
from server.errors import ApiError
from server.generation.choice import AnswerUsage, Block, Choice, Closed, Grew, Step
from server.generation.plan import AnswerPlan
from server.generation.pooling import vector
from server.generation.progress import ProgressBody
from server.generation.requests import ServedModel
from server.http.stream import NDJSON, json_line

Shape = Callable[[str, str, Sequence[Block]], OllamaChatContent | OllamaGenerateContent]
"""Makes the fields that have some content, reasoning and calls."""


def chat_shape(content: str, thinking: str = "", calls: Sequence[Block] = ()) -> OllamaChatContent:
    """The content of an answer of `/api/chat`."""
    message: OllamaMessage = {"role": "assistant", "content": content}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = [_tool_call(call) for call in calls]
    return {"message": message}


def generate_shape(
    content: str, thinking: str = "", calls: Sequence[Block] = ()
) -> OllamaGenerateContent:
    """The content of an answer of `/api/generate`, which has no calls."""
    fields: OllamaGenerateContent = {"response": content}
    if thinking:
        fields["thinking"] = thinking
    return fields


def _tool_call(call: Block) -> OllamaToolCall:
    arguments = as_arguments(call.text)
    return {
        "id": call.call_id,
        "function": {"index": call.call_index, "name": call.name, "arguments": arguments},
    }


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
        last = self.last(choice, usage)
        if logprobs := self.logprobs(choice):
            last["logprobs"] = logprobs
        return to_json({**last, **self.shape(choice.content, choice.reasoning, calls)})

    def writer(self, choices: Sequence[Choice]) -> "OllamaWriter":
        """The writer of a stream of the one choice."""
        (choice,) = choices
        return OllamaWriter(self, choice, self._model)

    def last(self, choice: Choice, usage: AnswerUsage) -> OllamaAnswer:
        """A finished answer with its durations and counts, without its content."""
        now = time.perf_counter_ns()
        first_output_ns = choice.first_output_ns or now
        return {
            "model": self._model,
            "created_at": datetime.now(UTC),
            "done": True,
            "done_reason": "stop" if choice.finish_reason is FinishReason.STOP else "length",
            "total_duration": now - self._arrived_ns,
            "load_duration": self._submitted_ns - self._arrived_ns,
            "prompt_eval_duration": first_output_ns - self._submitted_ns,
            "eval_duration": now - first_output_ns,
            "prompt_eval_count": usage.prompt_tokens,
            "eval_count": usage.completion_tokens,
        }

    def logprobs(self, choice: Choice) -> list[TokenLogprobBody]:
        """The log-probabilities of the tokens since the last call."""
        return chat_logprobs(self._tokenizer, choice.take_logprobs())


def without_answer(model: str, shape: Shape, reason: DoneReason) -> bytes:
    """The answer to a request that only loads a model, or unloads it."""
    answer: OllamaAnswer = {
        "model": model,
        "created_at": datetime.now(UTC),
        "done": True,
        "done_reason": reason,
    }
    return to_json({**answer, **shape("", "", ())})


def empty_line(model: str, shape: Shape) -> bytes:
    """A line of a stream without text, which clients append to the answer without effect."""
    return _line(to_json(model), _members(shape("", "", ())))


def _line(model: bytes, members: bytes) -> bytes:
    """A line of an unfinished stream with these members, which are JSON."""
    created = to_json(datetime.now(UTC))
    return json_line(b'{"model":%b,"created_at":%b,"done":false,%b}' % (model, created, members))


def _members(fields: Mapping[str, object]) -> bytes:
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
        first = b'"logprobs":%b,' % to_json(logprobs) if logprobs else b""
        lines = list[bytes]()
        for step in steps:
            if members := self._step(step):
                lines.append(_line(self._model, first + members))
                first = b""
        if first:
            lines.append(_line(self._model, first + self._empty))
        return b"".join(lines)

    def progress(self, body: ProgressBody) -> bytes:
        return _line(self._model, _members({"prompt_progress": body}) + b"," + self._empty)

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


Vectors = list[list[float]]


def vectors_job(
    model: ServedModel,
    requests: Sequence[Request],
    dimensions: int | None,
    answer: Callable[[Vectors, AnswerUsage], OllamaVectors | OllamaVector],
) -> Job:
    """The job of embeddings in the order of the texts, of which `answer` makes the answer."""
    embedder = model.engine.card.embedder
    assert embedder is not None

    def render(choices: Sequence[Choice], usage: AnswerUsage) -> bytes:
        vectors = [vector(choice.pooled, embedder, dimensions).tolist() for choice in choices]
        return to_json(answer(vectors, usage))

    return Job(model=model, requests=requests, render=render)


class EmbedForm:
    """Writes the answer of `/api/embed`. Its times count from the submission of the request."""

    def __init__(self, model: str, arrived_ns: int) -> None:
        self._model = model
        self._arrived_ns = arrived_ns
        self._submitted_ns = time.perf_counter_ns()

    def answer(self, vectors: Vectors, usage: AnswerUsage | None) -> OllamaVectors:
        """The vectors and the durations. There is no usage where there was no text."""
        return {
            "model": self._model,
            "embeddings": vectors,
            "total_duration": time.perf_counter_ns() - self._arrived_ns,
            "load_duration": self._submitted_ns - self._arrived_ns,
            "prompt_eval_count": usage.prompt_tokens if usage else 0,
        }


def one_vector(vectors: Vectors, usage: AnswerUsage) -> OllamaVector:
    """The answer of `/api/embeddings`, which embeds one text."""
    (embedding,) = vectors
    return {"embedding": embedding}
