"""How the events of a stream are written: together where they come together, nothing lost."""

import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine, Gate, Script

WAIT_SECONDS = 20.0
LITTLE = {socket.SO_SNDBUF: 4096}
TOKENS = 450
HELD_BACK = 10  # of these, until the rest has been generated
TEXT = "".join(chr(ord("a") + i % 26) for i in range(TOKENS))
MESSAGES = [{"role": "user", "content": "Hi"}]
MODEL = "test/bytes"


@contextmanager
def posted(base_url: str, path: str, body: Mapping[str, object]) -> Iterator[socket.socket]:
    """A request whose answer is read by nobody yet, with little room on its way."""
    address = urlsplit(base_url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(WAIT_SECONDS)
        connection.connect((address.hostname, address.port))
        data = json.dumps({"model": MODEL, "stream": True, **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        yield connection


def writes(connection: socket.socket) -> list[list[Any]]:
    """The answer: each chunk of the transfer, which is what was written at once, as its events."""
    with connection.makefile("rb") as received:
        assert received.readline().startswith(b"HTTP/1.1 200")
        while received.readline() != b"\r\n":
            pass
        chunks = []
        while size := int(received.readline(), 16):
            chunks.append(received.read(size).decode())
            received.readline()
    found = (re.findall(r"^(?:data: )?(\{.*)$", chunk, re.MULTILINE) for chunk in chunks)
    return [[json.loads(event) for event in events] for events in found if events]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_one_step_says_of_several_choices_is_one_write(path: str) -> None:
    body = {"messages": MESSAGES} if "chat" in path else {"prompt": "Hi"}
    engine = FakeEngine(Script(["abcdef"]))
    with (
        running(engine, Settings(port=0)) as base_url,
        posted(base_url, path, body | {"n": 3, "max_tokens": 6}) as connection,
    ):
        said = writes(connection)
    for events in said:
        assert {choice["index"] for event in events for choice in event["choices"]} == {0, 1, 2}
    assert len(said) > 0


def chat(events: list[Any]) -> tuple[str, int]:
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    return text, events[-1]["usage"]["completion_tokens"]


def completion(events: list[Any]) -> tuple[str, int]:
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    return text, events[-1]["usage"]["completion_tokens"]


def message(events: list[Any]) -> tuple[str, int]:
    deltas = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    return "".join(deltas), events[-2]["usage"]["output_tokens"]


def response(events: list[Any]) -> tuple[str, int]:
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return "".join(deltas), events[-1]["response"]["usage"]["output_tokens"]


def line(lines: list[Any]) -> tuple[str, int]:
    return "".join(line["message"]["content"] for line in lines), lines[-1]["eval_count"]


USAGE = {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": TOKENS, **USAGE}, chat),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": TOKENS, **USAGE}, completion),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": TOKENS}, message),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": TOKENS}, response),
        ("/api/chat", {"messages": MESSAGES, "options": {"num_predict": TOKENS}}, line),
    ],
)
def test_a_reader_that_lags_behind_is_told_the_same_in_fewer_events(
    path: str, body: Mapping[str, object], read: Any
) -> None:
    """The engine says everything before the daemon is given time to send it."""
    engine = FakeEngine(Script([TEXT], steps_at_once=TOKENS))
    with running(engine, Settings(port=0)) as base_url, posted(base_url, path, body) as connection:
        events = [event for together in writes(connection) for event in together]
    assert read(events) == (TEXT, TOKENS)
    assert len(events) < TOKENS / 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_each_token_keeps_its_logprobs_when_text_is_joined(path: str) -> None:
    """They fill the sockets of a client that does not read, and what comes then is joined."""
    engine, gate = FakeEngine(), Gate()
    engine.script = Script([TEXT], gate=gate, gate_after_tokens=TOKENS - HELD_BACK)
    body: dict[str, object] = {"prompt": "Hi", "logprobs": 5, "max_tokens": TOKENS}
    if "chat" in path:
        body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "max_tokens": TOKENS}
    with (
        running(engine, Settings(port=0), socket_options=LITTLE) as base_url,
        posted(base_url, path, body) as connection,
    ):
        engine.at_gate.get(timeout=WAIT_SECONDS)
        gate.open()
        choices = [c for events in writes(connection) for event in events for c in event["choices"]]
    told = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    if "chat" in path:
        tokens = [entry["token"] for logprobs in told for entry in logprobs["content"]]
    else:
        tokens = [token for logprobs in told for token in logprobs["tokens"]]
        assert [at for logprobs in told for at in logprobs["text_offset"]] == [*range(TOKENS)]
    assert "".join(tokens) == TEXT
    assert len(told) < TOKENS
