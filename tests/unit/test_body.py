"""Bodies as they are read: what is bounded before it is looked at, and where the work is done."""

import json
import threading
import time
import timeit
from functools import partial
from typing import Any

import pytest
from anyio import sleep_forever
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError, field_validator
from starlette.requests import Request
from starlette.types import Message

from server.dialects.chat.schema import ChatRequest
from server.dialects.completions import CompletionRequest
from server.errors import ApiError, ClientDisconnected
from server.http.body import LIGHT_BYTES, LIGHT_PARTS, is_light, parse, read_body, read_head
from server.json_size import (
    MAX_DIGITS,
    MAX_ITEMS,
    MAX_NODES,
)
from server.record import Principal, RequestRecord

MANY = 5000


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


MODEL = b'{"model": "one", "stream": true, "x": %b}'


@pytest.mark.parametrize(
    ("rest", "is_read_at_once"),
    [
        (b'"%b"' % (b"x" * (LIGHT_BYTES // 2)), True),
        (b'"%b"' % (b"x" * LIGHT_BYTES), False),
        (b"[0%b]" % (b",0" * (LIGHT_PARTS // 2)), True),
        (b"[0%b]" % (b",0" * LIGHT_PARTS), False),
        (b"1" * (MAX_DIGITS + 1), False),
    ],
    ids=["short", "long", "few parts", "many parts", "a long number"],
)
def test_only_the_heads_of_light_bodies_are_read_on_the_event_loop(
    rest: bytes, is_read_at_once: bool
) -> None:
    assert is_light(MODEL % rest) == is_read_at_once


DIGITS = [b"7" * (MAX_DIGITS * part // 8) + b" " for part in range(1, 9)]


@pytest.mark.parametrize("digits", DIGITS, ids=len)
def test_whether_a_body_is_light_costs_little_more_than_reading_it(
    digits: bytes,
) -> None:
    """Processor time: runs of digits once cost thousands of times as much, each digit a search."""
    text = MODEL % (b'"%b"' % (digits * (LIGHT_BYTES // len(digits) - 1)))
    reading, weighing = (
        min(timeit.repeat(partial(call, text), time.thread_time, number=2, repeat=5))
        for call in (json.loads, is_light)
    )
    assert weighing < 60 * reading


@given(st.integers(0, 2 * MAX_DIGITS), st.binary(max_size=9))
def test_a_number_of_too_many_digits_is_never_light(before: int, after: bytes) -> None:
    assert not is_light(b" " * before + b"1" * (MAX_DIGITS + 1) + after)


def test_a_head_is_read_wherever_its_fields_stand() -> None:
    body = b'\xef\xbb\xbf{"messages": [{"model": "no"}], "model": "one", "keep_alive": "5m"}'
    head = read_head(body)
    assert head is not None
    assert (head.model, head.stream, head.keep_alive) == ("one", None, "5m")


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"model": 1}', b'{"stream": "yes"}', b'{"model": "%b"}' % (b"x" * 257)],
)
def test_the_head_of_a_wrong_body_is_left_to_the_parser(body: bytes) -> None:
    assert read_head(body) is None


async def test_a_client_that_leaves_before_its_body_is_there() -> None:
    with pytest.raises(ClientDisconnected):
        await read_body(request({"type": "http.disconnect"}))


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
    padding = b" " * LIGHT_BYTES
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
    with pytest.raises(ApiError, match=str(MAX_NODES)):
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
