"""The cache of a real engine, watched while it is used."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.values.settings import DiskCacheConfig, DiskWrites, EngineConfig
from server.settings import Settings
from tests.checkpoints import FAMILIES, write_family
from tests.contract.daemon import running
from tests.contract.scripted import CLIENT_SECONDS
from tests.hosting import loaded
from tests.polling import until

pytestmark = pytest.mark.process

BLOCK_SIZE = 8
DISK_BYTES = 64 << 20
SYSTEM = list(range(5, 37))


@pytest.fixture(scope="module", params=["qwen3", "gemma3_text", "qwen3_next"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = write_family(FAMILIES[request.param], tmp_path_factory.mktemp("models"))
    config = EngineConfig(
        model=str(model),
        kv_cache_bytes=4 << 20,
        block_size=BLOCK_SIZE,
        max_running=4,
        step_tokens=16,
        disk=DiskCacheConfig(tmp_path_factory.mktemp("disk"), DISK_BYTES, DiskWrites.ALL),
    )
    engine = loaded(config)
    settings = Settings(port=0, model=str(model), dashboard_text=True)
    with running(engine, settings) as daemon_url:
        yield daemon_url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=CLIENT_SECONDS) as client:
        client.post("/admin/cache/clear").raise_for_status()
        yield client


def complete(http: httpx.Client, prompt: list[int], **fields: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **fields}
    return http.post("/v1/completions", json=body).raise_for_status().json()


def tree(http: httpx.Client) -> Any:
    return http.get("/admin/cache/tree").raise_for_status().json()


def below(nodes: list[Any], parent: int | None) -> list[Any]:
    return [node for node in nodes if node["parent"] == parent]


def test_three_with_one_beginning_are_one_bar_with_three_behind_it(http: httpx.Client) -> None:
    for i in range(3):
        complete(http, [*SYSTEM, *range(50 + 10 * i, 60 + 10 * i)])
    nodes = tree(http)["nodes"]
    (top,) = below(nodes, None)
    assert (top["start"], top["tokens"], top["blocks"]) == (0, 32, 4)
    users = below(nodes, top["id"])
    assert len(users) == 3
    assert all(user["start"] == 32 for user in users)
    assert not any(node["holders"] for node in nodes)
    stats = http.get("/admin/cache/stats").json()
    assert sum(node["blocks"] for node in nodes) == stats["blocks_cached"]
    assert len(nodes) == stats["nodes"]


def test_a_node_keeps_its_id_whoever_comes_and_goes(http: httpx.Client) -> None:
    complete(http, [*SYSTEM, 70, 71])
    (top,) = below(tree(http)["nodes"], None)
    complete(http, [*SYSTEM, 80, 81])
    again = tree(http)["nodes"]
    assert top["id"] in {node["id"] for node in again}
    text = http.get(f"/admin/cache/nodes/{top['id']}").json()
    assert text["id"] == top["id"]
    assert text["text"]
    assert text["text"] not in json.dumps(again)
    http.post("/admin/cache/clear")
    assert http.get(f"/admin/cache/nodes/{top['id']}").status_code == 404


def test_a_namespace_is_seen_and_cleared_alone(http: httpx.Client) -> None:
    complete(http, SYSTEM)
    complete(http, SYSTEM, cache_salt="between us")
    seen = tree(http)
    assert "between us" not in json.dumps(seen)
    names = {namespace["name"]: namespace["id"] for namespace in seen["namespaces"]}
    (salted,) = names.keys() - {"default"}
    cleared = http.post("/admin/cache/clear", params={"namespace": names[salted]}).json()
    assert cleared["blocks_freed"] > 0
    left = tree(http)
    assert {node["namespace"] for node in left["nodes"]} == {names["default"]} == {"0"}
    http.post("/admin/cache/clear", params={"namespace": "0"})
    assert tree(http)["nodes"] == []


def test_counters_grow_with_what_is_done(http: httpx.Client) -> None:
    before = tree(http)["counters"]
    complete(http, SYSTEM)
    answer = complete(http, SYSTEM)
    after = tree(http)["counters"]
    grown = {name: after[name] - before[name] for name in after}
    cached_tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (grown["prompt_tokens"], grown["cached_tokens"]) == (64, cached_tokens)
    assert (grown["requests"], grown["first_tokens"], grown["generated_tokens"]) == (2, 2, 4)
    assert grown["first_token_seconds"] > 0


def test_who_is_being_served_stands_at_a_node(http: httpx.Client) -> None:
    body = {"prompt": SYSTEM, "max_tokens": 150, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        seen = tree(http)
        if not seen["requests"]:
            pytest.skip("the answer was complete before the picture")
        (one,) = seen["requests"]
        assert one["state"] == "running"
        assert one["prompt_tokens"] == 32
        node = next(node for node in seen["nodes"] if node["id"] == one["node"])
        assert node["holders"] == 1
        assert node["idle_seconds"] == 0.0
        assert seen["arena"]["held"] > 0


def test_what_is_written_is_on_disk_and_what_is_cleared_is_not(http: httpx.Client) -> None:
    complete(http, SYSTEM)
    seen = until(lambda: tree(http), lambda seen: seen["nodes"][0]["disk_tokens"] >= 32)
    node = seen["nodes"][0]  # behind it may be what the one before has left
    assert node["disk_tokens"] <= node["tokens"]
    disk = tree(http)["disk"]
    assert disk["entries"] >= 4
    assert disk["limit_bytes"] == DISK_BYTES >= disk["used_bytes"] > 0
    http.post("/admin/cache/clear", params={"tiers": "disk"})
    seen = until(lambda: tree(http), lambda seen: seen["disk"]["entries"] == 0)
    assert {node["disk_tokens"] for node in seen["nodes"]} == {0}


def test_what_other_layers_keep_is_marked(http: httpx.Client) -> None:
    complete(http, [*SYSTEM, *range(40, 68)])
    seen = tree(http)
    for group in seen["groups"]:
        assert 0 < group["used"] <= group["slots"]
    marks = {mark for node in seen["nodes"] for mark in node["states"]}
    if any(group["kind"] == "recurrent" for group in seen["groups"]):
        assert 59 in marks  # where the same prompt will resume
    else:
        assert not marks
