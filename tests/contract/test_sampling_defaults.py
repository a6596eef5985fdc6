"""A request that is silent about sampling is sampled as the model's card says."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import httpx
import pytest

from engine.values.model import SamplingDefaults
from engine.values.request import SamplingParams
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.dialects.adapters import BODIES
from tests.contract.fake_engine import CARD, FakeEngine
from tests.contract.scripted import strict_client
from tests.contract.wire import CHAT_PATH

DEFAULTS = SamplingDefaults(
    temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.05
)
ASKED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
PATHS = sorted(BODIES.keys() - {"/api/chat"})


@pytest.fixture(scope="module")
def tuned() -> FakeEngine:
    return FakeEngine(card=replace(CARD, sampling=DEFAULTS))


@pytest.fixture(scope="module")
def tuned_url(tuned: FakeEngine) -> Iterator[str]:
    with running(tuned, Settings(port=0)) as base_url:
        yield base_url


def sampled(
    engine: FakeEngine, base_url: str, path: str = CHAT_PATH, **fields: Any
) -> SamplingParams:
    """What reached the engine."""
    answer = httpx.post(f"{base_url}{path}", json=BODIES[path] | fields)
    assert answer.status_code == 200, answer.text
    return engine.submitted.get_nowait().sampling


@pytest.mark.parametrize("path", PATHS)
def test_where_the_request_is_silent_the_model_speaks(
    tuned: FakeEngine, tuned_url: str, path: str
) -> None:
    expected = SamplingParams(**asdict(DEFAULTS))
    assert sampled(tuned, tuned_url, path) == expected
    nothing = {"temperature": None, "top_p": None}
    assert sampled(tuned, tuned_url, path, **nothing) == expected


@pytest.mark.parametrize("name", ASKED)
def test_what_the_request_says_holds_and_the_rest_is_the_models(
    tuned: FakeEngine, tuned_url: str, name: str
) -> None:
    expected = SamplingParams(**asdict(DEFAULTS) | {name: ASKED[name]})
    fields: dict[str, Any] = {name: ASKED[name]}
    assert sampled(tuned, tuned_url, **fields) == expected


def test_a_request_can_be_greedy(tuned: FakeEngine, tuned_url: str) -> None:
    assert sampled(tuned, tuned_url, temperature=0).temperature == 0
    assert sampled(tuned, tuned_url, top_p=0).temperature == 0


@pytest.mark.parametrize("greedy", [SamplingDefaults(temperature=0), SamplingDefaults(top_p=0)])
def test_a_greedy_model_is_greedy_until_it_is_asked_not_to_be(greedy: SamplingDefaults) -> None:
    engine = FakeEngine(card=replace(CARD, sampling=replace(greedy, top_k=-1)))
    with running(engine, Settings(port=0)) as base_url:
        silent = sampled(engine, base_url)
        asked = sampled(engine, base_url, temperature=0.5, top_p=0.5)
    assert (silent.temperature, silent.top_k) == (0, 0)
    assert (asked.temperature, asked.top_p) == (0.5, 0.5)


@pytest.mark.parametrize("path", PATHS)
def test_a_model_that_says_nothing_is_sampled_as_it_is(
    base_url: str, engine: FakeEngine, path: str
) -> None:
    assert sampled(engine, base_url, path) == SamplingParams()


def test_the_models_list_says_what_applies(tuned_url: str, http: httpx.Client) -> None:
    (listed,) = httpx.get(f"{tuned_url}/v1/models").json()["data"]
    assert listed["sampling_defaults"] == asdict(DEFAULTS)
    assert httpx.get(f"{tuned_url}/v1/models/{listed['id']}").json() == listed
    (plain,) = http.get("/v1/models").json()["data"]
    assert plain["sampling_defaults"] == ASKED
    with strict_client(tuned_url) as client:
        assert client.models.retrieve(listed["id"]).id == listed["id"]


def test_the_document_says_whose_the_defaults_are(http: httpx.Client) -> None:
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    for model in ("ChatRequest", "CompletionRequest"):
        for name in ASKED:
            field = schemas[model]["properties"][name]
            assert "sampling_defaults" in field["description"]
            assert {"type": "null"} in field["anyOf"]
            assert field.get("default") is None
            assert {"minimum", "maximum"} <= set(field["anyOf"][0])
