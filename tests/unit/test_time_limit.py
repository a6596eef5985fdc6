"""A request's deadline, whatever it waits for."""

import json
import math
from functools import partial
from typing import Any

from anyio import current_effective_deadline, sleep_forever
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.access.keys import Keyring
from server.access.policy import Policy
from server.access.web import Hosts, Origins
from server.activity import RequestTracker
from server.gateway import Gateway, body_budget, output_budget
from server.metrics.metrics import HttpAnswers
from server.record import Principal, RequestRecord, request_record
from server.settings import Settings
from server.workers import LARGE_BYTES, Workers

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
    workers, made = Workers(), list[str]()

    async def prepare(name: str, scope: Scope, receive: Receive, send: Send) -> None:
        record = request_record(scope)
        record.n_bytes = LARGE_BYTES + 1
        await workers.prepare(record, lambda: made.append(name))
        await send(START)
        await send(END)

    first = RequestRecord("first", Principal("first"), n_bytes=LARGE_BYTES + 1)
    async with first.held:
        await workers.prepare(first, lambda: made.append("first"))
        late = await answered(partial(prepare, "late"), AT_ONCE)
        assert outcome(late) == (504, "request_timeout")
    assert outcome(await answered(partial(prepare, "next"), None)) == (200, None)
    assert made == ["first", "next"]


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
