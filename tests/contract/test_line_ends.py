"""Characters that some clients take for the end of a line, in streams that consist of lines."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from ollama import Client

from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.dialects.adapters import BODIES
from tests.contract.fake_engine import FakeEngine, Script
from tests.contract.scripted import CLIENT_SECONDS

LINE_ENDS = "\x85\u2028\u2029"
TEXT = f"one{LINE_ENDS}two"
MODEL = f"by{LINE_ENDS}tes"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    """A daemon whose model has the characters in its name and writes them in its answers."""
    engine = FakeEngine(Script([TEXT]))
    with running(engine, Settings(port=0, served_model_name=(MODEL,))) as url:
        yield url


def sent_lines(base_url: str, method: str, path: str, **body: Any) -> Iterator[str]:
    """The lines as httpx finds them, the empty ones and the names of events left out."""
    url = base_url + path
    with httpx.stream(method, url, json=body or None, timeout=CLIENT_SECONDS) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line and not line.startswith("event: "):
                yield line.removeprefix("data: ")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *BODIES.items(),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
        ("/api/generate", {"prompt": "Hi"}),
    ],
    ids=str,
)
def test_every_line_of_an_answer_is_whole(base_url: str, path: str, body: dict[str, Any]) -> None:
    lines = sent_lines(base_url, "POST", path, **body | {"model": MODEL, "stream": True})
    parts = [json.loads(line) for line in lines if line != "[DONE]"]
    found = texts(parts)
    assert MODEL in found
    assert set(LINE_ENDS) <= set("".join(text for text in found if text != MODEL))


def texts(value: object) -> list[str]:
    """All strings in a JSON value, in their order."""
    match value:
        case str(text):
            return [text]
        case dict():
            return [text for each in value.values() for text in texts(each)]
        case list():
            return [text for each in value for text in texts(each)]
        case _:
            return []


@pytest.mark.parametrize("path", ["/admin/cache/tree/stream", "/admin/activity/stream"])
def test_every_line_that_the_dashboard_reads_is_whole(base_url: str, path: str) -> None:
    first = next(sent_lines(base_url, "GET", path))
    assert MODEL in texts(json.loads(first))


def test_ollamas_client_reads_them(base_url: str) -> None:
    with Client(base_url, timeout=CLIENT_SECONDS) as client:
        parts = list(client.chat(MODEL, MESSAGES, stream=True))
    assert "".join(part.message.content or "" for part in parts) == TEXT


def test_an_error_in_a_stream_is_one_line() -> None:
    engine = FakeEngine(Script([TEXT], fails_after_tokens=2))
    with running(engine, Settings(port=0, served_model_name=(MODEL,))) as url:
        lines = sent_lines(url, "POST", "/api/chat", model=MODEL, messages=MESSAGES)
        *_, last = map(json.loads, lines)
    assert list(last) == ["error"]
