"""Whatever a body says, in whatever state its model is and whenever its client leaves: nothing of
it is counted afterwards, nothing of it stays in memory, and another client is answered.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import httpx
import pytest

from engine.api import ModelError
from server.fairness import Budget
from server.models.registry import ModelRegistry
from tests.contract.daemon import serving
from tests.contract.fake_engine import Gate, Script
from tests.contract.several import HI, Engines, needs, settings_of
from tests.contract.wire import connected, request_head
from tests.hostile.fields import fields
from tests.hostile.shapes import body, shapes
from tests.polling import WAIT_SECONDS, until
from tests.profiles import examples

SEED = 67
N_CASES = examples(60)
BODY_BYTES = 100_000
KEPT_BYTES = 80_000
"""Less than one body. Python's own tables and the daemon's records of requests grow by less."""
CHAT = "/v1/chat/completions"


class State(Enum):
    """The state of the model that a request names, and that name."""

    READY = "one"
    LOADING = "two"
    FAILED = "three"
    ABSENT = "nobody"


class Leaving(Enum):
    """When a client leaves."""

    HALF_SENT = "in the midst of its body"
    SENT = "when all of its body is sent"
    WAITING = "while it waits: for the model, or for the rest of its answer"
    ANSWERED = "with the whole answer"


LEAVES: dict[State, Sequence[Leaving]] = {
    State.READY: tuple(Leaving),
    State.LOADING: tuple(one for one in Leaving if one is not Leaving.ANSWERED),
    State.FAILED: tuple(one for one in Leaving if one is not Leaving.WAITING),
    State.ABSENT: tuple(one for one in Leaving if one is not Leaving.WAITING),
}


@dataclass(frozen=True)
class Case:
    name: str
    route: str
    content: bytes
    leaving: Leaving


@dataclass
class StateDaemon:
    """A daemon of which `one` is loaded and answers when its gate is opened, `two` loads for ever
    and `three` cannot be loaded.
    """

    url: str
    http: httpx.Client
    engines: Engines
    budgets: list[Budget]

    @property
    def counted_bytes(self) -> int:
        return sum(budget.total_bytes for budget in self.budgets)

    @property
    def n_waiting(self) -> int:
        """How many requests wait for models."""
        models = self.http.get("/admin/models").json()["models"]
        return sum(model["waiting"] for model in models)

    @property
    def n_running(self) -> int:
        """How many requests the daemon knows."""
        return len(self.http.get("/admin/requests").json()["requests"])

    def left_over(self) -> tuple[int, int, int]:
        """The bytes that are counted, the requests that wait for a model, and those that run."""
        return self.counted_bytes, self.n_waiting, self.n_running

    def play_all(self, cases: Sequence[Case]) -> None:
        """One after another; after each, nothing waits and nothing is counted."""
        for case in cases:
            self.play(case)
            try:
                until(self.left_over, lambda found: not any(found))
            except AssertionError as error:
                raise AssertionError(f"after {case.name}, left {case.leaving.value}") from error
            self.engines.made[0].reset()

    def play(self, case: Case) -> None:
        """Be the client of the case."""
        (engine,) = self.engines.made
        engine.script = Script(gate=Gate() if case.leaving is Leaving.WAITING else None)
        with connected(self.url) as connection:
            whole = request_head(case.content, path=case.route)
            if case.leaving is Leaving.HALF_SENT:
                connection.sendall(whole[: -len(case.content) // 2])
                return
            connection.sendall(whole)
            connection.setblocking(False)
            answer = b""

            def is_answered() -> bool:
                nonlocal answer
                try:
                    answer += connection.recv(1 << 16)
                except BlockingIOError:
                    return False
                return b"\r\n\r\n" in answer

            if case.leaving is Leaving.WAITING:
                until(lambda: engine.at_gate.qsize() or self.n_waiting or is_answered())
            elif case.leaving is Leaving.ANSWERED:
                until(is_answered)


@pytest.fixture
def daemon(budgets: list[Budget]) -> Iterator[StateDaemon]:
    settings, engines = settings_of(tool_parser="hermes"), Engines()
    with (
        serving(ModelRegistry(settings, engines, needs), settings) as url,
        httpx.Client(base_url=url, timeout=WAIT_SECONDS) as http,
    ):
        yield StateDaemon(url, http, engines, budgets)


def cases(http: httpx.Client, state: State) -> list[Case]:
    """Costly values in fields of routes that name a model, drawn at random. No response is to be
    stored: those that are have a limit of their own.
    """
    drawing = random.Random(f"{SEED} {state}")
    document = http.get("/openapi.json").json()
    found = [
        (one, name, shape)
        for one in fields(document)
        if one.method == "POST"
        and one.name != "model"
        and one.route.startswith(("/v1/", "/api/", "/rerank", "/score"))
        for name, shape in shapes(one).items()
    ]
    return [
        Case(
            f"{one.route} {one.name} {name}",
            one.route,
            with_fields(body(one, shape, BODY_BYTES), model=state.value, store=False),
            drawing.choice(LEAVES[state]),
        )
        for one, name, shape in drawing.sample(found, N_CASES)
    ]


def with_fields(content: bytes, **values: str | bool) -> bytes:
    """The body with these values, in the place of those that it has."""
    for name, value in values.items():
        written = json.dumps(value).encode()
        found = rb'(?<="%b": )("[^"]*"|true|false)' % name.encode()
        content, n_found = re.subn(found, written, content, count=1)
        if not n_found:
            content = b'{"%b": %b, ' % (name.encode(), written) + content[1:]
    return content


@pytest.mark.parametrize("state", State, ids=lambda state: state.name.lower())
def test_nothing_of_a_body_is_left_in_any_state_of_its_model(
    daemon: StateDaemon, traced: Callable[[], int], state: State
) -> None:
    if state is State.LOADING:
        daemon.engines.gate = Gate()
    else:
        daemon.engines.failure = ModelError("a test lets it fail")
    drawn = cases(daemon.http, state)
    daemon.play_all(drawn)
    before = traced()
    daemon.play_all(drawn)
    assert traced() - before < KEPT_BYTES
    daemon.engines.made[0].script = Script()
    answer = daemon.http.post(CHAT, json={"model": "one", "messages": [HI]})
    assert answer.status_code == 200
    if daemon.engines.gate is not None:
        daemon.engines.gate.open()
