"""What a router does with a daemon: it finds its events, follows them, and asks it for ids."""

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engine.api import ModelError
from engine.values.model import KVEventSource
from engine.values.settings import EngineConfig
from server.settings import Settings
from tests.checkpoints import FAMILIES, write_family
from tests.contract.access.helpers import client_of, key_file
from tests.contract.daemon import running
from tests.contract.fake_engine import CARD, FakeEngine
from tests.contract.metrics import value
from tests.hosting import launched, loaded
from tests.kv_event_reader import Subscriber, replayed

BLOCK_SIZE = 8
PROMPT = [*range(1, 60)]
SOURCE = KVEventSource("tcp://127.0.0.1:5557", None, "kv")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model = write_family(FAMILIES["qwen3"], tmp_path_factory.mktemp("models"))
    return EngineConfig(
        model=str(model),
        kv_cache_bytes=1 << 20,
        block_size=BLOCK_SIZE,
        kv_events="0",
        kv_events_replay="0",
    )


@pytest.fixture(scope="module")
def http(config: EngineConfig) -> Iterator[httpx.Client]:
    settings = Settings(port=0, served_model_name=("tiny",))
    with running(loaded(config), settings) as url, httpx.Client(base_url=url) as client:
        yield client


def source_of(http: httpx.Client) -> dict[str, Any]:
    (source,) = http.get("/kv_event_sources").json()
    return dict(source)


def complete(http: httpx.Client, prompt: list[int], **fields: object) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, **fields}
    http.post("/v1/completions", json=body).raise_for_status()


def probed(http: httpx.Client, prompt: list[int]) -> set[int]:
    """The hashes of the blocks that the daemon would resume a prompt from."""
    found = http.post("/admin/cache/probe", json={"model": "tiny", "prompt": prompt}).json()
    return {int(digest[:16], 16) >> 1 for digest in found["block_digests"]}


def test_a_loaded_model_says_where_its_events_are(http: httpx.Client) -> None:
    source = source_of(http)
    assert source.keys() == {"data_parallel_rank", "endpoint", "replay_endpoint", "topic", "model"}
    assert (source["data_parallel_rank"], source["topic"], source["model"]) == (0, "", "tiny")
    for name in ("endpoint", "replay_endpoint"):
        assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d+", source[name])


def test_a_router_knows_what_the_daemon_would_find(http: httpx.Client) -> None:
    prompts = [[*range(1, 40), *range(n, n + 20)] for n in range(40, 100, 10)]
    complete(http, prompts[0])
    with Subscriber(source_of(http)["endpoint"]) as subscriber:
        for prompt in prompts:
            complete(http, prompt)
            expected = probed(http, prompt)
            assert len(expected) == 7
            subscriber.receive_until_known(expected)
        assert {len(block.token_ids) for block in subscriber.cached.blocks.values()} == {BLOCK_SIZE}
        assert subscriber.cached.orphans == 0
        last = subscriber.batches[-1]
        assert last in [*replayed(source_of(http)["replay_endpoint"], last.number)]


def test_a_clear_reaches_routers(http: httpx.Client) -> None:
    with Subscriber(source_of(http)["endpoint"]) as subscriber:
        complete(http, PROMPT)
        subscriber.receive_until_known(probed(http, PROMPT))
        http.post("/admin/cache/clear").raise_for_status()
        subscriber.receive_until(set())


def test_a_salt_is_not_published(http: httpx.Client) -> None:
    with Subscriber(source_of(http)["endpoint"]) as subscriber:
        complete(http, [*range(60, 99)], cache_salt="mine")
        complete(http, PROMPT)
        subscriber.receive_until_known(probed(http, PROMPT))
        known = {block.token_ids for block in subscriber.cached.blocks.values()}
        assert not known & {tuple(range(n, n + BLOCK_SIZE)) for n in range(60, 92, BLOCK_SIZE)}


def test_metrics_count_what_is_published(http: httpx.Client) -> None:
    complete(http, PROMPT)
    with Subscriber(source_of(http)["endpoint"]) as subscriber:
        subscriber.receive()
        samples = http.get("/metrics").text
        assert value(samples, "rootstock_kv_event_subscribers", model="tiny") == 1
        assert value(samples, "rootstock_kv_event_blocks", model="tiny") >= 7
        assert value(samples, "rootstock_kv_event_batches_total", model="tiny") >= 1


def test_the_end_of_an_engine_reaches_routers(config: EngineConfig) -> None:
    engine = loaded(config)
    assert engine.card.kv_events is not None
    with Subscriber(engine.card.kv_events.endpoint) as subscriber:
        settings = Settings(port=0, served_model_name=("tiny",))
        with running(engine, settings) as url, httpx.Client(base_url=url) as http:
            complete(http, PROMPT)
            subscriber.receive_until_known(probed(http, PROMPT))
        assert subscriber.receive().events == [{"type": "AllBlocksCleared"}]


@pytest.mark.process
def test_an_engine_that_is_killed_does_not_confuse_its_subscribers(config: EngineConfig) -> None:
    """The engine that comes after it has the same port, higher numbers, and begins with a clear."""
    given, seen = config, 0
    for _ in range(2):
        engine = launched(given)
        assert engine.card.kv_events is not None
        endpoint = engine.card.kv_events.endpoint
        given = replace(config, kv_events=endpoint)
        with Subscriber(endpoint) as subscriber:
            settings = Settings(port=0, served_model_name=("tiny",))
            with running(engine, settings) as url, httpx.Client(base_url=url) as http:
                assert subscriber.receive().events[0] == {"type": "AllBlocksCleared"}
                assert subscriber.batches[0].number > seen
                complete(http, PROMPT)
                subscriber.receive_until_known(probed(http, PROMPT))
                seen = subscriber.batches[-1].number
                _kill_engine()


def _kill_engine() -> None:
    for process in psutil.Process().children():
        if "engine.remote" in " ".join(process.cmdline()):
            os.kill(process.pid, signal.SIGKILL)
            process.wait()


def test_a_port_in_use_is_why_a_model_is_not_loaded(
    config: EngineConfig, http: httpx.Client
) -> None:
    endpoint = source_of(http)["endpoint"]
    with pytest.raises(ModelError, match=rf"{endpoint}: Address already in use"):
        loaded(replace(config, kv_events=endpoint))


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
def test_of_windows_and_recurrent_layers_routers_are_told_nothing(
    config: EngineConfig, family: str, tmp_path: Path
) -> None:
    """Blocks that are cached are not enough to resume a prompt from there."""
    model = write_family(FAMILIES[family], tmp_path)
    with pytest.raises(ModelError, match="KV events are for models whose layers all have full"):
        loaded(replace(config, model=str(model), block_size=32, kv_cache_bytes=None))


def test_an_engine_without_events_is_no_source() -> None:
    with running(FakeEngine(kv_events=None), Settings(port=0)) as url:
        assert httpx.get(f"{url}/kv_event_sources").json() == []
        assert "rootstock_kv_event" not in httpx.get(f"{url}/metrics").text


def test_a_source_has_vllms_names() -> None:
    engine = FakeEngine(card=replace(CARD, kv_events=SOURCE))
    with running(engine, Settings(port=0, served_model_name=("one",))) as url:
        assert httpx.get(f"{url}/kv_event_sources").json() == [
            {
                "data_parallel_rank": 0,
                "endpoint": "tcp://127.0.0.1:5557",
                "replay_endpoint": None,
                "topic": "kv",
                "model": "one",
            }
        ]


def test_sources_need_a_key(tmp_path: Path) -> None:
    settings = Settings(port=0, api_keys_file=key_file(tmp_path, alice={}))
    with running(FakeEngine(), settings) as url, client_of(url, "alice") as alice:
        assert httpx.get(f"{url}/kv_event_sources").status_code == 401
        assert alice.get("/kv_event_sources").status_code == 200
