"""What Ollama's clients are told of models, and what an admin does with those on the disk."""

import re
from collections.abc import Callable, Iterator
from logging import LogRecord
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest
from huggingface_hub import constants
from ollama import Client, ResponseError

from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT
from server.models.registry import ModelRegistry
from server.settings.models import ModelSettings
from tests.contract.daemon import serving
from tests.contract.ollama.scripted import OllamaDaemon, write_checkpoint
from tests.contract.scripted import (
    CLIENT_SECONDS,
)
from tests.contract.several import Engines, needs, settings_of
from tests.contract.wire import posted
from tests.hub import COMMIT, Hub, checkpoint_files, serving_hub
from tests.polling import until

pytestmark = pytest.mark.process

Put = Callable[[str], Path]


@pytest.fixture(scope="module")
def demo(demo_url: str) -> Iterator[Any]:
    """The client of a daemon that serves the embedded model."""
    with Client(demo_url, timeout=CLIENT_SECONDS) as client:
        yield client


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Lays a repository of one file into a Hugging Face cache of the test's own."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    def put(name: str) -> Path:
        home = tmp_path / f"models--{name.replace('/', '--')}"
        (blob := home / "blobs" / "blob").parent.mkdir(parents=True)
        blob.write_bytes(b"{}")
        (file := home / "snapshots" / ("a" * 40) / "config.json").parent.mkdir(parents=True)
        file.symlink_to(blob)
        return home

    return put


def test_the_embedded_model_is_described(demo: Any) -> None:
    (listed,) = demo.list().models
    assert listed.model == "rootstock-demo"
    assert listed.size > 1_000_000
    assert listed.details.family
    shown = demo.show("rootstock-demo:latest")
    assert shown.capabilities == ["completion", "tools"]
    (loaded,) = demo.ps().models
    room = shown.modelinfo[f"{listed.details.family}.context_length"]
    assert loaded.context_length == room > 1000
    assert "temperature" in shown.parameters
    assert "messages" in shown.template
    assert (loaded.model, loaded.digest) == (listed.model, listed.digest)
    assert re.fullmatch("[0-9a-f]{64}", listed.digest)
    assert listed.details.parameter_size == "3.21M"
    assert shown.modelinfo["general.parameter_count"] == 3_214_720
    assert shown.modelinfo[f"{listed.details.family}.embedding_length"] == 256
    assert loaded.size > 0


def test_aliases_are_listed_and_can_be_shown() -> None:
    with OllamaDaemon.serving(served_model_name=("bytes", "llama3:latest")) as made:
        assert [model.model for model in made.ollama.list().models] == ["bytes", "llama3:latest"]
        assert [model.model for model in made.ollama.ps().models] == ["bytes"]
        assert made.ollama.show("llama3:latest").capabilities == ["completion", "tools"]
        assert made.http.post("/api/show", json={"name": "bytes"}).status_code == 200
        assert made.http.post("/api/show", json={}).status_code == 200
        nameless = made.http.request("DELETE", "/api/delete", json={"model": ""})
        assert (nameless.status_code, nameless.json()) == (400, {"error": "model is missing"})


def test_an_unloaded_model_is_described_as_a_loaded_one(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "{{ '<think></think>' }}")
    models = (
        ModelSettings(model=str(checkpoint), served_model_name=("thinker",), preload=False),
        ModelSettings(
            model=str(checkpoint),
            served_model_name=("plain",),
            preload=False,
            tool_parser="hermes",
            reasoning_parser="none",
        ),
    )
    settings, engines = settings_of(models=models), Engines()
    with (
        serving(ModelRegistry(settings, engines, needs), settings) as url,
        Client(url, timeout=CLIENT_SECONDS) as client,
    ):
        listed, shown = client.list(), client.show("thinker")
        assert shown.capabilities == ["completion", "tools", "thinking"]
        assert client.show("plain").capabilities == ["completion", "tools"]
        assert "<think>" in shown.template
        assert "temperature 0.5" in shown.parameters
        assert client.ps().models == []
        client.generate("thinker")
        (loaded,) = client.ps().models
        assert loaded.digest == listed.models[0].digest
        assert client.list() == listed
        again = client.show("thinker")
        del shown.modelinfo["qwen3.context_length"], again.modelinfo["qwen3.context_length"]
        assert again == shown


def test_an_embedder_says_embedding_and_a_reranker_nothing(tmp_path: Path) -> None:
    embedder = write_checkpoint(tmp_path, "")
    (embedder / "modules.json").write_text("[]", "utf-8")
    (embedder / "1_Pooling").mkdir()
    pooling = embedder / "1_Pooling/config.json"
    pooling.write_text('{"pooling_mode_lasttoken": true}', "utf-8")
    with OllamaDaemon.serving(model=(str(embedder),)) as made:
        assert made.ollama.show("bytes").capabilities == ["embedding"]
    with OllamaDaemon.serving(reranker="yes-no") as made:
        assert made.ollama.show("bytes").capabilities == []
    with OllamaDaemon.serving(pooling="last") as made:
        assert made.ollama.show("bytes").capabilities == ["completion", "tools"]  # it does both
    pooling.write_text("{", "utf-8")
    with OllamaDaemon.serving(model=(str(embedder),)) as made:
        assert made.ollama.show("bytes").capabilities == []  # it cannot be loaded


@pytest.mark.parametrize("source", ["org/never-fetched", "/nowhere/at/all"])
def test_a_model_without_files_has_a_digest_too(source: str, put: Put) -> None:
    models = (
        ModelSettings(model=source, served_model_name=("absent",), preload=False),
        ModelSettings(model="rootstock-demo", served_model_name=("there",), preload=False),
    )
    settings = settings_of(models=models)
    with (
        serving(ModelRegistry(settings, Engines(), needs), settings) as url,
        Client(url, timeout=CLIENT_SECONDS) as client,
    ):
        digests = [model.digest for model in client.list().models]
        shown = client.show("absent")
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    assert len(set(digests)) == 2
    assert shown.capabilities == ["completion"]


def test_the_version_is_that_of_the_api_and_a_ping_is_answered(hermes: OllamaDaemon) -> None:
    version = hermes.http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # what editors ask for
    assert hermes.http.head("/").status_code == 200


def test_a_repository_that_is_not_loaded_is_deleted(hermes: OllamaDaemon, put: Put) -> None:
    home, kept = put("org/small"), put("org/other")
    assert hermes.ollama.delete("hf.co/org/small:latest").status == "success"
    assert not home.exists()
    assert kept.exists()
    with pytest.raises(ResponseError) as caught:
        hermes.ollama.delete("org/small")
    assert (caught.value.status_code, caught.value.error) == (404, "model 'org/small' not found")


@pytest.mark.parametrize("name", ["bytes", "test/bytes"])
def test_what_is_served_is_not_deleted(hermes: OllamaDaemon, put: Put, name: str) -> None:
    home = put("test/bytes")
    with pytest.raises(ResponseError, match="is served") as caught:
        hermes.ollama.delete(name)
    assert caught.value.status_code == 409
    assert home.exists()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that downloads of the daemon come from."""
    hub = Hub("org/small", checkpoint_files(DEFAULT_CHECKPOINT))
    with serving_hub(hub, tmp_path) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield hub


def test_a_pull_fetches_the_repository(hermes: OllamaDaemon, hub: Hub, tmp_path: Path) -> None:
    hub.may_send.set()
    lines = [line.status for line in hermes.ollama.pull("org/small:latest", stream=True)]
    assert (lines[0], lines[-1]) == ("pulling manifest", "success")
    snapshot = tmp_path / "models--org--small" / "snapshots" / COMMIT
    assert checkpoint_files(snapshot).keys() >= {"config.json", "model.safetensors"}
    assert hermes.ollama.pull("org/small").status == "success"


def test_a_pull_goes_on_when_its_client_leaves(
    hermes: OllamaDaemon, hub: Hub, tmp_path: Path
) -> None:
    with hermes.http.stream("POST", "/api/pull", json={"model": "org/small"}):
        assert hub.requested.wait(CLIENT_SECONDS)
    hub.may_send.set()
    snapshot = tmp_path / "models--org--small" / "snapshots" / COMMIT
    until((snapshot / "model.safetensors").exists)


def test_a_client_that_leaves_a_pull_in_one_piece_is_noticed(
    hermes: OllamaDaemon, hub: Hub, departures: "Queue[LogRecord]"
) -> None:
    try:
        with posted(hermes.url, "/api/pull", {"model": "org/small", "stream": False}):
            assert hub.requested.wait(CLIENT_SECONDS)
        assert "/api/pull" in departures.get(timeout=CLIENT_SECONDS).getMessage()
    finally:
        hub.may_send.set()


@pytest.mark.parametrize("name", ["bytes", "bytes:latest"])
def test_a_pull_of_a_model_that_is_served_from_files_succeeds_at_once(
    hermes: OllamaDaemon, hub: Hub, tmp_path: Path, name: str
) -> None:
    assert hermes.ollama.pull(name).status == "success"
    with OllamaDaemon.serving(model=(str(write_checkpoint(tmp_path, "")),)) as made:
        lines = [line.status for line in made.ollama.pull(name, stream=True)]
    assert lines == ["pulling manifest", "success"]
    assert not hub.requested.is_set()


def test_a_pull_of_another_name_of_a_repository_fetches_it(hub: Hub, tmp_path: Path) -> None:
    hub.may_send.set()
    with OllamaDaemon.serving(model=("org/small",), served_model_name=("mine",)) as made:
        assert made.ollama.pull("mine").status == "success"
    assert (tmp_path / "models--org--small" / "snapshots" / COMMIT).exists()


NOT_FETCHED = "org/none was not fetched: it is neither a directory nor a repository: "


def test_a_pull_that_fails_says_why(hermes: OllamaDaemon, hub: Hub) -> None:
    with pytest.raises(ResponseError, match=NOT_FETCHED) as caught:
        hermes.ollama.pull("org/none")
    assert caught.value.status_code == 500
    lines = hermes.ollama.pull("org/none", stream=True)
    assert next(lines).status == "pulling manifest"
    with pytest.raises(ResponseError, match=NOT_FETCHED):
        next(lines)


def test_a_directory_is_no_repository(hermes: OllamaDaemon, tmp_path: Path) -> None:
    answer = httpx.post(
        f"{hermes.http.base_url}/api/pull", json={"model": str(tmp_path), "stream": False}
    )
    assert answer.status_code == 500
    assert "repository" in answer.json()["error"]
