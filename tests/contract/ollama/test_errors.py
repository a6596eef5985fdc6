"""Refusals and failures, in Ollama's object everywhere under /api."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.api import InvalidRequest
from tests.contract.access.helpers import client_of, key_file
from tests.contract.fake_engine import ByteTokenizer
from tests.contract.ollama.scripted import OllamaDaemon
from tests.contract.scripted import TOOLS, USER

PICTURE = {"role": "user", "content": "What is it?", "images": ["AAAA"]}


def message_of(answer: httpx.Response) -> str:
    body = answer.json()
    assert set(body) == {"error"}
    return str(body["error"])


CHATS = [
    ({"messages": [PICTURE]}, "messages[0].images[0]"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
    ({"messages": [USER] * 10_001}, "messages"),
    ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "two words"}}]},
        "tools[0].function.name",
    ),
    ({"format": "xml"}, "format"),
    ({"think": "often"}, "think"),
    ({"options": {"temperature": 2.5}}, "options.temperature"),
    ({"options": {"top_k": "many"}}, "options.top_k"),
    ({"options": {"num_predict": -3}}, "options.num_predict"),
    ({"options": {"stop": [""]}}, "options.stop[0]"),
    ({"options": []}, "options"),
    ({"keep_alive": "5 minutes"}, "keep_alive"),
    ({"keep_alive": True}, "keep_alive"),
    ({"top_logprobs": 21}, "top_logprobs"),
]


@pytest.mark.parametrize(("fields", "place"), CHATS, ids=str)
def test_what_is_invalid_is_refused_by_its_name(
    hermes: OllamaDaemon, fields: dict[str, Any], place: str
) -> None:
    answer = hermes.post(**fields)
    assert answer.status_code == 400
    assert message_of(answer).startswith(f"{place}: ")


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"images": ["AAAA"]}, "images[0]"),
        ({"suffix": "end"}, "suffix"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"context": [1, 2]}, "context"),
        ({"raw": True, "logprobs": True, "top_logprobs": 6}, "raw"),
        ({"prompt": 5}, "prompt"),
    ],
    ids=str,
)
def test_what_a_prompt_cannot_have_is_refused(
    hermes: OllamaDaemon, fields: dict[str, Any], place: str
) -> None:
    answer = hermes.post("/api/generate", **fields)
    assert answer.status_code == 400
    assert message_of(answer).startswith(f"{place}: ")


def test_a_model_that_does_not_reason_cannot_be_told_to() -> None:
    with OllamaDaemon.serving(
        ByteTokenizer(), reasoning_parser="none", tool_parser="none"
    ) as plain:
        for path in ("/api/chat", "/api/generate"):
            refused = plain.post(path, think="high")
            assert refused.status_code == 400
            assert message_of(refused) == '"bytes" does not support thinking'
        assert message_of(plain.post(tools=TOOLS)).startswith("tools: ")
        assert plain.post(think=False).status_code == 200


def test_the_engines_refusals_have_ollamas_names(hermes: OllamaDaemon) -> None:
    hermes.say("", refusal=InvalidRequest("stop: no", "stop"))
    assert message_of(hermes.post()) == "options.stop: no"


def test_a_failure_in_mid_stream_is_the_last_line_of_a_generation(hermes: OllamaDaemon) -> None:
    hermes.say("Hello", fails_after_tokens=2)
    *parts, last = hermes.lines("/api/generate")
    assert last == {"error": "it broke"}
    assert len(parts) == 2


@pytest.mark.parametrize("effort", ["", "most", 1, ["high"]])
def test_an_unknown_effort_is_refused_with_the_known_ones(
    hermes: OllamaDaemon, effort: Any
) -> None:
    answer = hermes.post(think=effort)
    assert answer.status_code == 400
    efforts = ["none", "minimal", "low", "medium", "high", "xhigh", "max"]
    known = f"true, false or one of {', '.join(map(repr, efforts))}"
    assert message_of(answer) == f"think: must be {known}"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/chat", {"messages": [USER]}),
        ("/api/chat", {"messages": [], "keep_alive": 0}),
        ("/api/generate", {"prompt": "Hi"}),
        ("/api/generate", {"keep_alive": 0}),
        ("/api/embed", {"input": "Hi"}),
        ("/api/embeddings", {"prompt": "Hi"}),
        ("/api/show", {}),
    ],
    ids=str,
)
def test_an_unknown_model_is_refused_in_ollamas_words(
    hermes: OllamaDaemon, path: str, fields: dict[str, Any]
) -> None:
    answer = hermes.http.post(path, json={"model": "nobody:latest", **fields})
    assert answer.status_code == 404
    assert message_of(answer) == "model 'nobody' not found"


FORM = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl sends with -d


@pytest.mark.parametrize("headers", [FORM, {"Content-Type": "text/plain"}], ids=str)
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/chat", {"messages": [USER]}),
        ("/api/generate", {"prompt": "Hi"}),
        ("/api/embed", {"input": "Hi"}),
        ("/api/show", {}),
    ],
    ids=str,
)
def test_programs_need_not_say_that_a_body_is_json(
    hermes: OllamaDaemon, path: str, fields: dict[str, Any], headers: dict[str, str]
) -> None:
    content = json.dumps({"model": "bytes", "stream": False, **fields})
    assert hermes.http.post(path, content=content, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 400),
    ],
    ids=str,
)
def test_a_web_page_must_say_that_a_body_is_json(
    hermes: OllamaDaemon, headers: dict[str, str], status: int
) -> None:
    """A page can post a form or plain text to another site without asking that site first."""
    content = json.dumps({"model": "bytes", "messages": [USER], "stream": False})
    for content_type in (FORM, {"Content-Type": "text/plain"}):
        answer = hermes.http.post("/api/chat", content=content, headers=headers | content_type)
        assert answer.status_code == status
        assert message_of(answer)


def test_a_page_with_a_key_must_say_that_a_body_is_json(tmp_path: Path) -> None:
    """With keys no Origin is refused by itself."""
    keys = key_file(tmp_path, alice={})
    with (
        OllamaDaemon.serving(api_keys_file=keys) as made,
        client_of(made.url, "alice") as alice,
    ):
        content = json.dumps({"model": "bytes", "messages": [USER], "stream": False})
        for origin, status in (({}, 200), ({"Origin": "https://evil.example"}, 400)):
            answer = alice.post("/api/chat", content=content, headers=FORM | origin)
            assert answer.status_code == status


def test_unknown_paths_and_methods(hermes: OllamaDaemon) -> None:
    for path in ("/api/copy", "/api/create", "/api/push"):
        assert path in message_of(hermes.http.post(path))
    assert hermes.http.get("/api/chat").status_code == 405
    assert message_of(hermes.http.get("/api/chat"))


def test_models_are_fetched_and_deleted_by_admins_alone(tmp_path: Path) -> None:
    keys = key_file(tmp_path, alice={}, root={"role": "admin"})
    with (
        OllamaDaemon.serving(api_keys_file=keys) as made,
        client_of(made.url, "alice") as user,
        client_of(made.url, "root") as admin,
    ):
        assert made.http.get("/api/version").status_code == 200
        for path, method in (("/api/delete", "DELETE"), ("/api/pull", "POST")):
            body = {"model": "not//a repository", "stream": False}
            refused = user.request(method, path, json=body)
            assert (refused.status_code, "admin" in message_of(refused)) == (403, True)
            assert admin.request(method, path, json=body).status_code in {404, 500}
