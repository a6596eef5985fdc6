"""Bodies as they are read: what is bounded before it is looked at, and where the work is done."""

import json
import threading
from contextlib import nullcontext
from typing import Any

import pytest
from anyio import fail_after, sleep_forever
from pydantic import BaseModel, ValidationError, field_validator
from starlette.requests import Request
from starlette.types import Message

from server.dialects.chat.schema import ChatRequest
from server.dialects.completions import CompletionRequest
from server.errors import ApiError, ClientDisconnected
from server.fairness import Budget
from server.http.body import BodyReader, parse, parsed_bytes
from server.json_model import (
    MAX_DIGITS,
    MAX_ITEMS,
    MAX_NODES,
    QUICK_BYTES,
    QUICK_PARTS,
)
from server.record import Principal, RequestRecord
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

    state = {"record": RequestRecord("r", Principal("a"))}
    return Request({"type": "http", "headers": [], "state": state}, receive)


def chunk(body: bytes) -> Message:
    return {"type": "http.request", "body": body, "more_body": False}


MOST = b",".join([b'{"a":0}'] * (QUICK_PARTS // 3 - 2))


@pytest.mark.parametrize(
    ("body", "is_quick"),
    [
        (b'{"thread": 0}'.ljust(QUICK_BYTES), True),
        (b'{"thread": 0}'.ljust(QUICK_BYTES + 1), False),
        (b'{"thread": 0, "x": [' + MOST + b"]}", True),
        (b'{"thread": 0, "x": [' + MOST + b"," + MOST + b"]}", False),
        (b'{"thread": 0, "x": [0' + b",0" * QUICK_PARTS + b"]}", False),
        (b'{"thread": 0, "x": "' + b":" * QUICK_PARTS + b'"}', False),
    ],
    ids=["short", "long", "few parts", "many parts", "many numbers", "many parts in a text"],
)
async def test_only_quick_bodies_are_read_on_the_event_loop(body: bytes, is_quick: bool) -> None:
    read = await BodyReader(Workers()).read(request(chunk(body)), Anything)
    assert (read.thread == threading.get_ident()) == is_quick


async def test_a_client_that_leaves_before_its_body_is_there() -> None:
    with pytest.raises(ClientDisconnected):
        await BodyReader(Workers()).read(request({"type": "http.disconnect"}), Anything)


async def test_a_client_that_leaves_takes_its_large_body_out_of_the_queue() -> None:
    workers, other = Workers(), RequestRecord("o", Principal("a"), n_bytes=LARGE_BYTES + 1)
    async with other.held:
        await workers.prepare(other, lambda: None)  # holds the client's slot from here on
        body = chunk(b"{}".ljust(LARGE_BYTES + 1))
        with fail_after(SECONDS), pytest.raises(ClientDisconnected):
            await BodyReader(workers).read(request(body, {"type": "http.disconnect"}), Anything)


def bodies(total_bytes: int) -> Budget:
    def too_much() -> ApiError:
        return ApiError(503, "too much")

    return Budget(total_bytes, total_bytes, too_large=too_much, too_much=too_much)


async def test_what_is_made_of_a_body_counts_in_place_of_its_bytes() -> None:
    body = b'{"x": [' + MOST + b"," + MOST + b"]}"
    asked = request(chunk(body))
    record, budget = asked.scope["state"]["record"], bodies(10**9)
    with budget.reserve("a", record.end) as record.body:
        record.body.add(len(body))
        await BodyReader(Workers()).read(asked, Anything)
        assert budget.total_bytes == parsed_bytes(body) > 10 * len(body)
        record.end_preparation()
        assert budget.total_bytes == 0


async def test_a_body_that_becomes_too_much_is_not_parsed() -> None:
    """It alone never fills the budget, however much it is estimated to take."""
    body = b'{"x": [' + MOST + b"]}"
    budget = bodies(5 * len(body))
    for others_bytes, is_refused in ((0, False), (3 * len(body), True)):
        asked = request(chunk(body))
        record = asked.scope["state"]["record"]
        with budget.reserve("a", record.end) as record.body, budget.reserve("a", id) as other:
            record.body.add(len(body))
            other.add(others_bytes)
            with pytest.raises(ApiError, match="too much") if is_refused else nullcontext():
                await BodyReader(Workers()).read(asked, Anything)
            assert not other.is_evicted


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


def test_numbers_are_bounded() -> None:
    numbers = b'{"x":[0' + b",0" * MAX_ITEMS + b"%s]}"
    parse(numbers % b"", Anything)
    assert str(MAX_ITEMS) in refusal(numbers % b",0")
    padding = b" " * QUICK_BYTES
    parse(b'{"x":%s}' % (b"9" * (MAX_DIGITS // 2)) + padding, Anything)
    parse(b'{"x":"%s"}' % (b"9" * 5 * MAX_DIGITS) + padding, Anything)
    for start in range(0, MAX_DIGITS, 50):
        number = b" " * start + b"9" * (MAX_DIGITS + 1)
        assert str(MAX_DIGITS) in refusal(b'{"x":%s}' % number + padding)


@pytest.mark.parametrize("size", [1, MAX_DIGITS + 10])
def test_what_the_arguments_of_calls_say_counts_in_all(size: int) -> None:
    """Each call's are few."""
    arguments = json.dumps({"a": [[]] * size})
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "tool_calls": [call]}
    most = MAX_NODES // (3 + size)

    def body(n: int) -> dict[str, Any]:
        calls = [{**turn, "tool_calls": [call] * 1000}] * (n // 1000)
        return {"messages": [*calls, {**turn, "tool_calls": [call] * (n % 1000)}]}

    ChatRequest.model_validate(body(most - most % 10))
    with pytest.raises(ValidationError, match=str(MAX_NODES)):
        ChatRequest.model_validate(body(2 * most))


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
