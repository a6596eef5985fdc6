"""A daemon on a machine whose memory runs short, step by step, and comes back."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from logging import LogRecord
from logging.handlers import QueueHandler
from queue import Queue
from typing import Any

import httpx
import openai
import pytest

from server.models.registry import ModelRegistry
from server.pressure import guard as guard_module
from server.pressure.guard import EVICTED_SHARE, MemoryGuard
from server.settings import Settings
from tests.contract.daemon import registry_of, serving
from tests.contract.fake_engine import MEMORY, FakeEngine, Gate, Script
from tests.contract.metrics import value
from tests.contract.pressure import ScriptedSources
from tests.contract.scripted import CLIENT_SECONDS
from tests.contract.several import HI, Engines, needs, settings_of
from tests.polling import until

SHORT, GONE = 0.91, 0.99
STEPS = ["none", "buffers", "prefixes", "admission", "models", "requests"]
REFUSED = [
    ("/v1/chat/completions", {"messages": [HI]}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {"messages": [HI], "max_tokens": 4}),
    ("/api/chat", {"messages": [HI]}),
    ("/v1/embeddings", {"input": "Hi"}),
]


class Machine:
    """A daemon on it, its source, and a client."""

    def __init__(self, http: httpx.Client, sources: ScriptedSources, engine: FakeEngine) -> None:
        """`engine`: of the only model."""
        self.http = http
        self.sources = sources
        self.engine = engine

    def guard(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/admin/models").json()["memory_guard"]
        return found

    def reach(self, share: float, step: str) -> None:
        """Let so much be in use until the step is taken."""
        self.sources.share = share
        until(lambda: self.guard()["step"], lambda found: found == step)

    def read(self, n: int = 3) -> None:
        """Wait until this many more readings have been taken, and acted on."""
        seen = self.sources.n_read
        until(lambda: self.sources.n_read > seen + n)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "INTERVAL_SECONDS", 0.01)


@contextmanager
def machine(
    models: ModelRegistry, settings: Settings, engine: FakeEngine | None = None
) -> Iterator[Machine]:
    sources = ScriptedSources()
    guard = MemoryGuard(sources.read, models, settings.memory_guard)
    with ExitStack() as stack:
        url = stack.enter_context(serving(models, settings, guard=guard))
        http = stack.enter_context(httpx.Client(base_url=url, timeout=CLIENT_SECONDS))
        yield Machine(http, sources, engine or FakeEngine())


@pytest.fixture
def alone() -> Iterator[Machine]:
    engine, settings = FakeEngine(), Settings(port=0)
    with machine(registry_of(engine, settings), settings, engine) as made:
        yield made


@pytest.fixture
def lines() -> Iterator["Queue[LogRecord]"]:
    queue: Queue[LogRecord] = Queue()
    handler, logger = QueueHandler(queue), logging.getLogger("rootstock.memory")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield queue
    logger.removeHandler(handler)
    logger.setLevel(before)


def messages(lines: "Queue[LogRecord]") -> list[str]:
    return [lines.get_nowait().getMessage() for _ in range(lines.qsize())]


def test_steps_are_shown_where_people_and_routers_look(
    alone: Machine, lines: "Queue[LogRecord]"
) -> None:
    http = alone.http
    alone.read()
    assert http.get("/health").json() == {"status": "ok"}
    guard = alone.guard()
    assert (guard["step"], guard["problem"]) == ("none", None)
    (reading,) = guard["readings"]
    assert (reading["source"], reading["limit"]) == ("group", 0.9)
    assert alone.sources.engines_bytes == MEMORY.model.process_bytes
    alone.reach(SHORT, "prefixes")
    health = http.get("/health").json()
    assert health["status"] == "ok"
    assert health["memory"] == (
        "cached prefixes are evicted: 91% of the control group / are in use (limit 90.0%)"
    )
    alone.reach(GONE, "requests")
    health = http.get("/health").json()
    assert health["status"] == "degraded"
    assert "99% of the control group / are in use (limit 95.0%)" in health["reason"]
    assert alone.guard()["problem"] == health["memory"]
    text = http.get("/metrics").text
    assert value(text, "rootstock_memory_share", source="group") == pytest.approx(GONE)
    assert value(text, "rootstock_memory_guard_step") == 5
    assert value(text, "rootstock_memory_guard_actions_total", step="buffers") >= 5
    assert value(text, "rootstock_memory_guard_actions_total", step="admission") == 1
    assert value(text, "rootstock_memory_guard_actions_total", step="requests") == 0
    assert value(text, "rootstock_memory_guard_evicted_blocks_total") >= 32
    alone.reach(0.0, "none")
    assert http.get("/health").json() == {"status": "ok"}
    said = messages(lines)
    taken = [line for line in said if line.startswith("memory is short")]
    assert len(taken) == 5, said
    assert "(limit 90.0%): free buffers" in taken[0]
    assert "(limit 95.0%): requests are refused" in taken[2]
    assert len(said) == 10


def test_buffers_go_before_prefixes(alone: Machine) -> None:
    engine = alone.engine
    alone.read()
    assert engine.given_back == []
    alone.reach(SHORT, "prefixes")
    alone.read()
    first, *rest = engine.given_back
    assert first == 0.0
    assert rest
    assert set(rest) == {EVICTED_SHARE}


@pytest.mark.parametrize(("path", "body"), REFUSED)
def test_requests_are_refused_with_a_time_to_come_again(
    alone: Machine, path: str, body: dict[str, Any]
) -> None:
    (model,) = alone.http.get("/v1/models").json()["data"]
    body = {"model": model["id"], **body}
    assert alone.http.post(path, json=body).status_code == 200
    alone.reach(SHORT, "prefixes")
    alone.read(10)
    assert alone.http.post(path, json=body).status_code == 200, "memory is only short"
    alone.reach(GONE, "requests")
    answer = alone.http.post(path, json=body)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert "99% of the control group / are in use (limit 95.0%)" in answer.text
    assert alone.http.get("/v1/models").status_code == 200
    text = alone.http.get("/metrics").text
    assert value(text, "rootstock_access_refused_total", reason="memory", key="") == 1
    alone.reach(0.0, "none")
    assert alone.http.post(path, json=body).status_code == 200


def test_the_sdk_says_why_and_is_answered_when_memory_is_back(alone: Machine) -> None:
    alone.reach(GONE, "requests")
    url = f"{alone.http.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="-", max_retries=0) as client:
        (model,) = client.models.list().data

        def ask() -> str | None:
            asked = client.chat.completions.create(
                model=model.id, messages=[{"role": "user", "content": "?"}]
            )
            return asked.choices[0].message.content

        with pytest.raises(openai.InternalServerError) as refused:
            ask()
        assert refused.value.code == "memory_short"
        alone.reach(0.0, "none")
        assert ask()


def streamed(http: httpx.Client, text: str) -> Iterator[str]:
    body = {"messages": [{"role": "user", "content": text}], "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


def test_the_longest_request_ends_with_an_error_and_the_others_go_on(alone: Machine) -> None:
    engine = alone.engine
    gate = Gate()
    engine.script = Script(answers=["ab"], gate=gate, gate_after_tokens=1)
    engine.blocks_of = lambda request: len(request.prompt)
    short = streamed(alone.http, "short")
    with httpx.Client(base_url=alone.http.base_url, timeout=CLIENT_SECONDS) as other:
        long = streamed(other, "long " * 20)
        begun = [next(short), next(long)]
        assert all(json.loads(line)["choices"] for line in begun)
        alone.sources.share = GONE
        rest = list(long)
        error = json.loads(rest[-1])["error"]
        assert error["code"] == "memory_short"
        assert (
            "was this one: 99% of the control group / are in use (limit 95.0%)"
            in (error["message"])
        )
        alone.sources.share = 0.0
        gate.open()
        assert list(short)[-1] == "[DONE]"
    text = alone.http.get("/metrics").text
    assert value(text, "rootstock_memory_guard_actions_total", step="requests") >= 1


def states(http: httpx.Client) -> Sequence[str]:
    return [model["state"] for model in http.get("/admin/models").json()["models"]]


def test_idle_models_are_unloaded_and_come_back(lines: "Queue[LogRecord]") -> None:
    settings, engines = settings_of(), Engines()
    with machine(ModelRegistry(settings, engines, needs), settings) as daemon:
        http, body = daemon.http, {"model": "two", "messages": [HI]}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        assert states(http) == ["ready", "ready", "unloaded"]
        daemon.sources.share = GONE
        until(lambda: states(http), lambda found: found == ["unloaded"] * 3)
        said = "\n".join(messages(lines))
        assert "one is unloaded, which no request uses" in said
        assert said.index("one is unloaded") < said.index("two is unloaded"), "the idlest first"
        assert http.post("/v1/chat/completions", json=body).status_code == 503
        daemon.reach(0.0, "none")
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        assert states(http)[1] == "ready"


def test_nothing_is_loaded_while_memory_is_nearly_gone() -> None:
    settings, engines = settings_of(), Engines()
    with machine(ModelRegistry(settings, engines, needs), settings) as daemon:
        daemon.reach(GONE, "requests")
        loaded = len(engines.started)
        with pytest.raises(httpx.ReadTimeout):
            daemon.http.post("/admin/models/load?model=three", timeout=0.5)
        assert len(engines.started) == loaded
        daemon.reach(0.0, "none")
        until(lambda: states(daemon.http)[2], lambda found: found in ("ready", "unloaded"))
        assert daemon.http.post("/admin/models/load?model=three").status_code == 200


def test_a_pinned_model_stays(alone: Machine) -> None:
    alone.reach(GONE, "requests")
    alone.read(5)
    assert states(alone.http) == ["ready"]


def test_buffers_of_a_device_are_watched(alone: Machine) -> None:
    engine = alone.engine
    engine.memory = replace(MEMORY, arrays=420_000, most_arrays=499_000, states=7)
    until(lambda: alone.guard()["step"], lambda step: step == "prefixes")
    text = alone.http.get("/metrics").text
    assert value(text, "rootstock_memory_share", source="buffers") == pytest.approx(420 / 499)
    assert value(text, "rootstock_kept_arrays") == 420_000
    assert value(text, "rootstock_state_bytes") == 7
    assert (
        "keeps 420,000 of the 499,000 buffers that a process may have" in (alone.guard()["problem"])
    )
    engine.memory = MEMORY
    alone.reach(0.0, "none")


def test_a_source_that_fails_ends_nothing(alone: Machine, lines: "Queue[LogRecord]") -> None:
    alone.sources.is_readable = False
    said = lines.get(timeout=CLIENT_SECONDS).getMessage()
    alone.sources.is_readable = True
    assert "cannot be watched" in said
    alone.reach(GONE, "requests")
    alone.reach(0.0, "none")


def test_an_engine_that_has_ended_gives_nothing_back(alone: Machine) -> None:
    engine = alone.engine
    engine.script = Script(dead=True)
    alone.reach(GONE, "requests")
    engine.script = Script()
    alone.reach(0.0, "none")
