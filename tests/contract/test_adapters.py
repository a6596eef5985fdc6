"""`base:adapter` over a socket: who is listed, who answers, who is refused, what is kept apart."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import starmap
from typing import Any

import httpx
import pytest

from engine.values.settings import AdapterConfig, EngineConfig
from server.generation.history import Replays
from server.generation.requests import model_aliases, served_models
from server.settings import Settings
from server.settings.models import ModelSettings
from tests.adapters import write_adapter
from tests.checkpoints import FAMILIES, write_family
from tests.contract.daemon import running
from tests.contract.fake_engine import CARD, FakeEngine
from tests.hosting import loaded

pytestmark = pytest.mark.process

ADAPTERS = ("formal", "casual")


@pytest.fixture(scope="module")
def real_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon with a real model, two adapters, and an alias."""
    folder = tmp_path_factory.mktemp("models")
    model = write_family(FAMILIES["qwen3"], folder)
    folders = {
        name: write_adapter(model, folder / name, seed) for seed, name in enumerate(ADAPTERS)
    }
    adapters = tuple(starmap(AdapterConfig, folders.items()))
    config = EngineConfig(model=str(model), kv_cache_bytes=8 << 20, block_size=8, adapters=adapters)
    engine = loaded(config)
    settings = Settings(port=0, served_model_name=("tiny", "alias"), adapters=folders)
    with running(engine, settings) as url:
        yield url


@pytest.fixture
def http(real_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=real_url, timeout=60) as client:
        client.post("/admin/cache/clear").raise_for_status()
        yield client


def ask(http: httpx.Client, model: str, **options: Any) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "the dog sat on the cat"}],
        "temperature": 0,
        "max_tokens": 16,
        "ignore_eos": True,
    }
    answer = http.post("/v1/chat/completions", json=body | options)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_adapters_are_listed_as_models(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()["data"]
    assert [(model["id"], model["root"], model["parent"]) for model in listed] == [
        ("tiny", "tiny", None),
        ("alias", "tiny", None),
        ("tiny:formal", "tiny:formal", "tiny"),
        ("alias:formal", "tiny:formal", "tiny"),
        ("tiny:casual", "tiny:casual", "tiny"),
        ("alias:casual", "tiny:casual", "tiny"),
    ]
    assert http.get("/v1/models/tiny:casual").json()["id"] == "tiny:casual"


def test_each_says_something_else_under_its_name(http: httpx.Client) -> None:
    names = ("tiny", "tiny:formal", "tiny:casual")
    answers = {name: ask(http, name) for name in names}
    assert [answer["model"] for answer in answers.values()] == list(names)
    assert len({text(answer) for answer in answers.values()}) == 3
    assert len({answer["system_fingerprint"] for answer in answers.values()}) == 3
    assert text(ask(http, "alias:formal")) == text(answers["tiny:formal"])


def test_a_prefix_is_found_by_its_own_adapter_alone(http: httpx.Client) -> None:
    for name in ("tiny", "tiny:formal", "tiny:casual"):
        assert cached(ask(http, name)) == 0
    for name in ("tiny", "tiny:formal", "alias:casual"):
        answer = ask(http, name)
        assert cached(answer) == answer["usage"]["prompt_tokens"] - 1


def test_all_at_once_say_what_each_says_alone(real_url: str, http: httpx.Client) -> None:
    names = ["tiny", "tiny:formal", "tiny:casual"] * 3
    alone = {name: text(ask(http, name)) for name in set(names)}
    http.post("/admin/cache/clear").raise_for_status()
    with ThreadPoolExecutor(len(names)) as pool:
        together = list(pool.map(lambda name: text(ask(http, name)), names))
    assert together == [alone[name] for name in names]


def test_an_unknown_adapter_is_told_those_that_there_are(http: httpx.Client) -> None:
    refused = http.post("/v1/completions", json={"model": "tiny:other", "prompt": "x"})
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'tiny:other' does not exist" in error["message"]
    assert "'tiny:formal'" in error["message"]
    assert "'tiny:casual'" in error["message"]


def test_completions_messages_and_responses_take_them_too(http: httpx.Client) -> None:
    completed = http.post(
        "/v1/completions", json={"model": "tiny:formal", "prompt": "the cat", "max_tokens": 4}
    )
    assert completed.json()["model"] == "tiny:formal"
    messages = [{"role": "user", "content": "the dog sat on the cat"}]
    said = http.post(
        "/v1/messages", json={"model": "tiny:formal", "max_tokens": 16, "messages": messages}
    )
    assert said.json()["model"] == "tiny:formal"
    responded = http.post(
        "/v1/responses",
        json={"model": "tiny:formal", "input": "the dog", "max_output_tokens": 16},
    )
    assert responded.json()["model"] == "tiny:formal"


def test_a_probe_looks_where_the_adapter_would(http: httpx.Client) -> None:
    answer = ask(http, "tiny:formal")
    messages = [{"role": "user", "content": "the dog sat on the cat"}]
    found = {
        name: http.post("/admin/cache/probe", json={"model": name, "messages": messages}).json()
        for name in ("tiny", "tiny:formal", "tiny:casual")
    }
    n_cached = {name: probed["cached_tokens"] for name, probed in found.items()}
    n_tokens = answer["usage"]["prompt_tokens"]
    assert n_cached == {"tiny": 0, "tiny:formal": n_tokens - 1, "tiny:casual": 0}


def test_the_picture_names_an_adapter_and_clears_it_alone(http: httpx.Client) -> None:
    for name in ("tiny", "tiny:formal"):
        ask(http, name)
    picture = http.get("/admin/cache/tree").json()
    ids = {namespace["name"]: namespace["id"] for namespace in picture["namespaces"]}
    assert set(ids) == {"default", "adapter formal"}
    http.post(f"/admin/cache/clear?namespace={ids['adapter formal']}").raise_for_status()
    assert cached(ask(http, "tiny:formal")) == 0
    assert cached(ask(http, "tiny")) > 0


def test_what_adapters_said_is_replayed_to_themselves_alone() -> None:
    engine = FakeEngine(card=replace(CARD, adapters=dict.fromkeys(ADAPTERS, "fingerprint")))
    names = model_aliases(("tiny", "alias"), ADAPTERS)
    replays = {adapter: Replays() for adapter in ("", *ADAPTERS)}
    served = served_models(names, engine, ModelSettings(), replays)
    by_root = {model.alias.root: model.replays for model in served.values()}
    assert len({id(replays) for replays in by_root.values()}) == 3
    assert all(model.replays is by_root[model.alias.root] for model in served.values())
