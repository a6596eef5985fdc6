"""The cache as it is shown to an admin, over a scripted engine."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from server.admin.cache import MOST_BEGINNINGS
from server.settings import Settings
from tests.contract.access.helpers import client_of, key_file
from tests.contract.daemon import running
from tests.contract.fake_engine import PICTURE, FakeEngine, Script
from tests.contract.scripted import CLIENT_SECONDS

PATHS = ("/admin/cache/tree", "/admin/cache/tree/stream", "/admin/cache/nodes/1")


pytestmark = pytest.mark.usefixtures("engine")  # each test starts from the default script


def schema_of(base_url: str, name: str) -> dict[str, Any]:
    described = httpx.get(f"{base_url}/openapi.json", timeout=CLIENT_SECONDS).json()
    return {"$ref": f"#/components/schemas/{name}", "components": described["components"]}


def test_the_picture_is_what_the_document_says(base_url: str, http: httpx.Client) -> None:
    picture = http.get("/admin/cache/tree").json()
    jsonschema.validate(picture, schema_of(base_url, "CacheTree"))
    assert picture["model"] == "test/bytes"
    assert picture["block_tokens"] == PICTURE.block_tokens
    top, leaf = picture["nodes"]
    assert (top["parent"], leaf["parent"]) == (None, top["id"])
    assert leaf == {
        "id": 2,
        "parent": 1,
        "namespace": "0",
        "start": 64,
        "tokens": 40,
        "disk_tokens": 32,
        "blocks": 2,
        "tail": 8,
        "holders": 0,
        "idle_seconds": 4.2,
        "states": [96, 104],
        "holes": [],
        "next_evicted": 1,
        "hidden": {"nodes": 1, "tokens": 32, "blocks": 1},
    }
    assert picture["disk"] == {
        "entries": 40,
        "used_bytes": 5_242_880,
        "shared_bytes": 7_340_032,
        "limit_bytes": 1 << 30,
        "read_bytes": 1_048_576,
        "written_bytes": 4_194_304,
        "hits": 3,
        "loaded_tokens": 900,
    }
    assert top["holes"] == [[0, 32]]
    assert top["hidden"] is None


def test_it_is_as_new_as_the_question(http: httpx.Client, engine: FakeEngine) -> None:
    """Also where it has changed in nothing but time."""
    first = http.get("/admin/cache/tree").json()
    engine.picture = replace(PICTURE, time=first["time"] + 7)
    assert http.get("/admin/cache/tree").json()["time"] == first["time"] + 7
    engine.picture = PICTURE


@pytest.mark.parametrize("path", PATHS)
def test_an_engine_that_has_stopped_is_a_503(
    path: str, http: httpx.Client, engine: FakeEngine
) -> None:
    engine.script = Script(dead=True)
    answer = http.get(path)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_stopped"
    engine.script = Script()
    assert http.get("/admin/cache/tree").status_code == 200  # the next asks again


def test_what_breaks_a_watch_is_a_500_and_does_no_other_harm(
    http: httpx.Client, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.picture = None  # type: ignore[assignment]
    try:
        assert http.get("/admin/cache/tree").status_code == 500
    finally:
        engine.picture = PICTURE
    assert http.get("/admin/cache/tree").status_code == 200
    assert http.get("/health").status_code == 200


def test_a_node_has_no_text_unless_that_is_allowed(http: httpx.Client) -> None:
    assert http.get("/admin/cache/nodes/1").json() == {"id": 1, "tokens": 2, "text": None}
    assert http.get("/admin/cache/nodes/7").status_code == 404
    assert http.get("/admin/cache/nodes/x").status_code == 400
    assert http.get("/admin/cache/nodes/-1").status_code == 400


def test_nodes_have_no_beginnings_unless_that_is_allowed(http: httpx.Client) -> None:
    none = {"shows_text": False, "beginnings": {}}
    assert http.get("/admin/cache/nodes", params={"ids": [1, 7]}).json() == none
    for ids in ([], [-1], list(range(MOST_BEGINNINGS + 1))):
        assert http.get("/admin/cache/nodes", params={"ids": ids}).status_code == 400


def test_one_namespace_is_cleared_or_all(http: httpx.Client) -> None:
    def freed(**params: str) -> tuple[int, int]:
        answer = http.post("/admin/cache/clear", params=params).json()
        return answer["blocks_freed"], answer["bytes_freed"]

    assert freed() == freed(namespace="0") == (20, 655_360)
    assert freed(namespace="0123456789ab") == (0, 0)
    refused = http.post("/admin/cache/clear", params={"namespace": "my salt"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "namespace"


@pytest.fixture
def keyed_url(tmp_path: Path) -> Iterator[str]:
    keys = key_file(tmp_path, ann={"role": "admin"}, bob={})
    settings = Settings(port=0, api_keys_file=keys, dashboard_text=True)
    with running(FakeEngine(), settings) as url:
        yield url


def test_text_is_shown_where_a_setting_allows_it(keyed_url: str) -> None:
    with client_of(keyed_url, "ann") as ann:
        assert ann.get("/admin/cache/nodes/1").json() == {"id": 1, "tokens": 2, "text": "Hi"}
        found = ann.get("/admin/cache/nodes", params={"ids": [1, 7]}).json()
        assert found == {"shows_text": True, "beginnings": {"1": "Hi"}}


def test_without_a_dashboard_there_is_nothing_of_it() -> None:
    with (
        running(FakeEngine(), Settings(port=0, dashboard=False)) as url,
        httpx.Client(base_url=url, timeout=CLIENT_SECONDS) as http,
    ):
        assert [http.get(path).status_code for path in PATHS] == [404, 404, 404]
        described = http.get("/openapi.json").json()["paths"]
        assert not [path for path in described if "tree" in path or "nodes" in path]
        assert http.post("/admin/cache/clear").status_code == 200
        assert http.get("/admin/cache/stats").status_code == 200
