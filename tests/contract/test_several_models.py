"""Several models behind one door: by name, loaded when asked for, within a budget."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from logging import LogRecord
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest
from huggingface_hub import constants
from openai.types.responses import ResponseErrorEvent

from engine.api import ModelError
from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT
from engine.values.stats import EngineStats, Latency, RequestInfo
from server.models import hub, registry
from server.models.registry import ModelRegistry
from server.settings import Settings, load_settings
from server.settings.models import ModelSettings
from tests.contract.access.helpers import bearer, key_file, secret_of
from tests.contract.daemon import serving
from tests.contract.fake_engine import (
    CARD,
    FakeEngine,
    Gate,
    HeldTokenizer,
    observed,
)
from tests.contract.metrics import metric_families, value
from tests.contract.scripted import strict_client
from tests.contract.several import HI, MIB, Engines, needs, settings_of
from tests.contract.wire import posted
from tests.polling import WAIT_SECONDS, until


@pytest.fixture
def engines() -> Engines:
    return Engines()


Serve = Callable[..., httpx.Client]


@pytest.fixture
def serve(engines: Engines) -> Iterator[Serve]:
    with ExitStack() as stack:

        def start(settings: Settings | None = None, **headers: str) -> httpx.Client:
            chosen = settings or settings_of()
            url = stack.enter_context(serving(ModelRegistry(chosen, engines, needs), chosen))
            client = httpx.Client(base_url=url, headers=headers, timeout=30)
            return stack.enter_context(client)

        yield start


def chat(client: httpx.Client, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "messages": [HI], **more}
    return client.post("/v1/chat/completions", json=body)


def said(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


def states(client: httpx.Client) -> dict[str, str]:
    return {one["id"]: one["state"] for one in client.get("/admin/models").json()["models"]}


def ollama(client: httpx.Client, model: str, **more: Any) -> Any:
    """The answer of Ollama's chat."""
    body = {"model": model, "messages": [HI], "stream": False, **more}
    return client.post("/api/chat", json=body).raise_for_status().json()


def when_unused(client: httpx.Client, model: str) -> dict[str, Any]:
    """The model's entry once no request uses it."""

    def entry() -> dict[str, Any]:
        listed = client.get("/admin/models").raise_for_status().json()["models"]
        return next(one for one in listed if one["id"] == model)

    return until(entry, lambda found: not found["requests"])


def test_each_name_has_its_model(serve: Serve, engines: Engines) -> None:
    client = serve()
    assert states(client) == {"one": "ready", "two": "unloaded", "three": "unloaded"}
    assert said(chat(client, "uno")) == said(chat(client, "one")) == said(chat(client, ""))
    assert said(chat(client, "two")) == "I am load 2"
    assert states(client) == {"one": "ready", "two": "ready", "three": "unloaded"}
    assert said(chat(client, "two")) == "I am load 2"
    assert len(engines.started) == 2


def test_a_model_has_memory_by_parts_while_it_is_loaded_and_none_before(serve: Serve) -> None:
    loaded, unloaded, _ = serve().get("/admin/models").json()["models"]
    assert loaded["memory"] == {
        "weights_bytes": 20 * MIB,
        "kv_bytes": 50 * MIB,
        "states_bytes": 0,
        "events_bytes": 0,
        "workspace_bytes": 330 * MIB,
        "process_bytes": 0,
        "total_bytes": 400 * MIB,
    }
    assert unloaded["memory"] is None


def test_the_least_recently_used_gives_way_within_the_budget(
    serve: Serve, engines: Engines
) -> None:
    client = serve()
    for name in ("two", "one", "three"):
        assert chat(client, name).status_code == 200
    assert states(client) == {"one": "ready", "two": "unloaded", "three": "ready"}
    assert engines.made[1].drained.qsize() == 1
    given = [config.memory_bytes or 0 for config in engines.started]
    assert all(400 * MIB < each < 800 * MIB for each in given)


def test_a_clear_is_of_every_model_and_one_that_fails_keeps_no_other_from_it(
    serve: Serve, engines: Engines
) -> None:
    client = serve()
    chat(client, "two")
    freed = {"blocks_freed": 20, "bytes_freed": 655_360, "failure": None}
    both = client.post("/admin/cache/clear").raise_for_status().json()
    assert both["models"] == [{"id": name, **freed} for name in ("one", "two")]
    assert (both["blocks_freed"], both["bytes_freed"]) == (40, 2 * 655_360)
    engines.made[0].script.dead = True
    one, two = client.post("/admin/cache/clear").raise_for_status().json()["models"]
    assert (one["id"], one["blocks_freed"]) == ("one", 0)
    assert one["failure"]
    assert two == {"id": "two", **freed}
    assert client.post("/admin/cache/clear?model=one").status_code == 503


def test_a_clear_deletes_what_models_that_are_not_loaded_have_on_disk(
    serve: Serve, engines: Engines, tmp_path: Path
) -> None:
    """The engines are fakes: what they would have written is written here."""

    def written(*fingerprints: str) -> None:
        for index, fingerprint in enumerate(fingerprints):
            folder = tmp_path / f"v4-{index:032}"
            folder.mkdir()
            (folder / "fingerprint").write_text(f"{fingerprint} kv1")
            (folder / f"{index:016}.kv").write_bytes(bytes(8192))

    def left() -> list[str]:
        return sorted(path.name for path in tmp_path.glob("v4-*"))

    client = serve(settings_of(disk_cache=tmp_path))
    written("of an earlier daemon", CARD.fingerprint)
    kept = client.post("/admin/cache/clear?tiers=memory").raise_for_status().json()
    assert (kept["disk_bytes_freed"], len(left())) == (0, 2)
    refused = client.post("/admin/cache/clear?model=two")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_not_loaded")
    assert "without a model" in refused.json()["error"]["message"]
    chat(client, "two")
    client.post("/admin/models/unload?model=two").raise_for_status()
    named = client.post("/admin/cache/clear?model=two").raise_for_status().json()
    assert named["models"] == []
    assert named["disk_bytes_freed"] >= 8192
    assert left() == [f"v4-{0:032}"]
    client.post("/admin/models/unload?model=one").raise_for_status()
    everything = client.post("/admin/cache/clear?tiers=disk").raise_for_status().json()
    assert everything["disk_bytes_freed"] >= 8192
    assert left() == []


def test_while_no_model_is_loaded_all_else_is_cleared(serve: Serve, engines: Engines) -> None:
    client = serve()
    client.post("/v1/responses", json={"input": "Hi"}).raise_for_status()
    client.post("/admin/models/unload?model=one").raise_for_status()
    for query in ("", "?model=one", "?model=two"):
        kept = client.post(f"/admin/cache/clear{query}").raise_for_status().json()
        assert (kept["models"], kept["kept"]["responses"]) == ([], 1)
    query = "?what=kv,replays,responses"
    cleared = client.post(f"/admin/cache/clear{query}").raise_for_status().json()
    assert (cleared["models"], cleared["forgotten"]["responses"]) == ([], 1)


def test_a_model_that_is_loaded_again_counts_anew_and_its_histograms_go_on(
    serve: Serve, engines: Engines
) -> None:
    """Counters are the engine's, and Prometheus knows restarts. Latencies are the model's."""
    client = serve()

    def figures() -> tuple[float, float, float]:
        text = client.get("/metrics").text
        names = ("kv_contradictions_total", "step_seconds_count", "step_seconds_sum")
        contradictions, count, seconds = (
            value(text, f"rootstock_{name}", model="one") for name in names
        )
        return contradictions, count, seconds

    (first,) = engines.made
    first.n_contradictions, first.latencies = 3, observed(Latency.STEP, 0.25, 0.25)
    client.post("/admin/models/unload", params={"model": "one"}).raise_for_status()
    assert figures() == (3, 2, 0.5), "they stand, as the engine has left them"
    client.post("/admin/models/load", params={"model": "one"}).raise_for_status()
    assert figures() == (0, 2, 0.5)
    engines.made[-1].latencies = observed(Latency.STEP, 0.5)
    assert figures() == (0, 3, 1.0)
    assert figures() == (0, 3, 1.0), "a scrape adds nothing"


def test_an_unknown_name_is_no_other_model(serve: Serve, engines: Engines) -> None:
    answer = chat(serve(), "four")
    assert answer.status_code == 404
    assert "'one', 'uno', 'two', 'three'" in answer.json()["error"]["message"]
    assert len(engines.started) == 1


def test_a_stream_has_comments_while_its_model_is_loaded(serve: Serve, engines: Engines) -> None:
    client = serve(settings_of(keepalive_seconds=0.01))
    engines.gate = Gate()
    body = {"model": "two", "stream": True, "messages": [HI]}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert next(lines) == ": keep-alive"
        engines.gate.open()
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
    assert sum('"role":"assistant"' in line for line in rest) == 1


def test_a_stream_keeps_its_time_limit_while_its_model_is_loaded(
    serve: Serve, engines: Engines
) -> None:
    """The limit doubles until the machine is fast enough to send a comment before it."""
    seconds = 0.25
    while (rest := rest_behind_comment(serve, engines, seconds)) is None:
        seconds *= 2
    (error,) = [line for line in rest if line.startswith("data: {")]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "request_timeout"


def rest_behind_comment(serve: Serve, engines: Engines, seconds: float) -> list[str] | None:
    """The lines of a stream after the first comment; None where the limit was too short for it."""
    engines.gate = None
    limits = {"request_timeout_seconds": seconds, "load_timeout_seconds": 8 * seconds}
    client = serve(settings_of(keepalive_seconds=0.01, **limits))
    engines.gate = Gate()
    body = {"model": "two", "stream": True, "messages": [HI]}
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code == 504:
                return None
            lines = answer.iter_lines()
            assert next(lines) == ": keep-alive"
            return list(lines)
    finally:
        engines.gate.open()


def test_leaving_a_stream_whose_model_has_been_loaded_ends_its_preparation(
    engines: Engines, serve: Serve, departures: "Queue[LogRecord]"
) -> None:
    """A request for the first model occupies the worker that would encode the prompt."""
    engines.tokenizer = tokenizer = HeldTokenizer()
    client = serve()
    url, path = str(client.base_url).rstrip("/"), "/v1/completions"
    body = {"prompt": "Hi", "stream": True}
    try:
        with posted(url, path, body):
            tokenizer.encoding.get(timeout=WAIT_SECONDS)
            with posted(url, path, {"model": "two", **body}):
                until(lambda: states(client)["two"] == "ready")
            assert path in departures.get(timeout=WAIT_SECONDS).getMessage()
    finally:
        tokenizer.gate.open()
    assert tokenizer.encoding.empty()


@pytest.mark.parametrize(
    ("path", "body", "event"),
    [
        ("/v1/chat/completions", {"messages": [HI]}, None),
        ("/v1/completions", {"prompt": "x"}, None),
        ("/v1/messages", {"max_tokens": 1, "messages": [HI]}, "error"),
    ],
)
def test_what_fails_behind_comments_is_an_event(
    serve: Serve, engines: Engines, path: str, body: dict[str, Any], event: str | None
) -> None:
    client = serve(settings_of(keepalive_seconds=0.01))
    engines.gate, engines.failure = Gate(), ModelError("no weights")
    with client.stream("POST", path, json={"model": "two", "stream": True, **body}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": keep-alive"
        engines.gate.open()
        rest = [line for line in lines if line and not line.startswith(":")]
    assert rest[:-1] == ([f"event: {event}"] if event else [])
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert error["message"] == "The model 'two' cannot be used: no weights."


def test_a_response_that_fails_behind_comments_is_the_official_error_event(
    serve: Serve, engines: Engines
) -> None:
    client = serve(settings_of(keepalive_seconds=0.01))
    engines.gate, engines.failure = Gate(), ModelError("no weights")
    official = strict_client(str(client.base_url).rstrip("/"))
    with official.responses.create(model="two", input="x", stream=True) as events:
        engines.gate.open()
        (event,) = events
    assert event == ResponseErrorEvent(
        type="error",
        sequence_number=0,
        message="The model 'two' cannot be used: no weights.",
        param=None,
        code="model_failed",
    )


def test_a_load_that_fails_is_an_error_with_its_reason_at_once_and_again(
    serve: Serve, engines: Engines
) -> None:
    client = serve()
    engines.failure = ModelError("no weights")
    for _ in range(2):
        answer = chat(client, "two")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "model_failed"
        assert "no weights" in answer.json()["error"]["message"]
    assert len(engines.started) == 2, "the second was refused without another try"
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert health.json()["reason"] == "two has failed: no weights"
    assert chat(client, "one").status_code == 200
    engines.failure = None
    assert client.post("/admin/models/unload?model=two").json()["state"] == "unloaded"
    assert chat(client, "two").status_code == 200


def test_what_never_fits_is_refused_at_once(serve: Serve, engines: Engines) -> None:
    models = (
        ModelSettings(model="rootstock-demo", served_model_name=("one",)),
        ModelSettings.model_validate(
            {
                "model": "rootstock-demo",
                "served_model_name": ("large",),
                "preload": False,
                "kv_cache_bytes": 4 << 30,
            }
        ),
    )
    answer = chat(serve(settings_of(models=models)), "large")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_too_large")
    message = answer.json()["error"]["message"]
    assert "(weights 20 MiB, KV cache 4.0 GiB, computing 280 MiB)" in message
    assert "may take 1.3 GiB (memory_budget)" in message
    assert len(engines.started) == 1


def test_an_admin_loads_and_unloads(serve: Serve) -> None:
    client = serve()
    loaded = client.post("/admin/models/load?model=two").json()
    assert (loaded["id"], loaded["state"], loaded["requests"]) == ("two", "ready", 1)
    assert client.post("/admin/models/unload?model=uno").json()["state"] == "unloaded"
    assert states(client) == {"one": "unloaded", "two": "ready", "three": "unloaded"}
    assert client.post("/admin/models/load?model=four").status_code == 404
    listed = client.get("/v1/models").json()["data"]
    assert [(one["id"], one["state"]) for one in listed] == [
        *(("one", "unloaded"), ("uno", "unloaded")),
        *(("two", "ready"), ("three", "unloaded")),
    ]
    assert [one["max_model_len"] for one in listed] == [512, 512, 512, None]


def test_a_keep_alive_of_zero_is_one_requests_own(serve: Serve) -> None:
    client = serve(settings_of(ttl_seconds=600))
    assert ollama(client, "two", keep_alive=0)["done_reason"] == "stop"
    until(lambda: states(client)["two"] == "unloaded")
    assert chat(client, "two").status_code == 200
    entry = when_unused(client, "two")
    assert (entry["state"], entry["ttl_seconds"]) == ("ready", 600)
    assert 0 < entry["seconds_left"] <= 600
    assert ollama(client, "two", keep_alive=0)["done_reason"] == "stop"
    assert 0 < when_unused(client, "two")["seconds_left"] <= 600


def test_a_keep_alive_without_an_end_has_no_time_left(serve: Serve) -> None:
    client = serve(settings_of(ttl_seconds=600))
    ollama(client, "two", keep_alive=-1)
    assert chat(client, "two").status_code == 200
    assert when_unused(client, "two")["seconds_left"] is None
    (loaded,) = [one for one in client.get("/api/ps").json()["models"] if one["name"] == "two"]
    assert loaded["expires_at"].startswith("9999"), "it stays"


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_users_unload_request_ends_the_users_own_wish(
    serve: Serve, tmp_path: Path, path: str
) -> None:
    keys = key_file(tmp_path, alice={}, bob={}, root={"role": "admin"})
    client = serve(settings_of(api_keys_file=keys, ttl_seconds=600))

    def stop(key: str) -> None:
        client.headers.update(bearer(secret_of(key)))
        answer = client.post(path, json={"model": "two", "keep_alive": 0})
        assert (answer.status_code, answer.json()["done_reason"]) == (200, "unload")
        client.headers.update(bearer(secret_of("root")))

    for key in ("alice", "bob"):
        client.headers.update(bearer(secret_of(key)))
        assert chat(client, "two").status_code == 200
    client.headers.update(bearer(secret_of("root")))
    when_unused(client, "two")
    stop("bob")
    entry = when_unused(client, "two")
    assert entry["state"] == "ready"
    assert 0 < entry["seconds_left"] <= 600
    stop("alice")
    until(lambda: states(client)["two"] == "unloaded")
    client.headers.update(bearer(secret_of("alice")))
    assert chat(client, "two").status_code == 200
    stop("root")
    until(lambda: states(client)["two"] == "unloaded")


def test_without_keys_an_unload_request_of_ollama_unloads(serve: Serve, engines: Engines) -> None:
    pinned = ModelSettings(model="rootstock-demo", served_model_name=("one",), pinned=True)
    client = serve(settings_of(models=(pinned,)))
    answer = client.post("/api/generate", json={"model": "one", "keep_alive": 0})
    assert (answer.status_code, answer.json()["done_reason"]) == (200, "unload")
    until(lambda: states(client)["one"] == "unloaded")
    assert said(chat(client, "one")) == "I am load 2"


def test_looking_loads_nothing(serve: Serve, engines: Engines) -> None:
    client = serve()
    for path in ("/admin/cache/tree", "/admin/cache/stats", "/admin/cache/nodes/1"):
        answer = client.get(path, params={"model": "two"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_not_loaded")
        assert answer.json()["error"]["message"] == "The model 'two' is not loaded."
        assert client.get(path, params={"model": "four"}).status_code == 404
    assert client.get("/admin/cache/stats", params={"model": "uno"}).status_code == 200
    labels = client.get("/admin/cache/nodes", params={"model": "two", "ids": 1})
    assert labels.json() == {"shows_text": False, "beginnings": {}}
    daemon = client.get("/admin/daemon", params={"model": "two"}).json()
    assert (daemon["names"], daemon["model"], daemon["memory"]) == (["two"], None, None)
    assert len(engines.started) == 1


def test_figures_have_the_name_of_their_model(serve: Serve) -> None:
    client = serve()
    chat(client, "two")
    families = metric_families(client.get("/metrics").text)
    running = families["rootstock_requests_running"].samples
    assert {sample.labels["model"] for sample in running} == {"one", "two"}
    state = {
        sample.labels["model"]: sample.labels["state"]
        for sample in families["rootstock_model_state"].samples
        if sample.value
    }
    assert state == {"one": "ready", "two": "ready", "three": "unloaded"}


def test_answers_under_an_alias_are_measured_under_the_models_own_name(serve: Serve) -> None:
    client = serve()
    assert chat(client, "uno").status_code == 200
    text = client.get("/metrics").text
    assert value(text, "vllm:request_generation_tokens_count", model_name="one") == 1


def test_a_key_reaches_the_models_it_names(serve: Serve, tmp_path: Path) -> None:
    keys = key_file(tmp_path, alice={"models": ["uno"]}, root={"role": "admin"})
    client = serve(settings_of(api_keys_file=keys), **bearer(secret_of("alice")))
    assert chat(client, "one").status_code == 200
    for model in ("two", "three"):
        for body in ({}, {"stream": True}):
            answer = chat(client, model, **body)
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "model_not_allowed"
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["one", "uno"]
    assert client.get("/v1/models/two").status_code == 403
    assert client.get("/admin/models").status_code == 403
    assert client.get("/admin/models", headers=bearer(secret_of("root"))).status_code == 200


def test_a_key_sees_no_loaded_model_that_it_may_not_use(serve: Serve, tmp_path: Path) -> None:
    keys = key_file(tmp_path, alice={"models": ["uno"]}, root={"role": "admin"})
    client = serve(settings_of(api_keys_file=keys))
    client.headers.update(bearer(secret_of("root")))
    for name in ("one", "two"):
        client.post("/admin/models/load", params={"model": name})
    for key, seen in (("root", {"one", "two"}), ("alice", {"one"})):
        client.headers.update(bearer(secret_of(key)))
        assert {each["name"] for each in client.get("/api/ps").json()["models"]} == seen


def test_an_unknown_name_is_answered_with_those_that_the_key_may_use(
    serve: Serve, tmp_path: Path
) -> None:
    keys = key_file(tmp_path, alice={"models": ["uno"]}, eve={"models": ["gone"]})
    client = serve(settings_of(api_keys_file=keys))
    for key, known in (("alice", "'one', 'uno'"), ("eve", "none for this key")):
        client.headers.update(bearer(secret_of(key)))
        asked = [chat(client, "four", **body) for body in ({}, {"stream": True})]
        for answer in (*asked, client.get("/v1/models/four")):
            assert answer.status_code == 404
            message = f"The model 'four' does not exist; there is {known}."
            assert answer.json()["error"]["message"] == message


def test_a_model_that_is_loaded_again_is_no_secret_of_health(
    serve: Serve, engines: Engines
) -> None:
    pinned = ModelSettings(model="rootstock-demo", served_model_name=("one",), pinned=True)
    client = serve(settings_of(models=(pinned,)))
    assert chat(client, "one").status_code == 200
    engines.gate = Gate()
    engines.made[0].die("SIGKILL")
    until(lambda: states(client)["one"] == "loading")
    health = client.get("/health")
    reason = "one has failed and is being loaded again: SIGKILL"
    assert (health.status_code, health.json()) == (200, {"status": "degraded", "reason": reason})
    engines.gate.open()
    assert chat(client, "one").status_code == 200
    assert client.get("/health").json() == {"status": "ok"}


def test_a_fault_in_an_engines_figures_ends_nothing_else(
    serve: Serve, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "CORRECTION_SECONDS", 0.001)
    client = serve()
    engine, n_faults = engines.made[0], 0
    recovered, stats = threading.Event(), engine.stats

    async def faulty() -> EngineStats:
        nonlocal n_faults
        n_faults += 1
        if n_faults <= 3:
            raise ZeroDivisionError("a fault")
        recovered.set()
        return await stats()

    engine.stats = faulty  # type: ignore[method-assign]
    assert recovered.wait(WAIT_SECONDS)
    assert chat(client, "one").status_code == 200


def test_a_fault_in_the_end_of_an_engine_ends_nothing_else(serve: Serve, engines: Engines) -> None:
    client = serve()
    assert chat(client, "two").status_code == 200

    async def faulty(timeout_seconds: float) -> None:
        engines.made[1].die("a fault")
        raise ZeroDivisionError("a fault")

    engines.made[1].drain = faulty  # type: ignore[method-assign]
    assert client.post("/admin/models/unload?model=two").json()["state"] == "unloaded"
    assert said(chat(client, "two")) == "I am load 3"


def test_all_engines_are_asked_at_once_how_things_stand(serve: Serve, engines: Engines) -> None:
    client = serve()
    assert chat(client, "two").status_code == 200
    asked = [asyncio.Event(), asyncio.Event()]
    for engine, mine, others in zip(engines.made, asked, asked[::-1], strict=True):
        answer_together(engine, mine, others)
    for path in ("/health", "/load", "/metrics", "/admin/models", "/admin/requests"):
        for event in asked:
            event.clear()
        assert client.get(path).status_code == 200, path


def answer_together(engine: FakeEngine, mine: asyncio.Event, others: asyncio.Event) -> None:
    """It answers when the other has been asked."""
    stats, requests = engine.stats, engine.requests

    async def both_asked() -> None:
        mine.set()
        await others.wait()

    async def told_stats() -> EngineStats:
        await both_asked()
        return await stats()

    async def told_requests() -> tuple[RequestInfo, ...]:
        await both_asked()
        return await requests()

    engine.stats, engine.requests = told_stats, told_requests  # type: ignore[method-assign]


def test_the_names_of_several_models_are_in_their_entries() -> None:
    with pytest.raises(ValueError, match="served_model_name: is of one model"):
        Settings(model=("a", "b"), served_model_name=("c",))


def test_settings_of_all_hold_for_each_that_says_nothing_else() -> None:
    settings = load_settings(
        {
            "model": "a",
            "models": [{"model": "b", "max_running": 4, "ttl_seconds": 5}],
            "block_size": 8,
            "ttl_seconds": 60,
        }
    )
    first, second = settings.each_model()
    assert (first.model, first.ttl_seconds) == ("a", 60)
    assert (first.engine.block_size, first.engine.max_running) == (8, 32)
    assert (second.model, second.ttl_seconds) == ("b", 5)
    assert (second.engine.block_size, second.engine.max_running) == (8, 4)


def test_messages_follow_the_settings_of_their_model(serve: Serve, engines: Engines) -> None:
    alike = {"model": "rootstock-demo", "pinned": True}
    models = [
        alike | {"served_model_name": "one"},
        alike | {"served_model_name": "two", "prefix_cache": False, "strip_billing_header": False},
    ]
    client = serve(load_settings({"port": 0, "models": models}))
    system = "x-anthropic-billing-header: cch=1c0\nBe brief."
    mark = {"type": "ephemeral"}
    body = {
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "hi"}],
        "system": [{"type": "text", "text": system, "cache_control": mark}],
    }

    def usage(model: str) -> dict[str, int]:
        answer = client.post("/v1/messages", json={"model": model, **body}).raise_for_status()
        found: dict[str, int] = answer.json()["usage"]
        return found

    one, two = usage("one"), usage("two")
    assert one["input_tokens"] == two["cache_creation_input_tokens"] == 0
    assert two["input_tokens"] > one["cache_creation_input_tokens"], "its billing line was dropped"


def repository(cache: Path, name: str, source: Path) -> None:
    """A Hugging Face cache has it."""
    home = cache / f"models--{name.replace('/', '--')}"
    snapshot = home / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(source)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("a" * 40)


def tags(client: httpx.Client) -> list[str]:
    """The names that Ollama's clients see."""
    return [one["name"].removesuffix(":latest") for one in client.get("/api/tags").json()["models"]]


def test_on_demand_every_fetched_model_can_be_named(
    serve: Serve, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))  # of the process that fetches
    repository(tmp_path, "org/small", DEFAULT_CHECKPOINT)
    client = serve(settings_of(on_demand=True))
    names = [one["id"] for one in client.get("/v1/models").json()["data"]]
    assert names == ["one", "uno", "two", "three", "org/small"]
    repository(tmp_path, "org/later", DEFAULT_CHECKPOINT)
    listed = until(lambda: tags(client), lambda names: "org/later" in names)
    assert listed == [*names, "org/later"]
    assert said(chat(client, "org/small")) == "I am load 2"
    assert engines.started[-1].model == "org/small"
    assert chat(client, str(DEFAULT_CHECKPOINT)).status_code == 404, "a path is no name"


@pytest.mark.parametrize("stream", [False, True])
def test_on_demand_the_cache_is_scanned_once_a_request(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    n_looks = 0

    def looked() -> list[Any]:
        nonlocal n_looks
        n_looks += 1
        return []

    monkeypatch.setattr(hub, "cached_models", looked)
    client = serve(settings_of(on_demand=True))
    assert chat(client, "org/small", stream=stream).status_code == 404
    assert n_looks == 1


def test_without_that_only_the_settings_name_models(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository(tmp_path, "org/small", DEFAULT_CHECKPOINT)
    assert chat(serve(), "org/small").status_code == 404
