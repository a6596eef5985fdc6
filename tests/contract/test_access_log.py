"""One line for each request, with its tokens and without its words."""

import logging

import httpx
import pytest

from tests.contract.conftest import ChatBody
from tests.contract.fake_engine import FakeEngine

SECRET = "the launch code is 0000"


@pytest.fixture(autouse=True)
def _fresh_engine(engine: FakeEngine) -> None:
    """Every test starts from the default script."""


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


def follow_up(http: httpx.Client) -> None:
    """A second request on the connection: by its answer the first one's line is written."""
    http.get("/health")
