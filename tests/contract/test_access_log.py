"""One line for each request, with its tokens and without its words."""

import logging
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from server.settings import Settings
from tests.contract.access.helpers import bearer, client_of, key_file, line_with, secret_of
from tests.contract.conftest import ChatBody
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine, Gate, Script
from tests.contract.wire import posted
from tests.polling import WAIT_SECONDS

SECRET = "the launch code is 0000"


pytestmark = pytest.mark.usefixtures("engine")  # each test starts from the default script


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_is_logged_without_its_words(
    http: httpx.Client, chat: ChatBody, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.DEBUG, "rootstock")
    messages = [{"role": "user", "content": SECRET}]
    answer = http.post("/v1/chat/completions", json=chat(messages=messages, stream=stream))
    follow_up(http)
    line = next(line for line in caplog.messages if answer.headers["x-request-id"] in line)
    assert line.startswith("POST /v1/chat/completions 200 ")
    assert f" prompt={len(f'<user>{SECRET}') + len('<assistant>') + 1} " in line
    assert " completion=14 " in line
    assert SECRET not in caplog.text
    assert "Hello" not in caplog.text


def test_a_path_cannot_forge_a_line(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rootstock")
    http.get("/nothing%0AGET%20/admin%20200")
    follow_up(http)
    assert any("/nothing%0AGET%20/admin%20200 404" in line for line in caplog.messages)
    assert all("\n" not in line for line in caplog.messages)


def test_a_query_is_not_logged(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    """Some clients put their key there."""
    caplog.set_level(logging.DEBUG, "rootstock")
    http.get("/v1/models?api_key=sk-in-the-query")
    follow_up(http)
    assert any("GET /v1/models 200" in line for line in caplog.messages)
    assert "sk-in-the-query" not in caplog.text


def test_the_line_has_the_name_of_the_key_and_nothing_of_the_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "rootstock")
    settings = Settings(port=0, api_key="sk-own", api_keys_file=key_file(tmp_path, alice={}))
    with running(FakeEngine(), settings) as url, client_of(url, "alice") as alice:
        for headers in ({}, {"x-api-key": "sk-own"}, {"x-api-key": "sk-wrong", **bearer("x")}):
            alice.get("/v1/models", headers=headers)
        alice.get("/admin/requests")
        follow_up(alice)
    lines = [line for line in caplog.messages if "/v1/models" in line]
    assert [" key=alice " in line for line in lines] == [True, False, False]
    assert [" key=api_key " in line for line in lines] == [False, True, False]
    assert any("/admin/requests 403 " in line and " key=alice " in line for line in caplog.messages)
    for secret in (secret_of("alice"), "sk-own", "sk-wrong"):
        assert secret not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_before_the_answer_is_a_499(
    base_url: str,
    chat: ChatBody,
    engine: FakeEngine,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
) -> None:
    caplog.set_level(logging.INFO, "rootstock")
    gate = Gate()
    engine.script = Script(gate=gate)
    with posted(base_url, "/v1/chat/completions", chat(stream=stream)):
        request_id = engine.at_gate.get(timeout=WAIT_SECONDS)
    line = line_with(caplog, request_id)
    gate.open()
    assert line.startswith("POST /v1/chat/completions 499 ")
    assert " client-left " in line


def test_who_leaves_in_mid_answer_had_a_status(
    base_url: str, chat: ChatBody, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rootstock")
    gate = Gate()
    engine.script = Script(gate=gate, gate_after_tokens=3)
    with posted(base_url, "/v1/chat/completions", chat(stream=True)) as connection:
        request_id = engine.at_gate.get(timeout=WAIT_SECONDS)
        assert connection.recv(1)
    line = line_with(caplog, request_id)
    gate.open()
    assert line.startswith("POST /v1/chat/completions 200 ")
    assert " client-left " in line


def test_who_closes_behind_a_whole_answer_has_not_left(
    base_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As curl does. ASGI tells a file's answer of a disconnect behind its last byte."""
    caplog.set_level(logging.INFO, "rootstock")
    answer = httpx.get(f"{base_url}/", headers={"Connection": "close"})
    line = line_with(caplog, answer.headers["X-Request-Id"])
    assert line.startswith("GET / 200 ")
    assert "client-left" not in line


def test_who_leaves_in_mid_question_is_a_499(
    base_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rootstock")
    address = urlsplit(base_url)
    with socket.create_connection((address.hostname, address.port), WAIT_SECONDS) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
        connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
    assert line_with(caplog, "POST /v1/completions").startswith("POST /v1/completions 499 ")


def follow_up(http: httpx.Client) -> None:
    """A second request on the connection: by its answer the first one's line is written."""
    http.get("/health")
