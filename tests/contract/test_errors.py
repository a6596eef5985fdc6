"""Everything that is refused: the status, the field at fault, four keys always."""

import gzip
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from server.settings import Settings
from tests.contract.conftest import ChatBody
from tests.contract.daemon import running
from tests.contract.fake_engine import CARD, FakeEngine

pytestmark = pytest.mark.usefixtures("engine")  # each test starts from the default script


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]
MANY_CALLS = [{"function": {"name": "f"}}] * 1025
NAMED_G = {"type": "function", "function": {"name": "g"}}
SCHEMALESS = {"type": "json_schema", "json_schema": {"name": "s"}}
TOOL = {"type": "function", "function": {"name": "f"}}


def allowed(mode: str, *tools: object) -> dict[str, object]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


BAD_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"role": "system", "content": None}]}, "messages[0]"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
    ({"messages": user(5)}, "messages[0].content"),
    ({"messages": user(IMAGE)}, "messages[0].content[0]"),
    ({"messages": user([{"type": "text"}])}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "name": "nobody", "content": "x"}]}, "messages"),
    ({"messages": user("x") * 10_001}, "messages"),
    ({"messages": user([{"type": "text", "text": ""}] * 1001)}, "messages[0].content"),
    (
        {"messages": [{"role": "assistant", "tool_calls": MANY_CALLS}]},
        "messages[0].tool_calls",
    ),
    ({"model": 5}, "model"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": -0.01}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-37}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.5}, "n"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": ["x" * 512] * 9}, "stop"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": "x" * 513}, "stop[0]"),
    ({"stop_token_ids": [257]}, "stop_token_ids"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"max_completion_tokens": -2}, "max_completion_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"logit_bias": {"257": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
    ({"logit_bias": {"a": 1}}, "logit_bias.a"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"²": 1}}, "logit_bias.²"),
    ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": {"x" * 10_000: 1}}, "logit_bias." + "x" * 117),
    ({"model": "x" * 257}, "model"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [65, 257]}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**4000]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": ["a"]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": [65] * 4097}, "allowed_token_ids"),
    ({"allowed_token_ids": [256], "min_tokens": 1}, "allowed_token_ids"),
    (
        {
            "allowed_token_ids": [98, 97],
            "stop_token_ids": [98],
            "min_tokens": 1,
            "bad_words": ["a"],
        },
        "allowed_token_ids",
    ),
    ({"allowed_token_ids": [97, 98], "bad_words": ["a", "b"]}, "bad_words"),
    ({"bad_words": "a"}, "bad_words"),
    ({"bad_words": ["a", ""]}, "bad_words[1]"),
    ({"bad_words": ["x" * 129]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"modalities": ["text"] * 17}, "modalities"),
    ({"tools": [TOOL] * 1025, "tool_choice": "none"}, "tools"),
    ({"seed": 10**4000}, "seed"),
    ({"stop_token_ids": [10**4000]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"cache_salt": 1}, "cache_salt"),
    ({"prompt_cache_options": {"ttl": "nonsense"}}, "prompt_cache_options.ttl"),
    ({"prompt_cache_options": {"mode": "nonsense"}}, "prompt_cache_options.mode"),
    ({"priority": 1001}, "priority"),
    ({"speculate": "auto"}, "speculate"),
    ({"prediction": "Hi"}, "prediction"),
    ({"prediction": {"content": "Hi"}}, "prediction.type"),
    ({"prediction": {"type": "file", "content": "Hi"}}, "prediction.type"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    (
        {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
        "prediction.content[0].type",
    ),
    ({"prediction": {"type": "content", "content": "x" * 513}}, "prediction"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [1] * 900}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "perhaps"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": NAMED_G}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": 5}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [TOOL], "tool_choice": allowed("auto", TOOL, NAMED_G)}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
    ({"tools": [TOOL], "tool_choice": allowed("none", TOOL)}, "tool_choice.allowed_tools.mode"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": SCHEMALESS}, "response_format.json_schema.schema"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a"] * 1025}, "guided_choice"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_json": 1}, "guided_json"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
    ({"thinking_budget": -1}, "thinking_budget"),
    ({"reasoning_effort": "x" * 33}, "reasoning_effort"),
    ({"reasoning_effort": "zzz"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {str(i): 0 for i in range(65)}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs.a"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
]

REFUSED: list[tuple[dict[str, object], str]] = [
    ({"use_beam_search": True}, "use_beam_search"),
    ({"logits_processors": ["a.b"]}, "logits_processors"),
    ({"thinking_token_budget": 10}, "thinking_token_budget"),
    ({"guided_whitespace_pattern": "[ ]*"}, "guided_whitespace_pattern"),
    ({"structural_tag": "{}"}, "structural_tag"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    (
        {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
    ),
]
"""What vLLM has besides that would change an answer, of a chat or a text completion."""

UNSUPPORTED_CHAT = [
    ({"tools": [TOOL]}, "tools"),  # the fake engine's model has no format of calls
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"thinking_budget": 10}, "thinking_budget"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"documents": [{"title": "A", "text": "b"}]}, "documents"),
    *REFUSED,
    ({"messages": user(IMAGE)}, "messages[0].content[0]"),
]

BAD_COMPLETIONS = [
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", []]}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [257]}, "prompt"),
    ({"prompt": [10**4000]}, "prompt"),
    ({"prompt": ["a"] * 257}, "prompt"),
    ({"prompt": ["a"] * 3, "n": 100}, "n"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 21}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"echo": "yes"}, "echo"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"tools": [TOOL]}, "tools"),
    ({"allowed_token_ids": [257]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words[0]"),
    *REFUSED,
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT)
def test_bad_chat_is_a_400_that_names_the_field(
    http: httpx.Client, chat: ChatBody, engine: FakeEngine, fields: dict[str, object], param: str
) -> None:
    answer = post(http, "/v1/chat/completions", {**chat(), **fields})
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    assert engine.submitted.empty()


@pytest.mark.parametrize(("fields", "param"), UNSUPPORTED_CHAT)
def test_what_is_not_there_yet_is_refused_not_ignored(
    http: httpx.Client, chat: ChatBody, fields: dict[str, object], param: str
) -> None:
    error = error_of(post(http, "/v1/chat/completions", chat(**fields)))
    assert (error["code"], error["param"]) == ("unsupported", param)


def test_a_limit_is_in_the_error(http: httpx.Client, chat: ChatBody) -> None:
    for fields, limit in (
        ({"allowed_token_ids": [65] * 4097}, "4096"),
        ({"allowed_token_ids": [257]}, "256"),
        ({"bad_words": ["x"] * 129}, "128"),
        ({"bad_words": ["x" * 129]}, "128"),
    ):
        assert limit in error_of(post(http, "/v1/chat/completions", chat(**fields)))["message"]


def test_tools_that_may_not_be_called_do_no_harm(http: httpx.Client, chat: ChatBody) -> None:
    answer = post(http, "/v1/chat/completions", chat(tools=[TOOL], tool_choice="none"))
    assert answer.status_code == 200


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS)
def test_bad_completion_is_a_400_that_names_the_field(
    http: httpx.Client, model: str, engine: FakeEngine, fields: dict[str, object], param: str
) -> None:
    answer = post(http, "/v1/completions", {"model": model, "prompt": "a", **fields})
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    assert engine.submitted.empty()


def post(http: httpx.Client, path: str, body: object) -> httpx.Response:
    """As clients with a lenient JSON writer do: NaN and half surrogates as they are."""
    headers = {"Content-Type": "application/json"}
    return http.post(path, content=json.dumps(body), headers=headers)


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "br, gzip"])
def test_a_compressed_body_is_a_415_that_names_the_header(
    http: httpx.Client, encoding: str
) -> None:
    path = "/v1/chat/completions"
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    refused = http.post(path, content=gzip.compress(b"{}"), headers=headers)
    assert refused.status_code == 415
    assert f"Content-Encoding: '{encoding}'" in refused.json()["error"]["message"]
    plain = {"Content-Type": "application/json", "Content-Encoding": "identity"}
    assert http.post(path, content=b"{}", headers=plain).status_code == 400


def test_message_names_the_limit(http: httpx.Client, chat: ChatBody) -> None:
    error = error_of(post(http, "/v1/chat/completions", chat(temperature=3)))
    assert error["message"] == "temperature: Input should be less than or equal to 2"


DEEP = '{"model": null, "messages": ' + "[" * 100_000 + "]" * 100_000 + "}"
DEEP_ARGUMENTS = '{"a": ' * 500 + "1" + "}" * 500
DEEP_CALL = '{"messages": [{"role": "assistant", "tool_calls": [' + DEEP_ARGUMENTS + "]}]}"
LONG = '{"seed": ' + "1" * 5000 + "}"
HI = '"messages": [{"role": "user", "content": "Hi"}]}'
BROKEN_BODIES = [
    "",
    "{",
    "[]",
    "5",
    "null",
    '"x"',
    "{'a': 1}",
    "\x00",
    DEEP,
    DEEP_CALL,
    LONG,
    '{"n": 1e999999}',
    '{"n": 1, "n": 2, ' + HI,
    '{"temperature": NaN, ' + HI,
    '{"temperature": Infinity, ' + HI,
    '{"unknown": -Infinity, ' + HI,
    '{"unknown": {"\\udfff": 1, "\\udfff": 2}, ' + HI,
    '{"model": "a" ' + HI,
    "{" + HI + " {}",
]


@pytest.mark.parametrize("content", BROKEN_BODIES, ids=range(len(BROKEN_BODIES)))
def test_broken_bodies_are_400(http: httpx.Client, content: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = http.post("/v1/chat/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert error_of(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (r"a\ud83d", "a\ufffd"),
        (r"\ude00\ud83d\n", "\ufffd\ufffd\n"),
        (r"\ud83d\ude00 \\ud83d", "\U0001f600 \\ud83d"),
    ],
)
def test_half_a_character_is_a_replacement_character(
    http: httpx.Client, text: str, read: str
) -> None:
    """Clients cut texts off between the halves of a surrogate pair."""
    headers = {"Content-Type": "application/json"}
    content = f'{{"prompt": "{text}", "unknown": {{"\\udfff": 1}}}}'
    answer = http.post("/tokenize", content=content, headers=headers)
    assert bytes(answer.json()["tokens"]).decode() == read


def test_not_utf8_is_400(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/json"}
    answer = http.post("/v1/chat/completions", content=b'{"model": "\xff"}', headers=headers)
    assert answer.status_code == 400
    message = error_of(answer)["message"]
    assert message.endswith("invalid unicode code point at line 1 column 12.")


def test_body_must_say_that_it_is_json(http: httpx.Client, chat: ChatBody) -> None:
    """A web page can post text/plain to localhost without asking; JSON it cannot."""
    headers = {"Content-Type": "text/plain"}
    answer = http.post("/v1/chat/completions", content=json.dumps(chat()), headers=headers)
    assert answer.status_code == 400
    assert "application/json, not 'text/plain'" in error_of(answer)["message"]


@pytest.mark.parametrize("content_type", [None, "application/vnd.api+json", "Application/JSON;a=b"])
def test_body_that_says_nothing_else_is_json(
    http: httpx.Client, chat: ChatBody, content_type: str | None
) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    content = b"\xef\xbb\xbf" + json.dumps(chat()).encode()  # as Windows' editors begin a file
    answer = http.post("/v1/chat/completions", content=content, headers=headers)
    assert answer.status_code == 200


def test_one_form_of_an_answer_at_a_time(http: httpx.Client, chat: ChatBody) -> None:
    body = chat(guided_regex="a", guided_choice=["b"])
    error = error_of(post(http, "/v1/chat/completions", body))
    assert error["message"] == "only one of guided_regex and guided_choice can be asked for"


def test_no_name_is_the_first_models(http: httpx.Client, chat: ChatBody) -> None:
    for name in (None, ""):
        assert post(http, "/v1/chat/completions", chat(model=name)).status_code == 200


def test_a_prompt_may_fill_the_context_where_nothing_is_generated(
    http: httpx.Client, model: str
) -> None:
    full = {"model": model, "prompt": "x" * CARD.max_context_tokens}
    assert post(http, "/v1/completions", full).status_code == 400
    assert post(http, "/v1/completions", full | {"max_tokens": 0}).status_code == 200


def test_context_length_exceeded_names_the_cache_where_that_is_smaller() -> None:
    engine = FakeEngine(card=replace(CARD, arena_tokens=100))
    with running(engine, Settings(port=0)) as base_url:
        body = {"prompt": "x" * 101}
        error = error_of(httpx.post(f"{base_url}/v1/completions", json=body))
    beginning = "This model's maximum context length is 100 tokens, all that the KV cache holds"
    assert error["message"].startswith(beginning)
    assert "101 tokens" in error["message"]


def test_unknown_url_and_method(http: httpx.Client) -> None:
    answer = http.get("/v1/nothing")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "unknown_url")
    assert "no GET /v1/nothing;" in error_of(answer)["message"]
    answer = http.get("/v1/chat/completions")
    assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/health", "/openapi.json", "/v1/models", "/v1/models/a/b"])
def test_what_may_be_got_may_be_asked_for_its_head(http: httpx.Client, path: str) -> None:
    answer = http.delete(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert error_of(answer)["message"] == "This path is served for GET, HEAD, not for DELETE."


def test_request_id_is_the_servers_own(http: httpx.Client) -> None:
    ids = {
        http.get("/health", headers={"X-Request-Id": "mine"}).headers["x-request-id"]
        for _ in range(2)
    }
    assert len(ids) == 2
    assert "mine" not in ids
