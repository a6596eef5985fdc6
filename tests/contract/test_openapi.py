"""The daemon's description of itself: that it is complete, and that the daemon does as it says."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.api import Engine
from engine.values.settings import EngineConfig
from server import openapi
from server.models.registry import ModelRegistry
from server.settings import Settings
from tests.contract.access.helpers import key_file
from tests.contract.daemon import running, serving
from tests.contract.fake_engine import FakeEngine
from tests.contract.scripted import CLIENT_SECONDS

KEY = "sesame"
OPTIONS = [
    *("--generation-deterministic", "--max-examples=10"),
    f"--header=Authorization: Bearer {KEY}",
    # These never end; tests/contract/cache and test_requests.py read them.
    *("--exclude-path=/admin/cache/tree/stream", "--exclude-path=/admin/activity/stream"),
    "--exclude-path=/api/pull",  # it would ask the network
    # A slow machine is no finding.
    *("--request-timeout=60", "--suppress-health-check=all", "--warnings=off", "--no-color"),
]


CHECKS = """
# A body that breaks a schema by its length may be too long to be read at all.
[checks.negative_data_rejection]
expected-statuses = [400, 404, 405, 413]

# What no schema says: the model's own limits, fields that go together, and what is stored.
[[operations]]
include-path-regex = "^/(v1/|v2/|api/|rerank|score|tokenize|detokenize|admin/cache/(probe|clear))"
exclude-path = ["/v1/models", "/v1/models/{id}"]

[operations.checks.positive_data_acceptance]
enabled = false
"""


async def fresh(config: EngineConfig, report: object) -> Engine:
    """Another engine each time: a client may have one unloaded."""
    return FakeEngine()


@pytest.fixture(scope="module")
def keyed_url(no_settings_from_outside: None) -> Iterator[str]:
    settings = Settings(port=0, api_key=KEY, allow_priority=True)
    with serving(ModelRegistry(settings, fresh), settings) as url:
        yield url


@pytest.fixture(scope="module")
def users_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """With limits of keys and of time."""
    keys = key_file(tmp_path_factory.mktemp("keys"), alice={"concurrency": 1})
    settings = Settings(port=0, api_keys_file=keys, request_timeout_seconds=60)
    with running(FakeEngine(), settings) as url:
        yield url


@pytest.mark.slow
def test_schemathesis_finds_nothing(keyed_url: str, tmp_path: Path) -> None:
    """It makes requests of the document, good and bad, one by one and each with what others
    answered, and judges the answers by it.
    """
    (tmp_path / "schemathesis.toml").write_text(CHECKS)
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{keyed_url}/openapi.json"]
    done = subprocess.run(
        [*command, *OPTIONS], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (generated,) = re.findall(r"(\d+) generated", done.stdout)
    assert int(generated) > 500


def document(base_url: str) -> Any:
    return httpx.get(f"{base_url}/openapi.json", timeout=CLIENT_SECONDS).json()


def statuses(document: Any) -> dict[str, set[str]]:
    return {
        path: set(operation["responses"])
        for path, methods in document["paths"].items()
        for operation in methods.values()
    }


def test_statuses_are_those_that_are_sent(base_url: str, keyed_url: str, users_url: str) -> None:
    sent = statuses(document(base_url))
    generation = {"200", "400", "403", "404", "408", "410", "413", "415", "429", "500", "503"}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
        assert sent[path] == generation
    assert sent["/api/chat"] == sent["/api/generate"] == generation
    assert sent["/api/embed"] == sent["/api/embeddings"] == generation
    for path in (
        "/v1/decisions",
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
    ):
        assert sent[path] == generation
    unqueued = generation - {"410", "429"}
    for path in ("/tokenize", "/detokenize", "/v1/completions/render", "/admin/cache/probe"):
        assert sent[path] == unqueued
    assert sent["/v1/messages/count_tokens"] == unqueued
    assert sent["/v1/responses/input_tokens"] == unqueued
    stored = {"200", "400", "403", "404", "500", "503"}
    assert sent["/v1/responses/{id}/input_items"] == stored
    assert sent["/v1/models/{id}"] == {"200", "403", "404", "500", "503"}
    keyed = statuses(document(keyed_url))
    assert keyed["/v1/completions"] == generation | {"401"}
    assert keyed["/tokenize"] == keyed["/detokenize"] == unqueued | {"401"}
    assert keyed["/health"] == keyed["/load"] == keyed["/version"] == {"200", "500", "503"}
    assert keyed["/api/version"] == {"200", "500"}
    assert keyed["/api/delete"] >= {"401", "403", "409"}
    assert keyed["/admin/requests"] == {"200", "401", "403", "500", "503"}
    limited = statuses(document(users_url))
    assert limited["/v1/completions"] == generation | {"401", "504"}
    assert limited["/v1/messages/count_tokens"] == unqueued | {"401", "429", "504"}
    assert limited["/tokenize"] == unqueued | {"401", "504"}  # a router calls it for each chat
    assert limited["/admin/cache/clear"] == keyed["/admin/cache/clear"] | {"504"}


def test_a_key_is_asked_for_where_there_is_one(base_url: str, keyed_url: str) -> None:
    assert "securitySchemes" not in document(base_url)["components"]
    keyed = document(keyed_url)
    schemes = keyed["components"]["securitySchemes"]
    assert list(schemes.values()) == [
        {"type": "http", "scheme": "bearer"},
        {"type": "apiKey", "in": "header", "name": "x-api-key"},
    ]
    either: list[dict[str, list[str]]] = [{name: []} for name in schemes]
    assert keyed["paths"]["/v1/models"]["get"]["security"] == either
    assert "security" not in keyed["paths"]["/metrics"]["get"]


def test_answers_are_described(base_url: str) -> None:
    paths = document(base_url)["paths"]
    completion = paths["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert set(completion) == {"application/json", "text/event-stream"}
    message = paths["/v1/messages"]["post"]["responses"]
    assert set(message["200"]["content"]) == {"application/json", "text/event-stream"}
    shapes = [
        paths[path]["post"]["responses"]["400"] for path in ("/v1/messages", "/v1/completions")
    ]
    names = [shape["content"]["application/json"]["schema"]["$ref"] for shape in shapes]
    assert [name.rpartition("/")[2] for name in names] == ["MessagesError", "ErrorResponse"]
    assert set(paths["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}


def kinds(schema: Any) -> set[str]:
    return {kind["type"] for kind in schema["anyOf"]}


def test_fields_have_every_type_that_is_taken(base_url: str) -> None:
    schemas = document(base_url)["components"]["schemas"]
    completion, message = schemas["CompletionRequest"], schemas["Message"]
    assert kinds(message["properties"]["content"]) == {"string", "array", "null"}
    assert kinds(completion["properties"]["stop"]) == {"string", "array", "null"}
    assert kinds(completion["properties"]["prompt"]) == {"string", "array", "null"}
    assert kinds(completion["properties"]["top_p"]) == {"number", "null"}


def names(schema: Any) -> set[str]:
    return set(schema["properties"])


def test_what_is_always_refused_is_left_out(base_url: str, keyed_url: str) -> None:
    described = document(base_url)
    schemas = described["components"]["schemas"]
    chat, completion = schemas["ChatRequest"], schemas["CompletionRequest"]
    assert not names(completion) & {"suffix", "tools", "functions", "function_call"}
    assert not names(schemas["ResponsesRequest"]) & {"conversation", "prompt"}
    assert "chat_template" not in names(chat)
    assert "mcp_servers" not in names(schemas["MessagesRequest"])
    assert "parameters" not in described["paths"]["/tokenize"]["post"]
    (response_id,) = described["paths"]["/v1/responses/{id}"]["get"]["parameters"]
    assert response_id["name"] == "id"
    assert "priority" not in names(chat), "which clients may not choose here"
    assert "priority" in names(document(keyed_url)["components"]["schemas"]["ChatRequest"])


def test_what_is_needed_is_required(base_url: str) -> None:
    schemas = document(base_url)["components"]["schemas"]
    assert {"messages", "max_tokens"} <= set(schemas["MessagesRequest"]["required"])
    assert "messages" in schemas["ChatRequest"]["required"]
    tool, hosted = schemas["ToolParam"]["anyOf"]
    assert tool["required"] == ["name", "input_schema"]
    assert hosted["required"] == ["type"]
    assert schemas["CustomDeclaration"]["required"] == ["name"]
    assert {"usage", "choices"} <= set(schemas["Completion"]["required"])


def test_what_is_left_out_is_never_null(base_url: str) -> None:
    """As OpenAI's own description has it."""
    schemas = document(base_url)["components"]["schemas"]
    assert schemas["ResponseBody"]["properties"]["user"]["type"] == "string"
    assert "user" not in schemas["ResponseBody"]["required"]
    assert "anyOf" not in schemas["CompletionChoice"]["properties"]["finish_reason"]
    assert kinds(schemas["AssistantMessage"]["properties"]["content"]) == {"string", "null"}
    assert schemas["AssistantMessage"]["properties"]["tool_calls"]["type"] == "array"


def test_every_body_has_an_example_that_is_answered(base_url: str, http: httpx.Client) -> None:
    examples = {
        path: content["application/json"]["example"]
        for path, methods in document(base_url)["paths"].items()
        if (content := methods.get("post", {}).get("requestBody", {}).get("content", {}))
        if "multipart/form-data" not in content  # which the tests of batches send
    }
    assert len(examples) == 28
    for needed in ("/api/pull", "/v1/batches", "/v1/messages/batches"):  # the network, a folder
        del examples[needed]
    for path, example in examples.items():
        assert http.post(path, json=example).status_code == 200, path


def test_every_route_belongs_to_a_section(base_url: str) -> None:
    paths = document(base_url)["paths"]
    tags = {path: {tuple(route["tags"]) for route in paths[path].values()} for path in paths}
    assert all(len(sections) == 1 for sections in tags.values())
    assert tags["/v1/chat/completions"] == tags["/v1/completions"] != tags["/v1/messages"]


def test_every_reference_leads_somewhere(base_url: str) -> None:
    """Models of one name get others, with which nothing refers to them."""
    described = document(base_url)
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(described)))
    assert len(names) > 50
    assert not names - set(described["components"]["schemas"])
    assert not [name for name in names if "__" in name]


def test_the_document_is_made_once_and_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, threads = openapi.document, list[threading.Thread]()

    def noted(*args: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return made(*args)

    monkeypatch.setattr(openapi, "document", noted)
    with running(FakeEngine(), Settings(port=0)) as url, ThreadPoolExecutor() as clients:
        answers = list(
            clients.map(partial(httpx.get, timeout=CLIENT_SECONDS), [f"{url}/openapi.json"] * 4)
        )
    assert {answer.json()["openapi"] for answer in answers} == {"3.1.0"}
    assert [thread.name == "server" for thread in threads] == [False]
