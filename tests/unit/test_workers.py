"""Who is read, rendered and tokenized when, and until when: clients take turns."""

import asyncio
import gc
import json
import math
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from anyio import create_task_group, current_effective_deadline, sleep_forever
from anyio.lowlevel import checkpoint
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.access.admission import Hosts, Origins, Policy
from server.access.keys import Keyring
from server.activity import RequestTracker
from server.dialects.responses.read import referenced_bytes
from server.dialects.responses.schema import ResponsesRequest
from server.dialects.responses.store import (
    ResponseStore,
    StoredConversation,
    StoredItem,
    StoredResponse,
)
from server.errors import ApiError
from server.fairness import LARGE_AT_ONCE, LARGE_BYTES, SMALL_AT_ONCE, FairLimiter, Workers
from server.gateway import Gateway, body_budget, output_budget
from server.metrics.metrics import HttpAnswers
from server.settings import Settings


async def order(limiter: FairLimiter, clients: Sequence[str]) -> list[str]:
    """In which these have their turns who come while another has the only place."""
    served: list[str] = []

    async def ask(client: str) -> None:
        async with limiter.slot(client):
            served.append(client)
            await checkpoint()

    async with create_task_group() as tasks, limiter.slot("first"):
        for client in clients:
            tasks.start_soon(ask, client)
            await checkpoint()
        assert served == []
    return served


async def test_however_much_one_client_asks_every_other_has_its_turn() -> None:
    served = await order(FairLimiter(1, 1), ["flood"] * 100 + ["one"])
    assert served.index("one") == 1
    assert Counter(served) == {"flood": 100, "one": 1}
    served = await order(FairLimiter(1, 1), ["a", "a", "b", "b", "c"])
    assert served == ["a", "b", "c", "a", "b"]


@pytest.mark.parametrize("is_called", [False, True])
async def test_who_is_cancelled_leaves_its_turn_to_others(is_called: bool) -> None:
    limiter = FairLimiter(1, 1)
    await limiter.acquire("first")
    leaver = asyncio.ensure_future(limiter.acquire("left"))
    await checkpoint()
    if is_called:
        limiter.release("first")
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    if not is_called:
        limiter.release("first")
    assert await order(limiter, ["a"]) == ["a"]


class Blocked:
    """Work that stays in its thread until it is let go."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.running = 0
        self.most = 0
        self._lock = threading.Condition()

    def run(self) -> None:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self._lock.notify_all()
        self.gate.wait()
        with self._lock:
            self.running -= 1

    def until(self, n_running: int) -> bool:
        """Wait up to 30 s until `n_running` calls run. Return whether they do."""
        with self._lock:
            return self._lock.wait_for(lambda: self.running >= n_running, 30)


async def test_what_is_small_does_not_wait_for_what_is_large() -> None:
    workers, blocked = Workers(), Blocked()
    async with create_task_group() as tasks:
        for client in range(8):
            run = partial(workers.run, f"c{client}", LARGE_BYTES + 1)
            tasks.start_soon(run, blocked.run)
        for _ in range(20):
            assert await workers.run("c0", LARGE_BYTES, lambda: "done") == "done"
        assert await asyncio.to_thread(blocked.until, LARGE_AT_ONCE)  # threads may be starting
        blocked.gate.set()
    assert blocked.most == LARGE_AT_ONCE


async def test_so_many_run_at_once_whoever_asks() -> None:
    workers, blocked = Workers(), Blocked()
    async with create_task_group() as tasks:
        for client in range(8):
            tasks.start_soon(partial(workers.run, f"c{client}", 1), blocked.run)
        assert await workers.run("large", LARGE_BYTES + 1, lambda: "done") == "done"
        blocked.gate.set()
    assert blocked.most <= SMALL_AT_ONCE


class Parsed:
    """What a body may be parsed into."""


async def fails(workers: Workers) -> "weakref.ref[Parsed]":
    """Of what a request was made into whose prompt is refused."""
    parsed = Parsed()

    def refuse(parsed: Parsed) -> None:
        raise ApiError(400, "no")

    with suppress(ApiError):
        await workers.run("a", 1, partial(refuse, parsed))
    return weakref.ref(parsed)


async def test_what_is_refused_is_let_go_at_once() -> None:
    """And not by a full garbage collection, which has to look at all of it first."""
    gc.disable()
    try:
        workers = Workers()
        parsed = await fails(workers)
        await workers.run("a", 1, lambda: None)  # behind which its thread is done with the first
        assert parsed() is None
    finally:
        gc.enable()


async def test_one_client_never_has_all_slots() -> None:
    """So another's call finds a slot that is free."""
    workers, blocked = Workers(), Blocked()
    for n_bytes in (1, LARGE_BYTES + 1):
        async with create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(partial(workers.run, "flood", n_bytes), blocked.run)
            assert await workers.run("other", n_bytes, lambda: "done") == "done"
            blocked.gate.set()
        assert blocked.most == 1
        blocked.gate.clear()


async def test_turns_cost_what_is_read() -> None:
    limiter, served = FairLimiter(1, 1), list[str]()

    async def ask(client: str, cost: float) -> None:
        async with limiter.slot(client, cost):
            served.append(client)

    async with create_task_group() as tasks, limiter.slot("first"):
        for client, cost in [("large", 100.0)] * 3 + [("small", 30.0)] * 5:
            tasks.start_soon(ask, client, cost)
            await checkpoint()
    assert served == [*["large"], *["small"] * 4, "large", "small", "large"]


async def test_after_an_idle_moment_nobody_pays_for_what_was_before() -> None:
    limiter, served = FairLimiter(1, 1), list[str]()

    async def ask(client: str) -> None:
        async with limiter.slot(client):
            served.append(client)

    async with limiter.slot("large", 100.0):
        pass
    async with create_task_group() as tasks, limiter.slot("first"):
        for client in ("large", "small", "small"):
            tasks.start_soon(ask, client)
            await checkpoint()
    assert served == ["large", "small", "small"]


async def test_a_call_that_takes_too_long_is_ended() -> None:
    workers, turns = Workers(work_seconds=0.05), 0

    def endless() -> None:
        nonlocal turns
        while True:
            turns += 1

    with pytest.raises(ApiError, match="too long") as caught:
        await workers.run("a", 1, endless)
    assert caught.value.status == 400
    ended_at = turns
    for _ in range(100):  # each in the thread that ran the first
        assert await workers.run("a", 1, lambda: sum(range(1000))) == sum(range(1000))
    assert turns == ended_at


async def test_calls_that_end_as_they_are_ended() -> None:
    """Whatever comes first, the thread is whole afterwards."""
    workers = Workers(work_seconds=0.001)
    ended = 0
    for _ in range(300):
        try:
            assert await workers.run("a", 1, lambda: sum(range(20_000))) == sum(range(20_000))
        except ApiError:
            ended += 1
    assert await Workers().run("a", 1, lambda: "done") == "done"
    assert ended < 300


def test_what_a_response_names_counts_as_if_it_said_it() -> None:
    store = ResponseStore(10, 1 << 20)
    before = StoredConversation([StoredItem("said", b"x" * LARGE_BYTES)])
    store.put("", "me", "resp_a", StoredResponse(b"{}", before, before))
    for names in (
        {"previous_response_id": "resp_a", "input": "Hi"},
        {"input": [{"type": "item_reference", "id": "said"}]},
    ):
        body = ResponsesRequest.model_validate(names)
        assert referenced_bytes(body, store, "me") > LARGE_BYTES
        assert referenced_bytes(body, store, "other") == 0
    references = [{"type": "item_reference", "id": id} for id in ("said", "said", "unsaid")]
    body = ResponsesRequest.model_validate({"input": references})
    assert referenced_bytes(body, store, "me") == 2 * store.item_bytes("me", "said")


START: Message = {"type": "http.response.start", "status": 200, "headers": []}
END: Message = {"type": "http.response.body", "body": b"", "more_body": False}
AT_ONCE = 1e-9


async def nothing_comes() -> Message:
    await sleep_forever()
    raise AssertionError("it was cancelled")


async def answered(app: ASGIApp, seconds: float | None) -> list[Message]:
    """What is sent by an application behind the gateway. None: without a time limit."""
    settings = Settings(request_timeout_seconds=seconds)
    policy = Policy(Keyring(()), Hosts("127.0.0.1"), Origins(()), has_namespaces=False)
    gateway = Gateway(
        app,
        settings,
        policy,
        body_budget(settings),
        output_budget(settings),
        HttpAnswers(),
        RequestTracker(),
        may_take_images=lambda: False,
    )
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/",
        "raw_path": b"/",
        "headers": [(b"host", b"localhost")],
    }
    await gateway(scope, nothing_comes, send)
    return sent


def outcome(sent: list[Message]) -> tuple[int, str | None]:
    """The status of an answer, and the code of its error."""
    body: dict[str, Any] = json.loads(b"".join(each.get("body", b"") for each in sent) or b"{}")
    return sent[0]["status"], body.get("error", {}).get("code")


async def test_a_request_that_waits_for_its_turn_leaves_the_queue() -> None:
    workers, blocked, made = Workers(), Blocked(), list[str]()

    async def prepare(name: str, scope: Scope, receive: Receive, send: Send) -> None:
        await workers.run("one", LARGE_BYTES + 1, lambda: made.append(name))
        await send(START)
        await send(END)

    async with create_task_group() as tasks:
        tasks.start_soon(workers.run, "one", LARGE_BYTES + 1, blocked.run)
        assert await asyncio.to_thread(blocked.until, 1)
        late = await answered(partial(prepare, "late"), AT_ONCE)
        assert outcome(late) == (504, "request_timeout")
        blocked.gate.set()
    assert outcome(await answered(partial(prepare, "next"), None)) == (200, None)
    assert made == ["next"]


async def test_what_is_ready_too_late_is_not_sent() -> None:
    """A thread is not ended: its request may be late without having waited since."""

    async def at_once(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)

    assert outcome(await answered(at_once, AT_ONCE)) == (504, "request_timeout")


async def test_an_answer_that_has_begun_ends_in_its_own_way() -> None:
    deadlines = list[float]()

    async def begins(scope: Scope, receive: Receive, send: Send) -> None:
        deadlines.append(current_effective_deadline())
        await send(START)
        deadlines.append(current_effective_deadline())
        await send(END)

    assert outcome(await answered(begins, 3600)) == (200, None)
    assert deadlines[0] < math.inf
    assert deadlines[1] == math.inf
