"""A daemon with a draft model: answers are the same, and what it does is shown."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine.api import ModelError
from engine.values.settings import EngineConfig
from engine.values.stats import ModelMemory
from server.models.registry import ModelRegistry
from server.settings import Settings
from server.settings.models import ModelSettings
from tests.checkpoints import FAMILIES, write_family
from tests.contract.daemon import running, serving
from tests.contract.metrics import value
from tests.contract.several import HI, Engines, needs, settings_of
from tests.hosting import loaded

pytestmark = pytest.mark.process

ASK = {"model": "one", "messages": [HI], "max_tokens": 4}
BODY = {"model": "tiny", "prompt": list(range(5, 45)), "max_tokens": 48, "ignore_eos": True}


def two_models(draft_model: str, **settings: object) -> tuple[ModelSettings, ...]:
    """The first one has this draft model, and these settings."""
    named = {"model": "rootstock-demo", "served_model_name": ("one",), "draft_model": draft_model}
    other = ModelSettings(model="rootstock-demo", served_model_name=("two",), preload=False)
    return ModelSettings.model_validate(named | settings), other


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return write_family(FAMILIES["llama"], models)


def config_for(model: Path, draft_model: Path | None) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        draft_model=None if draft_model is None else str(draft_model),
        kv_cache_bytes=4 << 20,
        block_size=8,
        decode="eager",
    )


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def urls(request: pytest.FixtureRequest, models: Path, model: Path) -> Iterator[tuple[str, str]]:
    """A daemon without a draft model, and one with one."""
    settings = Settings(port=0, model=str(model), served_model_name=("tiny",))
    draft = write_family(FAMILIES[request.param], models, seed=len(request.param))
    with (
        running(loaded(config_for(model, None)), settings) as plain,
        running(loaded(config_for(model, draft)), settings) as drafting,
    ):
        yield plain, drafting


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 3}])
def test_answers_are_the_same(urls: tuple[str, str], sampling: dict[str, float]) -> None:
    answers = [
        httpx.post(f"{url}/v1/completions", json=BODY | sampling).json()["choices"][0]["text"]
        for url in urls
    ]
    assert answers[0] == answers[1]


def test_it_is_shown(urls: tuple[str, str]) -> None:
    plain, drafting = urls
    httpx.post(f"{drafting}/v1/completions", json=BODY)
    [card] = httpx.get(f"{drafting}/v1/models").json()["data"]
    assert "bytes of KV a token" in card["draft_model"]
    metrics = httpx.get(f"{drafting}/metrics").text
    assert value(metrics, "rootstock_draft_model_tokens_total") > 0
    assert value(metrics, "rootstock_draft_model_failures_total") == 0
    assert "rootstock_draft_model" not in httpx.get(f"{plain}/metrics").text


def test_another_tokenizer_is_refused(models: Path, model: Path) -> None:
    other = shutil.copytree(model, models / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, another = sorted(vocabulary)[5:7]
    vocabulary[one], vocabulary[another] = vocabulary[another], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="its tokenizer is another one: 2 tokens differ"):
        loaded(config_for(model, other))


def test_a_model_that_generates_nothing_has_none(model: Path) -> None:
    reranker = EngineConfig(model=str(model), draft_model=str(model), reranker="yes-no")
    with pytest.raises(ModelError, match="drafts nothing"):
        loaded(reranker)


def test_a_repository_that_cannot_be_fetched_is_named() -> None:
    """Of several models, and not the model that it is to draft for."""

    async def fetch(repository: str, progress: object) -> None:
        raise ModelError("there is none")

    settings = settings_of(models=two_models("nobody/has-this-small-one", preload=False))
    with serving(ModelRegistry(settings, Engines(), needs, fetch), settings) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=ASK).json()
    problem = "draft_model nobody/has-this-small-one cannot be used: there is none"
    assert problem in answer["error"]["message"]


def test_where_nothing_is_drafted_it_is_not_fetched() -> None:
    async def fetch(repository: str, progress: object) -> None:
        raise AssertionError(repository)

    models = two_models("nobody/has-this-small-one", speculate="off")
    settings = settings_of(models=models)
    with serving(ModelRegistry(settings, Engines(), needs, fetch), settings) as url:
        assert httpx.post(f"{url}/v1/chat/completions", json=ASK).is_success


def test_its_repository_is_fetched_before_the_memory_of_both_is_measured() -> None:
    fetched, measured = list[str](), list[str]()

    async def fetch(repository: str, progress: object) -> None:
        fetched.append(repository)

    def measure(config: EngineConfig, budget_bytes: int, storage_bytes: int) -> ModelMemory:
        measured.extend(fetched)
        return needs(config, budget_bytes, storage_bytes)

    settings, engines = settings_of(models=two_models("nobody/has-this-small-one")), Engines()
    with serving(ModelRegistry(settings, engines, measure, fetch), settings) as url:
        assert httpx.post(f"{url}/v1/chat/completions", json=ASK).is_success
    assert measured == ["nobody/has-this-small-one"]
    assert [config.draft_model for config in engines.started] == ["nobody/has-this-small-one"]
