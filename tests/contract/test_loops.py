"""A model that repeats a sentence for ever is ended, if the request has tools or asks for it."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.values.settings import EngineConfig
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.scripted import PING
from tests.hosting import loaded
from tests.scripted_checkpoint import write_scripted

pytestmark = pytest.mark.process

SENTENCE = "I will look at the log once more.\n"
LOOP = "So.\n" + SENTENCE * 14
LAWFUL = "".join(f"{number:02} is the number of the log.\n" for number in range(14))


@pytest.fixture(scope="module", params=["end", "allow"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[bool, httpx.Client]]:
    """Whether the setting ends loops, and a client of a daemon that has it."""
    path = write_scripted(tmp_path_factory.mktemp("models") / "loops", [LOOP, LAWFUL])
    engine = loaded(EngineConfig(model=str(path), kv_cache_bytes=16 << 20, block_size=16))
    settings = Settings(
        port=0, model=str(path), served_model_name=("m",), tool_parser="hermes", loops=request.param
    )
    with running(engine, settings) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield request.param == "end", client


def answer(client: httpx.Client, script: int, **fields: Any) -> tuple[str, str]:
    """The content, and why it ends."""
    messages = [{"role": "user", "content": str(script)}]
    body = {"model": "m", "messages": messages, "temperature": 0, **fields}
    [choice] = client.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"]
    return choice["message"]["content"], choice["finish_reason"]


ASKED = {"max_pattern_size": 64, "min_pattern_size": 2, "min_count": 4}


def test_a_loop_ends_a_request_with_tools(served: tuple[bool, httpx.Client]) -> None:
    ends, client = served
    content, reason = answer(client, 0, tools=[PING])
    assert reason == ("repetition" if ends else "stop")
    assert LOOP.startswith(content)
    assert (len(content) < len(LOOP)) is ends
    counted = 'rootstock_requests_finished_total{model="m",reason="repetition"}'
    assert (f"{counted} 0.0" in client.get("/metrics").text) is not ends


def test_a_loop_ends_a_request_that_asks_for_it(served: tuple[bool, httpx.Client]) -> None:
    _, client = served
    content, reason = answer(client, 0, repetition_detection=ASKED)
    assert reason == "repetition"
    assert content.count("look") < 8


@pytest.mark.parametrize(
    "fields", [{}, {"tools": [PING], "repetition_detection": {"max_pattern_size": 0}}]
)
def test_a_loop_goes_on_where_nothing_ends_it(
    served: tuple[bool, httpx.Client], fields: dict[str, Any]
) -> None:
    _, client = served
    assert answer(client, 0, **fields) == (LOOP, "stop")


def test_lines_that_differ_are_no_loop(served: tuple[bool, httpx.Client]) -> None:
    _, client = served
    for fields in ({"tools": [PING]}, {"repetition_detection": ASKED}):
        assert answer(client, 1, **fields) == (LAWFUL, "stop")


@pytest.mark.parametrize(
    "asked",
    [
        {"max_pattern_size": 4, "min_pattern_size": 8, "min_count": 3},
        {"max_pattern_size": 4, "min_count": 1},
        {"max_pattern_size": 513, "min_count": 3},
    ],
)
def test_limits_that_make_no_sense_are_refused(
    served: tuple[bool, httpx.Client], asked: dict[str, int]
) -> None:
    _, client = served
    messages = [{"role": "user", "content": "0"}]
    body = {"model": "m", "messages": messages, "repetition_detection": asked}
    assert client.post("/v1/chat/completions", json=body).status_code == 400


def test_every_dialect_says_that_it_is_incomplete(served: tuple[bool, httpx.Client]) -> None:
    ends, client = served
    if not ends:
        return
    tool = {"name": "ping", "input_schema": {"type": "object"}}
    message = {"messages": [{"role": "user", "content": "0"}], "temperature": 0, "model": "m"}
    said = client.post("/v1/messages", json={**message, "max_tokens": 480, "tools": [tool]})
    assert said.json()["stop_reason"] == "max_tokens"
    body = {"model": "m", "messages": message["messages"], "stream": False, "tools": [PING]}
    body["options"] = {"temperature": 0}
    assert client.post("/api/chat", json=body).json()["done_reason"] == "length"
    function = {"type": "function", "name": "ping", "parameters": {"type": "object"}}
    body = {"model": "m", "input": "0", "temperature": 0, "tools": [function]}
    assert client.post("/v1/responses", json=body).json()["status"] == "incomplete"
