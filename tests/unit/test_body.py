"""Bodies as they are read: what is bounded before it is looked at, and where the work is done."""

import json
import threading
from typing import Any

import pytest
from anyio import fail_after, sleep_forever
from pydantic import BaseModel, ValidationError, field_validator
from starlette.requests import Request
from starlette.types import Message

from server.dialects.chat.schema import ChatRequest
from server.dialects.completions.schema import CompletionRequest
from server.errors import ApiError, ClientLeft
from server.http.body import MAX_NODES, BodyReader, parse
from server.record import RequestRecord
from server.workers import LARGE_BYTES, Workers

MANY = 5000
SECONDS = 20.0


class Anything(BaseModel):
    """A model that notes which thread validates it."""

    thread: int = 0

    @field_validator("thread", mode="before")
    @classmethod
    def _here(cls, value: object) -> int:
        return threading.get_ident()


def request(*messages: Message) -> Request:
    """A request whose client sends these messages, and then waits."""
    received = list(messages)

    async def receive() -> Message:
        if not received:
            await sleep_forever()
        return received.pop(0)

    state = {"record": RequestRecord("r", "a")}
    return Request({"type": "http", "headers": [], "state": state}, receive)


def chunk(body: bytes) -> Message:
    return {"type": "http.request", "body": body, "more_body": False}


@pytest.mark.parametrize("spare", [0, 1])
async def test_big_bodies_leave_the_event_loop(spare: int) -> None:
    body = b'{"thread": 0}'.ljust(LARGE_BYTES + spare)
    read = await BodyReader(Workers()).read(request(chunk(body)), Anything)
    assert (read.thread == threading.get_ident()) == (spare == 0)


async def test_a_client_that_leaves_before_its_body_is_there() -> None:
    with pytest.raises(ClientLeft):
        await BodyReader(Workers()).read(request({"type": "http.disconnect"}), Anything)


async def test_a_client_that_leaves_takes_its_large_body_out_of_the_queue() -> None:
    workers, other = Workers(), RequestRecord("o", "b", n_bytes=LARGE_BYTES + 1)
    async with other.held:
        await workers.prepare(other, lambda: None)  # holds the one slot from here on
        body = chunk(b"{}".ljust(LARGE_BYTES + 1))
        with fail_after(SECONDS), pytest.raises(ClientLeft):
            await BodyReader(workers).read(request(body, {"type": "http.disconnect"}), Anything)


def refusal(body: bytes) -> str:
    with pytest.raises(ApiError) as caught:
        parse(body, Anything)
    assert caught.value.status == 400
    return str(caught.value)


@pytest.mark.parametrize("node", ["[]", "{}", '{"a":1}', '"[]",[]', '"\\\\",[]', '"\\"",[]'])
def test_nodes_are_bounded(node: str) -> None:
    nodes = 2 if "1" in node else 1
    most = (MAX_NODES - 3) // nodes  # the object, its member and the list are nodes as well
    text = '{"x":[' + ",".join([node] * most) + "]%s}"
    parse((text % "").encode(), Anything)
    assert str(MAX_NODES) in refusal((text % ',"y":[],"z":[]').encode())


def test_brackets_in_text_are_text() -> None:
    text = '[{":\\' * MAX_NODES
    parse(json.dumps({"x": text}).encode(), Anything)


def test_what_a_client_says_is_not_said_back_at_length() -> None:
    key = "k" * 100_000
    assert len(refusal(f'{{"{key}": 1, "{key}": 2}}'.encode())) < 300


def test_nesting_is_bounded() -> None:
    assert "recursion limit" in refusal(b'{"a":' * 500 + b"1" + b"}" * 500)


TALK = [{"role": "user", "content": "Hi"}]
LISTS: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ChatRequest, {"messages": [1] * MANY}),
    (ChatRequest, {"messages": [{}] * MANY}),
    (ChatRequest, {"messages": [{"role": "user", "content": [1] * 900}]}),
    (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [1] * 900}]}),
    (ChatRequest, {"messages": TALK, "logit_bias": {f"k{key}": "x" for key in range(MANY)}}),
    (ChatRequest, {"messages": TALK, "stop": [1] * 60}),
    (ChatRequest, {"messages": TALK, "stop_token_ids": [""] * 100}),
    (ChatRequest, {"messages": TALK, "modalities": [1] * 10}),
    (CompletionRequest, {"prompt": [""] * 200 + [{}] * 50}),
]


@pytest.mark.parametrize(("model", "fields"), LISTS, ids=range(len(LISTS)))
def test_the_first_error_of_a_list_is_the_last(
    model: type[BaseModel], fields: dict[str, Any]
) -> None:
    """Pydantic makes an error of a kilobyte for each item, unless told to stop."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(fields)
    assert caught.value.error_count() <= 2
