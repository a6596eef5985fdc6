"""Refusals and failures, in Ollama's object everywhere under /api."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from ollama import Client, ResponseError

from engine.api import EngineStopped, InvalidRequest, QueueFull
from tests.contract.access.helpers import client_of, key_file, secret_of
from tests.contract.fake_engine import ByteTokenizer, Gate
from tests.contract.ollama.scripted import TOOLS, USER, Daemon, daemon

PICTURE = {"role": "user", "content": "What is it?", "images": ["AAAA"]}


def message_of(answer: httpx.Response) -> str:
    body = answer.json()
    assert set(body) == {"error"}
    return str(body["error"])


CHATS = [
    ({"messages": [PICTURE]}, "messages[0].images"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
    ({"messages": [USER] * 10_001}, "messages"),
    ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
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
    hermes: Daemon, fields: dict[str, Any], place: str
) -> None:
    answer = hermes.post(**fields)
    assert answer.status_code == 400
    assert message_of(answer).startswith(f"{place}: ")


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"images": ["AAAA"]}, "images"),
        ({"suffix": "end"}, "suffix"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"context": [1, 2]}, "context"),
        ({"raw": True, "logprobs": True, "top_logprobs": 6}, "raw"),
        ({"prompt": 5}, "prompt"),
    ],
    ids=str,
)
def test_what_a_prompt_cannot_have_is_refused(
    hermes: Daemon, fields: dict[str, Any], place: str
) -> None:
    answer = hermes.post("/api/generate", **fields)
    assert answer.status_code == 400
    assert message_of(answer).startswith(f"{place}: ")


def test_a_model_that_does_not_reason_cannot_be_told_to() -> None:
    with daemon(ByteTokenizer(), reasoning_parser="none", tool_parser="none") as plain:
        for path in ("/api/chat", "/api/generate"):
            refused = plain.post(path, think="high")
            assert refused.status_code == 400
            assert message_of(refused) == '"bytes" does not support thinking'
        assert message_of(plain.post(tools=TOOLS)).startswith("tools: ")
        assert plain.post(think=False).status_code == 200


def test_the_engines_refusals_have_ollamas_names(hermes: Daemon) -> None:
    hermes.say("", refusal=InvalidRequest("stop: no", "stop"))
    assert message_of(hermes.post()) == "options.stop: no"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status"),
    [(QueueFull("full", 7), 429), (EngineStopped("stopping"), 503), (RuntimeError("secret"), 500)],
)
def test_refusals_are_the_clients_exceptions(
    hermes: Daemon, refusal: Exception, status: int, stream: bool
) -> None:
    hermes.say("", refusal=refusal)
    with pytest.raises(ResponseError) as caught:
        list(hermes.chat(stream=stream))
    assert caught.value.status_code == status
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_failure_in_mid_stream_is_the_last_line(hermes: Daemon, path: str) -> None:
    hermes.say("Hello", fails_after_tokens=2)
    *parts, last = hermes.lines(path)
    assert last == {"error": "it broke"}
    assert len(parts) == 2


def test_the_client_raises_a_failure_in_mid_stream(hermes: Daemon) -> None:
    hermes.say("Hello", fails_after_tokens=2)
    with pytest.raises(ResponseError, match="it broke"):
        list(hermes.chat(stream=True))


def test_a_failure_before_the_first_token_has_a_status(hermes: Daemon) -> None:
    hermes.say("Hello", fails_after_tokens=0)
    answer = hermes.post(stream=True)
    assert (answer.status_code, message_of(answer)) == (500, "it broke")


@pytest.mark.parametrize("effort", ["none", "", "xhigh", 1, ["high"]])
def test_an_unknown_effort_is_refused_with_the_known_ones(hermes: Daemon, effort: Any) -> None:
    answer = hermes.post(think=effort)
    assert answer.status_code == 400
    known = "true, false or one of 'low', 'medium', 'high', 'max'"
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
    hermes: Daemon, path: str, fields: dict[str, Any]
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
    hermes: Daemon, path: str, fields: dict[str, Any], headers: dict[str, str]
) -> None:
    content = json.dumps({"model": "bytes", "stream": False, **fields})
    assert hermes.http.post(path, content=content, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 400),
        ({"Sec-Fetch-Site": "same-site"}, 400),
    ],
    ids=str,
)
def test_a_web_page_must_say_that_a_body_is_json(
    hermes: Daemon, headers: dict[str, str], status: int
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
    with daemon(api_keys_file=keys) as made, client_of(str(made.http.base_url), "alice") as alice:
        content = json.dumps({"model": "bytes", "messages": [USER], "stream": False})
        for origin, status in (({}, 200), ({"Origin": "https://evil.example"}, 400)):
            answer = alice.post("/api/chat", content=content, headers=FORM | origin)
            assert answer.status_code == status


def test_unknown_paths_and_methods(hermes: Daemon) -> None:
    for path in ("/api/copy", "/api/create", "/api/push"):
        assert path in message_of(hermes.http.post(path))
    assert hermes.http.get("/api/chat").status_code == 405
    assert message_of(hermes.http.get("/api/chat"))


def test_who_waits_for_a_token_is_sent_lines_that_say_nothing() -> None:
    with daemon(keepalive_seconds=0.01) as slow:
        slow.say("Hi", gate=(gate := Gate()))
        answers = slow.chat(stream=True)
        first = next(answers)
        gate.open()
        said = [first.message.content, *(part.message.content for part in answers)]
    assert (first.done, said[0]) == (False, "")
    assert "".join(said) == "Hi"


def test_a_client_that_leaves_takes_its_work_with_it(hermes: Daemon) -> None:
    hermes.say("Hello", gate=Gate(), gate_after_tokens=2)
    answers = hermes.chat(stream=True)
    next(answers)
    answers.close()
    assert hermes.engine.aborted.get(timeout=20)


def test_keys_are_asked_for_and_limits_told(tmp_path: Path) -> None:
    keys = key_file(tmp_path, alice={"requests_per_minute": 1}, root={"role": "admin"})
    with daemon(api_keys_file=keys) as made:
        url = str(made.http.base_url)
        with pytest.raises(ResponseError) as caught:
            made.chat()
        assert caught.value.status_code == 401
        assert made.http.get("/api/version").status_code == 200
        with Client(url, headers={"Authorization": f"Bearer {secret_of('alice')}"}) as alice:
            assert alice.chat("bytes", [USER]).done
            with pytest.raises(ResponseError) as caught:
                alice.chat("bytes", [USER])
        assert caught.value.status_code == 429
        with client_of(url, "alice") as user, client_of(url, "root") as admin:
            for path, method in (("/api/delete", "DELETE"), ("/api/pull", "POST")):
                body = {"model": "not//a repository", "stream": False}
                refused = user.request(method, path, json=body)
                assert (refused.status_code, "admin" in message_of(refused)) == (403, True)
                assert admin.request(method, path, json=body).status_code in {404, 500}
