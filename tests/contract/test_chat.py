"""Chat completions as the OpenAI client sees them."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletionChunk

from engine.values.request import TEXT_BEFORE_TOKENS
from server.dialects.chat.schema import ChatRequest
from server.dialects.openai import Message
from tests.contract.conftest import ChatBody
from tests.contract.fake_engine import VOCAB_SIZE, FakeEngine, Script
from tests.contract.scripted import StrictClient

MESSAGES = [{"role": "user", "content": "Hi"}]
ANSWER = "Hello, wörld!"


pytestmark = pytest.mark.usefixtures("engine")  # each test starts from the default script


def test_answer_has_every_key_of_the_api(http: httpx.Client, chat: ChatBody) -> None:
    body = http.post("/v1/chat/completions", json=chat()).json()
    assert set(body) == {
        *("id", "object", "created", "model", "system_fingerprint", "choices", "usage")
    }
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["system_fingerprint"] == "fp_bytes"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]


def test_n_choices_count_the_prompt_once(
    client: StrictClient, model: str, engine: FakeEngine
) -> None:
    engine.script = Script(answers=("a", "bcd"))
    answer = client.chat.completions.create(model=model, messages=MESSAGES, n=2)
    assert [choice.message.content for choice in answer.choices] == ["a", "bcd"]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.prompt_tokens == len("<user>Hi\n<assistant>")
    assert answer.usage.completion_tokens == 4


def test_logprobs_name_bytes_and_alternatives(
    client: StrictClient, model: str, engine: FakeEngine
) -> None:
    engine.script = Script(answers=("ö",))
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    first, second = answer.choices[0].logprobs.content
    assert first.bytes + second.bytes == list("ö".encode())
    assert first.token == r"bytes:\xc3"
    assert len(first.top_logprobs) == 2
    assert answer.choices[0].logprobs.refusal is None


def test_parts_and_developer_reach_the_template_as_text_and_system(
    client: StrictClient, model: str, engine: FakeEngine
) -> None:
    client.chat.completions.create(
        model=model,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("one", "two")]},
        ],
    )
    prompt = bytes(engine.submitted.get_nowait().prompt).decode()
    assert prompt == "<system>Be brief.\n<user>one\ntwo\n<assistant>"


def test_a_refusal_in_the_history_is_what_the_assistant_said(
    client: StrictClient, http: httpx.Client, model: str, engine: FakeEngine
) -> None:
    refusal: dict[str, Any] = {"type": "refusal", "refusal": "I cannot."}
    parts = [{"type": "text", "text": "No."}, refusal]
    client.chat.completions.create(
        model=model,
        messages=[*MESSAGES, {"role": "assistant", "content": parts}, *MESSAGES],
    )
    prompt = bytes(engine.submitted.get_nowait().prompt).decode()
    assert prompt == "<user>Hi\n<assistant>No.\nI cannot.\n<user>Hi\n<assistant>"
    of_user = http.post(
        "/v1/chat/completions",
        json={"model": model, "messages": [{"role": "user", "content": [refusal]}]},
    )
    assert (of_user.status_code, of_user.json()["error"]["param"]) == (
        400,
        "messages[0].content[0].type",
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"refusal": "I cannot."}, "I cannot."),
        ({"content": "", "refusal": "I cannot."}, "I cannot."),
        ({"content": "No.", "refusal": "I cannot."}, "No.\nI cannot."),
        ({"content": "No.", "refusal": None}, "No."),
    ],
    ids=str,
)
def test_the_refusal_of_a_message_is_what_the_assistant_said(
    http: httpx.Client, model: str, engine: FakeEngine, fields: dict[str, Any], said: str
) -> None:
    messages = [*MESSAGES, {"role": "assistant", **fields}, *MESSAGES]
    answer = http.post("/v1/chat/completions", json={"model": model, "messages": messages})
    assert answer.status_code == 200
    prompt = bytes(engine.submitted.get_nowait().prompt).decode()
    assert prompt == f"<user>Hi\n<assistant>{said}\n<user>Hi\n<assistant>"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_names_its_tier_where_the_request_does(
    http: httpx.Client, chat: ChatBody, stream: bool
) -> None:
    for asked, said in ({"service_tier": "flex"}, "default"), ({}, None):
        answer = http.post("/v1/chat/completions", json=chat(stream=stream, **asked))
        bodies = [answer.text]
        if stream:
            bodies = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        objects = [json.loads(body.removeprefix("data: ")) for body in bodies]
        assert objects
        assert {one.get("service_tier") for one in objects} == {said}


def test_a_message_that_is_continued_is_the_text_before_the_answer(
    http: httpx.Client, chat: ChatBody, engine: FakeEngine
) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    for is_continued in (False, True):
        body = chat(
            messages=messages,
            continue_final_message=is_continued,
            add_generation_prompt=not is_continued,
        )
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        request = engine.submitted.get_nowait()
        assert request.text_before == (
            tuple(request.prompt[-TEXT_BEFORE_TOKENS:]) if is_continued else ()
        )


def test_assistant_with_tool_calls_may_have_null_content(
    http: httpx.Client, chat: ChatBody
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
    ]
    assert http.post("/v1/chat/completions", json=chat(messages=messages)).status_code == 200


def test_every_optional_field_may_be_null(http: httpx.Client, chat: ChatBody) -> None:
    fields = dict.fromkeys(ChatRequest.model_fields.keys() - {"messages"})
    assert http.post("/v1/chat/completions", json={**fields, **chat()}).status_code == 200


def test_null_is_absent_at_every_depth(http: httpx.Client, chat: ChatBody) -> None:
    function = {"name": "f", "description": None, "parameters": None, "strict": None}
    call = {"id": None, "type": None, "function": {"name": "f", "arguments": None}}
    nulls = dict.fromkeys(Message.model_fields.keys() - {"role", "content"})
    messages = [
        {**nulls, "role": "user", "content": "Hi"},
        {**nulls, "role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
        {**nulls, "role": "tool", "content": "x", "tool_call_id": "c"},
    ]
    fields = {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "none",
        "response_format": {"type": "text", "json_schema": None},
        "structured_outputs": {"regex": "a", "json": None, "choice": None},
        "stream": True,
        "stream_options": {"include_usage": None},
    }
    answer = http.post("/v1/chat/completions", json=chat(messages=messages, **fields))
    assert answer.status_code == 200, answer.text


IGNORED = {
    "store": True,
    "metadata": {"a": "b"},
    "user": "me",
    "service_tier": "flex",
    "safety_identifier": "x",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "verbosity": "low",
    "reasoning_effort": "low",
    "x": [1, {}],
    "web_search_options": {},
    "audio": {"voice": "a", "format": "wav"},
    "length_penalty": 2.0,
    "use_beam_search": False,
    "documents": [],
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "prompt_logprobs": 1,
    "return_token_ids": True,
}


def test_fields_that_mean_nothing_here_are_accepted(
    http: httpx.Client, chat: ChatBody, engine: FakeEngine
) -> None:
    for fields in ({}, IGNORED):
        assert http.post("/v1/chat/completions", json=chat(**fields)).status_code == 200
    plain, ignoring = (engine.submitted.get_nowait() for _ in range(2))
    assert replace(ignoring, id=plain.id) == plain


LARGEST = {
    "n": 128,
    "temperature": 2,
    "top_p": 1,
    "presence_penalty": 2,
    "frequency_penalty": 2,
    "logit_bias": {str(token): 100 for token in range(VOCAB_SIZE)},
    "logprobs": True,
    "top_logprobs": 20,
    "seed": 2**64 - 1,
    "max_tokens": 1,
}
SMALLEST = {
    "n": 1,
    "temperature": 0,
    "presence_penalty": -2,
    "frequency_penalty": -2,
    "logit_bias": {"0": -100},
    "seed": -(2**63),
    "max_tokens": 1,
}


@pytest.mark.parametrize("fields", [LARGEST, SMALLEST], ids=["largest", "smallest"])
def test_values_at_their_limits(http: httpx.Client, chat: ChatBody, fields: dict[str, Any]) -> None:
    answer = http.post("/v1/chat/completions", json=chat(**fields))
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(fields["n"]))


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_the_tokens_that_may_be_generated_reach_the_engine(
    http: httpx.Client, chat: ChatBody, engine: FakeEngine, path: str, prompt: dict[str, str]
) -> None:
    """A word is ruled out as it begins a text and as it follows a space. White space before it
    does not count, as in vLLM, but where there is nothing else.
    """
    fields = {"allowed_token_ids": [66, 65, 65.0], "bad_words": ["ab", " ab", "\nc", "\n"]}
    assert http.post(path, json=chat(**fields, **prompt)).status_code == 200
    sampling = engine.submitted.get_nowait().sampling
    assert sampling.allowed_token_ids == frozenset({65, 66})
    assert sampling.bad_words == tuple(
        tuple(text.encode()) for text in ("ab", " ab", "c", " c", "\n")
    )


def test_sampling_fields_reach_the_engine(
    http: httpx.Client, chat: ChatBody, engine: FakeEngine
) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -1,
        "frequency_penalty": 1,
        "logit_bias": {"65": -100},
        "seed": -1,
        "min_tokens": 2,
    }
    flags = {"ignore_eos": True, "stop_token_ids": [3]}
    body = chat(**fields, **flags, max_tokens=9, max_completion_tokens=7, stop="x", cache_salt="s")
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    request = engine.submitted.get_nowait()
    assert (request.max_tokens, request.stop, request.cache_salt) == (7, ("x",), "s")
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens"):
        assert getattr(request.sampling, name) == fields[name]
    assert dict(request.sampling.logit_bias) == {65: -100}
    assert request.sampling.seed == 2**64 - 1
    assert (request.ignore_eos, set(request.stop_token_ids)) == (True, {3})


def test_max_tokens_is_what_the_context_leaves(
    http: httpx.Client, chat: ChatBody, engine: FakeEngine
) -> None:
    http.post("/v1/chat/completions", json=chat())
    http.post("/v1/chat/completions", json=chat(max_tokens=100_000))
    for _ in range(2):
        request = engine.submitted.get_nowait()
        assert len(request.prompt) + request.max_tokens == engine.card.max_context_tokens


def stream(client: StrictClient, model: str, **fields: object) -> list[ChatCompletionChunk]:
    return list(
        client.chat.completions.create(model=model, messages=MESSAGES, stream=True, **fields)
    )


def test_stream_begins_with_the_role_and_says_the_same(client: StrictClient, model: str) -> None:
    chunks = stream(client, model)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_stream_ends_each_choice_once(client: StrictClient, model: str, engine: FakeEngine) -> None:
    engine.script = Script(answers=("a", "bcd", "ef"))
    chunks = stream(client, model, n=3, max_tokens=2)
    ends = [(c.choices[0].index, c.choices[0].finish_reason) for c in chunks]
    assert sorted(end for end in ends if end[1] is not None) == [
        *((0, "stop"), (1, "length"), (2, "length"))
    ]
    roles = [c.choices[0].index for c in chunks if c.choices[0].delta.role]
    assert sorted(roles) == [0, 1, 2]


def lines(http: httpx.Client, body: dict[str, Any]) -> list[str]:
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [line for line in answer.text.split("\n\n") if line]


def test_stream_usage_only_when_asked_for(http: httpx.Client, chat: ChatBody) -> None:
    plain = lines(http, chat(stream=True))
    assert plain[-1] == "data: [DONE]"
    assert not any('"usage"' in line for line in plain)
    asked = lines(http, chat(stream=True, stream_options={"include_usage": True}))
    assert all('"usage":null' in line for line in asked[:-2])
    assert '"choices":[]' in asked[-2]
    assert f'"completion_tokens":{len(ANSWER.encode())}' in asked[-2]
    assert asked[-1] == "data: [DONE]"


def test_a_stream_and_a_whole_answer_have_the_same_usage(
    http: httpx.Client, chat: ChatBody
) -> None:
    body = chat(messages=[{"role": "user", "content": "twice"}], n=2)
    http.post("/v1/chat/completions", json=body)
    whole = http.post("/v1/chat/completions", json=body).json()["usage"]
    streamed = lines(http, {**body, "stream": True, "stream_options": {"include_usage": True}})
    last = json.loads(streamed[-2].removeprefix("data: "))
    assert (last["choices"], last["usage"]) == ([], whole)
    assert whole["prompt_tokens_details"]["cached_tokens"] == whole["prompt_tokens"] - 1


def test_finish_reason_is_a_key_of_every_chunk(http: httpx.Client, chat: ChatBody) -> None:
    assert all('"finish_reason":' in line for line in lines(http, chat(stream=True))[:-1])


def test_stream_logprobs_cover_every_token(http: httpx.Client, chat: ChatBody) -> None:
    events = lines(http, chat(stream=True, logprobs=True))[:-1]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    entries = [e for choice in choices if choice["logprobs"] for e in choice["logprobs"]["content"]]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == ANSWER.encode()
