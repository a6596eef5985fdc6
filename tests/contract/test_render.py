"""What the engine would be asked: just what it is asked when the same body is sent in earnest."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from engine.values.request import Request
from server.fairness import LARGE_BYTES
from server.settings import Settings
from tests.contract.conftest import ChatBody
from tests.contract.daemon import running
from tests.contract.fake_engine import CARD, FakeEngine, Script, TryingEngine
from tests.contract.scripted import (
    CLIENT_SECONDS,
    HERMES_PING,
    PING,
    TOOLS,
    USER,
    OpeningTokenizer,
    RecordingTokenizer,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


pytestmark = pytest.mark.usefixtures("engine")  # each test starts from the default script


@dataclass(frozen=True)
class WholeTokenizer(OpeningTokenizer):
    """Its prompts are made of all that a template is given."""

    def apply_chat_template(self, *given: Any, **template_arguments: Any) -> list[int]:
        ids = super().apply_chat_template(*given, **template_arguments)
        return [*json.dumps([*map(str, given), template_arguments]).encode(), *ids]


def large(body: dict[str, Any]) -> bytes:
    """The body, in as many bytes as make others wait."""
    return json.dumps(body).encode().ljust(LARGE_BYTES + 1)


def rendered(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(f"{path}/render", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def sent(http: httpx.Client, engine: FakeEngine, path: str, body: dict[str, Any]) -> list[Request]:
    """What the engine is asked by the body."""
    assert engine.submitted.empty(), "a render reached the engine"
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return [engine.submitted.get_nowait() for _ in range(engine.submitted.qsize())]


def test_a_chat_with_everything_in_its_prompt() -> None:
    """Tools, reasoning, the template's own arguments, and an answer that is replayed."""
    card = replace(CARD, max_context_tokens=100_000, arena_tokens=100_000)
    engine = FakeEngine(tokenizer=WholeTokenizer(), card=card)
    settings = Settings(port=0, tool_parser="hermes")
    with running(engine, settings) as url, httpx.Client(base_url=url) as http:
        engine.script = Script(answers=(f"Hm.</think>{HERMES_PING}",))
        body: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "reasoning_effort": "high"}
        body["chat_template_kwargs"] = {"style": "short"}
        first = rendered(http, CHAT, body)
        (request,) = sent(http, engine, CHAT, body)
        assert first["token_ids"] == list(request.prompt)

        message = http.post(CHAT, json=body).json()["choices"][0]["message"]
        engine.submitted.get_nowait()
        (call,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "pong"}
        body["messages"] = [USER, message, result]
        second = rendered(http, CHAT, body)
        (request,) = sent(http, engine, CHAT, body)
        assert second["token_ids"] == list(request.prompt)
        assert "Replay(" in bytes(second["token_ids"]).decode()
        assert http.post("/tokenize", json=body).json()["tokens"] == second["token_ids"]
        probed = http.post("/admin/cache/probe", json=body).json()
        assert probed["prompt_tokens"] == probed["cached_tokens"] + 1 == len(request.prompt)


@pytest.mark.parametrize("prompt", ["ab", [97, 98], ["ab", "c"], [[97, 98], [99]], None], ids=str)
def test_every_prompt_of_a_completion(
    http: httpx.Client, engine: FakeEngine, prompt: object
) -> None:
    body = {"prompt": prompt, "n": 2, "max_tokens": 5}
    given = rendered(http, COMPLETIONS, body)
    requests = sent(http, engine, COMPLETIONS, body)
    assert [entry["token_ids"] for entry in given] == [list(each.prompt) for each in requests]
    assert len({entry["request_id"] for entry in given}) == len(given)


def test_what_else_the_engine_is_asked(
    http: httpx.Client, chat: ChatBody, model: str, engine: FakeEngine
) -> None:
    body = chat(n=2, top_k=7, seed=3, stop="x", logit_bias={"65": -1}, cache_salt="mine")
    body |= {"logprobs": True, "top_logprobs": 4, "stop_token_ids": [9, 8], "stream": True}
    given = rendered(http, CHAT, body)
    (request,) = sent(http, engine, CHAT, body)
    sampling = given["sampling_params"]
    assert sampling["max_tokens"] == request.max_tokens
    assert sampling["temperature"] == request.sampling.temperature
    assert (sampling["n"], sampling["top_k"], sampling["seed"]) == (2, 7, 3)
    assert (sampling["stop"], sampling["stop_token_ids"]) == (["x"], [8, 9])
    assert (sampling["logit_bias"], sampling["logprobs"]) == ({"65": -1.0}, 4)
    assert (sampling["allowed_token_ids"], sampling["bad_words"]) == (None, [])
    body |= {"allowed_token_ids": [98, 97], "bad_words": ["a"]}
    limited = rendered(http, CHAT, body)["sampling_params"]
    assert (limited["allowed_token_ids"], limited["bad_words"]) == ([97, 98], ["a"])
    assert (given["model"], given["stream"], given["cache_salt"]) == (model, True, "mine")


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        (CHAT, {"model": "other"}, 404, "model"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, 400, "messages"),
        (CHAT, {"tools": [PING]}, 400, "tools"),
        (CHAT, {"priority": 1}, 400, "priority"),
        (COMPLETIONS, {"prompt": "x" * 600}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [257]}, 400, "prompt"),
        (COMPLETIONS, {"priority": 1}, 400, "priority"),
    ],
)
def test_what_would_be_refused_is_refused(
    http: httpx.Client, path: str, fields: dict[str, Any], status: int, param: str
) -> None:
    body = {"messages": [USER], "prompt": "x"} | fields
    answer = http.post(f"{path}/render", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert answer.json() == http.post(path, json=body).json()


def test_an_answer_that_would_be_too_large_is_refused() -> None:
    settings = Settings(port=0, max_unsent_bytes=1000)
    with running(FakeEngine(tokenizer=RecordingTokenizer()), settings) as url:
        for path in (f"{COMPLETIONS}/render", "/tokenize"):
            answer = httpx.post(f"{url}{path}", json={"prompt": "x" * 300})
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "answer_too_large"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_no_large_request_waits_for_the_trial_of_anothers_grammar(path: str) -> None:
    engine, body = TryingEngine(), large({"messages": [USER], "prompt": "x"})
    with (
        running(engine, Settings(port=0)) as url,
        httpx.Client(base_url=url, timeout=CLIENT_SECONDS) as http,
        ThreadPoolExecutor() as pool,
    ):
        first = pool.submit(http.post, f"{path}/render", content=body)
        engine.tried.get(timeout=CLIENT_SECONDS)
        try:
            assert http.post("/tokenize", content=large({"prompt": "x"})).status_code == 200
            assert not first.done()
        finally:
            engine.gate.open()
        assert first.result().status_code == 200
