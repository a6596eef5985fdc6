"""The load client against a small server of its own, honest and otherwise."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from load_tests.client import Target, TargetError, discover
from load_tests.scenarios.load import play
from load_tests.scenarios.workloads import Conversation, Workload

Body = dict[str, Any]
Respond = Callable[[Body], str]  # request body -> what follows the status line


def stream(*events: object) -> str:
    data = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "HTTP/1.1 200 OK\r\n\r\n" + "".join(f"data: {d}\n\n" for d in data)


def chunk(text: str | None = None, finish_reason: str | None = None) -> Body:
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def usage(completion_tokens: int) -> Body:
    counts = {"prompt_tokens": 9, "completion_tokens": completion_tokens}
    return {"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": 5}}}


def honest(body: Body) -> str:
    """Says `word` as often as asked."""
    n = body["max_tokens"]
    words = [chunk("word ") for _ in range(n)]
    return stream(chunk(), *words, chunk(finish_reason="length"), usage(n), "[DONE]")


class FakeServer:
    """Answers every request with `respond(body)` and closes, as HTTP/1.0 servers do."""

    def __init__(self, respond: Respond) -> None:
        self.respond = respond
        self.bodies: list[Body] = []
        self.heads: list[str] = []
        self.open = 0
        self.most_open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        body = await self.read_body(reader)
        self.bodies.append(body)
        await asyncio.sleep(0)
        self.open -= 1
        writer.write(self.respond(body).encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def read_body(self, reader: asyncio.StreamReader) -> Body:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        self.heads.append(head)
        _, _, length = head.partition("content-length: ")
        size = int(length.partition("\r\n")[0] or 0)
        return dict(json.loads(await reader.readexactly(size))) if size else {}


@asynccontextmanager
async def served(respond: Respond) -> AsyncIterator[tuple[FakeServer, Target]]:
    fake = FakeServer(respond)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield fake, Target(f"http://127.0.0.1:{port}/v1", "tiny", stall_seconds=5)


def one(*turns: str, system: str | None = None, output_tokens: int = 3) -> Workload:
    return Workload(1, output_tokens, ((Conversation(system, turns),),))


async def test_a_conversation_sends_back_what_the_server_said() -> None:
    async with served(honest) as (fake, target):
        run = await play(one("first ", "second ", system="rules "), target)
    assert fake.bodies[1]["messages"] == [
        {"role": "system", "content": "rules "},
        {"role": "user", "content": "first "},
        {"role": "assistant", "content": "word word word "},
        {"role": "user", "content": "second "},
    ]
    assert [a.turn for a in run.answers] == [0, 1]


async def test_requests_ask_for_equal_work() -> None:
    async with served(honest) as (fake, target):
        await play(one("hello "), target)
    (body,) = fake.bodies
    assert (body["model"], body["max_tokens"], body["ignore_eos"]) == ("tiny", 3, True)
    assert body["temperature"] == 0


async def test_a_conversation_names_its_session_to_routers() -> None:
    conversations = (Conversation(None, ("first ", "second ")), Conversation(None, ("other ",)))
    async with served(honest) as (fake, target):
        await play(Workload(1, 1, (conversations,)), target)
    sessions = [re.findall(r"x-session-id: (\S+)", head) for head in fake.heads]
    assert sessions == [["0-0"], ["0-0"], ["0-1"]]


async def test_an_answer_keeps_counts_and_times() -> None:
    async with served(honest) as (_, target):
        run = await play(one("hello "), target)
    (found,) = run.answers
    assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (9, 5, 3)
    assert len(found.gap_seconds) == 2
    assert found.started_seconds + found.latency_seconds <= run.wall_seconds
    assert found.first_token_seconds + sum(found.gap_seconds) <= found.latency_seconds


async def test_waves_follow_each_other_and_concurrency_is_a_limit() -> None:
    wave = tuple(Conversation(None, (f"text {i} ",)) for i in range(6))
    async with served(honest) as (fake, target):
        run = await play(Workload(2, 1, (wave, wave)), target)
    assert fake.most_open <= 2
    assert [a.wave for a in run.answers] == [0] * 6 + [1] * 6
    texts = [body["messages"][0]["content"] for body in fake.bodies]
    assert sorted(texts[:6]) == sorted(texts[6:]) == [f"text {i} " for i in range(6)]


@pytest.mark.parametrize(
    ("response", "complaint"),
    [
        ("HTTP/1.1 503 Busy\r\n\r\nno room", "HTTP 503: no room"),
        (stream(chunk("a"), chunk(finish_reason="stop"), usage(1), "[DONE]"), "asked for 3"),
        (stream(chunk("a"), chunk(finish_reason="stop"), usage(3), "[DONE]"), "finish_reason stop"),
        (stream(chunk("a"), chunk(finish_reason="length"), usage(2), "[DONE]"), "got 2"),
        (stream(chunk("a"), chunk(finish_reason="length"), "[DONE]"), "got None"),
        (stream(chunk(finish_reason="length"), usage(3), "[DONE]"), "0 pieces"),
        (stream(chunk("a"), chunk("b")), "without \\[DONE\\] after 2 pieces"),
        (stream(chunk("a"), {"error": {"message": "out of memory"}}), "out of memory"),
        (stream("not json"), "not a chunk of a chat completion: not json"),
        (stream([]), "not a chunk"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\ndata: ", "after 0 pieces of text"),
    ],
)
async def test_anything_but_the_work_asked_for_is_an_error(response: str, complaint: str) -> None:
    async with served(lambda body: response) as (_, target):
        with pytest.raises(TargetError, match=complaint):
            await play(one("hello "), target)


async def test_a_server_that_falls_silent_is_an_error() -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        with pytest.raises(TargetError, match="silent for"):
            await play(one("hello "), Target(url, "tiny", stall_seconds=0.05))
        with pytest.raises(TargetError, match="not done after"):
            await play(one("hello "), Target(url, "tiny", limit_seconds=0.05))


async def test_nobody_listening_is_an_error() -> None:
    async with served(honest) as (_, target):
        gone = target
    with pytest.raises(TargetError, match="ConnectError"):
        await play(one("hello "), gone)


async def test_discover_asks_for_the_first_model_listed() -> None:
    listed = json.dumps({"object": "list", "data": [{"id": "a/b"}, {"id": "c"}]})
    async with served(lambda body: f"HTTP/1.1 200 OK\r\n\r\n{listed}") as (_, target):
        assert (await discover(target.base_url)).model == "a/b"
    async with served(lambda body: 'HTTP/1.1 200 OK\r\n\r\n{"data": []}') as (_, target):
        with pytest.raises(TargetError, match="models"):
            await discover(target.base_url)
