"""Random answers in every dialect: the vendors' own clients read streams, and whole answers, and
what they have read is the same.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from types import SimpleNamespace
from typing import Any, cast

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from ollama import ChatResponse, GenerateResponse
from openai._streaming import SSEDecoder
from openai.lib.streaming._deltas import accumulate_delta
from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion as WholeChat
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from engine.values.output import FinishReason, OutputEvent, TokenLogprob
from engine.values.request import Request
from engine.values.tokens import pack
from server.dialects.chat.routes import ChatForm
from server.dialects.chat.schema import ChatChunk, ChatCompletion, ChatRequest
from server.dialects.completions import (
    Completion,
    CompletionChunk,
    CompletionForm,
    CompletionRequest,
)
from server.dialects.job import Job
from server.dialects.messages.write import MESSAGE_EVENTS, MessageBody, MessageForm
from server.dialects.ollama.schema import OllamaChatAnswer, OllamaGenerateAnswer
from server.dialects.ollama.write import Shape, answer_job, chat_shape, generate_shape
from server.dialects.responses.output import RESPONSE_EVENTS, ResponseBody
from server.dialects.responses.read import ReadInput
from server.dialects.responses.routes import response_form
from server.dialects.responses.schema import ResponsesRequest
from server.dialects.responses.store import ResponseStore
from server.dialects.responses.tools import RequestTools
from server.generation.conversation import Conversation
from server.generation.history import Replays
from server.generation.plan import AnswerPlan
from server.generation.requests import ServedModel
from server.json_model import AnswerType
from server.parsing.reader import AnswerPart, CallArguments, CallBegun, Content, Reasoning
from server.record import Principal, RequestRecord
from tests.contract.fake_engine import FakeEngine
from tests.scripted_answers import TOKEN, events_of, scripted_plan

MODEL = cast(
    ServedModel,
    SimpleNamespace(
        name='a "model"\u2028', fingerprint="fp", engine=FakeEngine(), replays=Replays()
    ),
)
USER = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {"type": "function", "function": {"name": "look"}},
    {"type": "custom", "custom": {"name": "patch"}},
]
LOGPROB = TokenLogprob(TOKEN, -0.5, ((TOKEN, -0.5), (0xE2, float("-inf"))))

Answer = list[AnswerPart]

TEXT = st.text(min_size=1, max_size=12) | st.sampled_from(["\u2028", "\x85", "\0", '"', "\r\n"])
GROWTH = st.builds(Content, TEXT) | st.builds(Reasoning, TEXT)
CALL = st.tuples(st.sampled_from(["look", "patch"]), st.text(max_size=12), st.integers(1, 9))


def parts_of(said: Sequence[AnswerPart | tuple[str, str, int]]) -> Answer:
    """The parts, with each call's arguments cut into slices of a length."""
    parts, index = Answer(), 0
    for one in said:
        if not isinstance(one, tuple):
            parts.append(one)
            continue
        name, text, length = one
        arguments = json.dumps({"input": text}, ensure_ascii=False)
        parts.append(CallBegun(index, f"call_{index}", name))
        parts += [
            CallArguments(index, arguments[at : at + length])
            for at in range(0, len(arguments), length)
        ]
        index += 1
    return parts


ANSWERS = st.lists(GROWTH | CALL, max_size=6).map(parts_of)
TEXTS = st.lists(TEXT, max_size=6).map(lambda texts: Answer(map(Content, texts)))
REASONS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])


class Play:
    """How some answers come: how many events at once, and where nothing comes for a while."""

    def __init__(self, draw: st.DrawFn, answers: Sequence[Answer]) -> None:
        self.answers = answers
        self.logprobs = [LOGPROB] if draw(st.booleans()) else []
        self.reason = draw(REASONS)
        self.batches = draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))

    def events(self, index: int) -> list[OutputEvent]:
        return events_of(self.answers[index], self.reason, 0, self.logprobs)


@st.composite
def plays(draw: st.DrawFn, answers: st.SearchStrategy[Answer], most: int = 1) -> Play:
    return Play(draw, draw(st.lists(answers, min_size=1, max_size=most)))


def streamed(job: Job, play: Play) -> bytes:
    """All bytes of the stream. Choices take turns; a batch of no events is a keep-alive."""
    choices = job.choices()
    assert job.writer is not None
    writer = job.writer(choices)
    waiting = [play.events(index) for index in range(len(choices))]
    written, turn = list[bytes](), 0
    while any(waiting):
        for index, events in enumerate(waiting):
            n_events = play.batches[turn % len(play.batches)]
            turn += 1
            batch, waiting[index] = events[:n_events], events[n_events:]
            if n_events == 0:
                written.append(writer.keep_alive())
                waiting[index], batch = events[1:], events[:1]
            steps = choices[index].feed(batch)
            if batch and choices[index].first_output_ns is not None:
                written.append(writer.write(index, steps))
    return b"".join(written) + writer.end(job.usage(choices))


def whole(job: Job, play: Play) -> bytes:
    choices = job.choices()
    for index, choice in enumerate(choices):
        for event in play.events(index):
            choice.feed([event])
    return job.render(choices, job.usage(choices))


def server_sent(data: bytes) -> Iterator[Any]:
    """The data of each event, as OpenAI's client splits the stream."""
    for event in SSEDecoder().iter_bytes(iter([data])):
        if event.data and event.data != "[DONE]":
            yield json.loads(event.data)


def documented(found: Any, *models: AnswerType) -> Any:
    """The JSON, which is as one of the models in the OpenAPI document has it, and no more."""
    adapter: TypeAdapter[Any] = TypeAdapter(reduce(or_, models))
    read = adapter.validate_json(json.dumps(found))
    assert adapter.dump_python(read, mode="json", exclude_unset=True) == found
    return found


def chat(play: Play, stream: bool, **fields: Any) -> Job:
    body = ChatRequest.model_validate(
        {
            "messages": USER,
            "n": len(play.answers),
            "logprobs": bool(play.logprobs),
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
            **fields,
        }
    )
    request = Request("r", pack((1, 2)), 9, n=body.n)
    return job_of(ChatForm(body, MODEL, "r"), request, scripted_plan(*play.answers), stream)


def job_of(
    form: ChatForm | CompletionForm | MessageForm, request: Request, plan: AnswerPlan, stream: bool
) -> Job:
    writer = form.writer if stream else None
    return Job(model=MODEL, requests=[request], plan=plan, render=form.whole, writer=writer)


@pytest.mark.parametrize(
    "fields",
    [{"tools": TOOLS}, {"functions": [{"name": "look"}], "service_tier": "auto"}],
    ids=["tools", "functions"],
)
@given(play=plays(ANSWERS, most=3))
def test_a_chat_completion(fields: dict[str, Any], play: Play) -> None:
    messages, reasons = [dict[str, Any]() for _ in play.answers], dict[int, str | None]()
    logprobs: list[list[Any]] = [[] for _ in play.answers]
    for data in server_sent(streamed(chat(play, True, **fields), play)):
        chunk = ChatCompletionChunk.construct(**documented(data, ChatChunk))
        for choice in chunk.model_dump(exclude_unset=True)["choices"]:
            logprobs[choice["index"]] += (choice["logprobs"] or {}).get("content", [])
            accumulate_delta(messages[choice["index"]], choice["delta"])
            reasons[choice["index"]] = choice["finish_reason"]
    answer = json.loads(whole(chat(play, False, **fields), play))
    WholeChat.model_validate(documented(answer, ChatCompletion))
    assert data["usage"] == answer["usage"]
    for index, choice in enumerate(answer["choices"]):
        assert messages[index] == as_accumulated(choice["message"])
        assert reasons[index] == choice["finish_reason"]
        assert logprobs[index] == (choice["logprobs"] or {}).get("content", [])


@given(play=plays(ANSWERS))
def test_a_chat_completion_that_repeats_itself_is_documented(play: Play) -> None:
    """OpenAI's client has no such reason."""
    play.reason = FinishReason.REPETITION
    for data in server_sent(streamed(chat(play, True), play)):
        documented(data, ChatChunk)
    answer = documented(json.loads(whole(chat(play, False), play)), ChatCompletion)
    assert answer["choices"][0]["finish_reason"] == "repetition"


def as_accumulated(message: dict[str, Any]) -> dict[str, Any]:
    """A message as a client has it that has read a stream: `content` is a text, and calls have an
    index.
    """
    message = {**message, "content": message["content"] or ""}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{**call, "index": index} for index, call in enumerate(calls)]
    return message


@given(play=plays(TEXTS, most=3), echo=st.sampled_from(["", "before \u2029"]))
def test_a_text_completion(play: Play, echo: str) -> None:
    def job(stream: bool) -> Job:
        fields = {"n": len(play.answers), "stream": stream, "prompt": "Hi"}
        if play.logprobs:
            fields["logprobs"] = 1
        body = CompletionRequest.model_validate(fields)
        request = Request("r-0", pack((72, 105)), 9, n=body.n)
        form = CompletionForm(body, MODEL, [request], [echo], "r")
        return job_of(form, request, scripted_plan(*play.answers), stream)

    read: list[list[Any]] = [[] for _ in play.answers]
    for data in server_sent(streamed(job(True), play)):
        chunk = TextCompletion.construct(**documented(data, CompletionChunk))
        for choice in chunk.choices:
            read[choice.index].append(choice)
    answer = json.loads(whole(job(False), play))
    for choice in TextCompletion.model_validate(documented(answer, Completion)).choices:
        pieces = read[choice.index]
        assert "".join(piece.text for piece in pieces) == choice.text
        assert pieces[-1].finish_reason == choice.finish_reason
        lists = [piece.logprobs.to_dict() for piece in pieces if piece.logprobs]
        whole_lists = choice.logprobs.to_dict() if choice.logprobs else {}
        for name, entries in whole_lists.items():
            assert [entry for one in lists for entry in one[name]] == entries
        assert bool(lists) == bool(whole_lists)


@given(play=plays(ANSWERS), is_marked=st.booleans())
def test_a_message(play: Play, is_marked: bool) -> None:
    def job(stream: bool) -> Job:
        request = Request("r", pack((1, 2)), 9)
        form = MessageForm("m", request, 9, is_marked=is_marked)
        return job_of(form, request, scripted_plan(*play.answers), stream)

    events: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    message, buffers = None, dict[int, bytes]()
    for data in server_sent(streamed(job(True), play)):
        if documented(data, *MESSAGE_EVENTS)["type"] != "ping":
            event = events.validate_python(data)
            message = accumulate_event(event=event, current_snapshot=message, json_bufs=buffers)
    answer = documented(json.loads(whole(job(False), play)), MessageBody)
    Message.model_validate(answer)
    assert message is not None
    assert message.to_dict() == {**answer, "stop_details": None}


@given(
    play=plays(ANSWERS),
    include=st.sets(st.sampled_from(["reasoning.encrypted_content", "file_search_call.results"])),
    reasoning=st.sampled_from([{}, {"summary": "auto"}]),
)
def test_a_response(play: Play, include: set[str], reasoning: dict[str, str]) -> None:
    tools = [{"type": "function", "name": "look"}, {"type": "custom", "name": "patch"}]
    fields = {"input": "Hi", "tools": tools, "include": list(include), "reasoning": reasoning}
    body = ResponsesRequest.model_validate(fields)
    prompt, request = Conversation(messages=[]), Request("r", pack((1, 2)), 9)

    def job(record: RequestRecord, store: ResponseStore) -> Job:
        given = ReadInput(body, prompt, RequestTools(body.tools), (), None, Counter())
        form = response_form(given, request, MODEL, record, store)
        return Job(
            model=MODEL,
            requests=[request],
            render=form.whole,
            writer=form.writer,
            plan=scripted_plan(*play.answers),
            tokenizer=form.tokenizer if play.logprobs else None,
        )

    events: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    record, store = RequestRecord("r", Principal("client")), ResponseStore(9, 1 << 20)
    deltas, logprobs = dict[int, str](), dict[int, list[Any]]()
    for number, data in enumerate(server_sent(streamed(job(record, store), play))):
        event = events.validate_python(documented(data, *RESPONSE_EVENTS))
        assert event.sequence_number == number
        if "delta" in data:
            index = event.output_index
            deltas[index] = deltas.get(index, "") + event.delta
            logprobs.setdefault(index, []).extend(data.get("logprobs", ()))
    stored = store.get(record.key, "resp_r")
    assert stored is not None
    assert json.loads(stored.json) == data["response"]
    answer = documented(json.loads(whole(job(record, store), play)), ResponseBody)
    Response.model_validate(answer)
    times = {"created_at": 0, "completed_at": 0}
    assert {**answer, **times} == {**data["response"], **times}
    for index, item in enumerate(answer["output"]):
        (part,) = (*item.get("content", ()), *item.get("summary", ())) or (item,)
        text = part.get("text", part.get("arguments", part.get("input")))
        assert (text, part.get("logprobs", [])) == (deltas[index], logprobs[index])


@pytest.mark.parametrize(
    ("shape", "model", "vendor"),
    [
        (chat_shape, OllamaChatAnswer, ChatResponse),
        (generate_shape, OllamaGenerateAnswer, GenerateResponse),
    ],
    ids=["chat", "generate"],
)
@given(play=plays(ANSWERS))
def test_an_answer_of_ollama(
    shape: Shape, model: AnswerType, vendor: type[BaseModel], play: Play
) -> None:
    def job(is_streamed: bool) -> Job:
        plan = scripted_plan(*play.answers)
        return answer_job(
            MODEL, [Request("r", pack((1, 2)), 9)], plan, shape, 0, is_streamed=is_streamed
        )

    lines = [json.loads(line) for line in streamed(job(True), play).decode().splitlines()]
    read = [vendor.model_validate(documented(line, model)) for line in lines]
    answer = json.loads(whole(job(False), play))
    documented(answer, model)
    logprobs = [one for line in lines for one in line.get("logprobs", ())]
    assert logprobs == answer.get("logprobs", [])
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    for name in ("done_reason", "prompt_eval_count", "eval_count", "model"):
        assert lines[-1][name] == answer[name]
    assert joined(read) == joined([vendor.model_validate(answer)])


def joined(answers: Sequence[Any]) -> tuple[str, str, list[Any]]:
    """The content, the reasoning and the calls that Ollama's client has read from some answers."""
    messages = [getattr(answer, "message", answer) for answer in answers]
    contents = (
        str(getattr(one, "content", None) or getattr(one, "response", "")) for one in messages
    )
    calls = (getattr(one, "tool_calls", None) or () for one in messages)
    thoughts = (one.thinking or "" for one in messages)
    dumped = [call.model_dump() for each in calls for call in each]
    return "".join(contents), "".join(thoughts), dumped
