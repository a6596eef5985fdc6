"""What a clear forgets: KV alone, unless more is named."""

import json
from collections.abc import Iterator

import httpx
import pytest

from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import ByteTokenizer, FakeEngine, Script
from tests.contract.scripted import CLIENT_SECONDS

CALL = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
PING = {"type": "function", "function": {"name": "ping"}}
USER = {"role": "user", "content": "Ping!"}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(tokenizer=ByteTokenizer(chat_template="<tool_call>"))


@pytest.fixture
def daemon(engine: FakeEngine) -> Iterator[httpx.Client]:
    """It remembers an answer with a call, and has stored two responses."""
    with (
        running(engine, Settings(port=0, tool_parser="hermes")) as url,
        httpx.Client(base_url=url, timeout=CLIENT_SECONDS) as client,
    ):
        for _ in range(2):
            client.post("/v1/responses", json={"input": "Hi"}).raise_for_status()
        engine.script = Script(answers=(CALL,))
        body = {"messages": [USER], "tools": [PING]}
        client.post("/v1/chat/completions", json=body).raise_for_status()
        yield client


def clear(daemon: httpx.Client, **params: str) -> dict[str, object]:
    answer: dict[str, object] = daemon.post("/admin/cache/clear", params=params).json()
    return answer


def test_replays_and_responses_are_kept_and_it_says_so(daemon: httpx.Client) -> None:
    [model] = daemon.get("/admin/models").json()["models"]
    freed = {"blocks_freed": 20, "bytes_freed": 655_360}
    assert clear(daemon) == {
        **freed,
        "disk_bytes_freed": 0,
        "models": [{"id": model["id"], **freed, "failure": None}],
        "forgotten": {"replays": 0, "responses": 0},
        "kept": {"replays": 1, "responses": 2},
    }


@pytest.mark.parametrize(
    ("what", "forgotten", "kept"),
    [
        ("replays", (1, 0), (0, 2)),
        ("responses", (0, 2), (1, 0)),
        ("responses,replays", (1, 2), (0, 0)),
    ],
)
def test_what_is_named_is_forgotten_and_nothing_else(
    daemon: httpx.Client,
    engine: FakeEngine,
    what: str,
    forgotten: tuple[int, int],
    kept: tuple[int, int],
) -> None:
    assert clear(daemon, what=what) == {
        "blocks_freed": 0,
        "bytes_freed": 0,
        "disk_bytes_freed": 0,
        "models": [],
        "forgotten": dict(zip(("replays", "responses"), forgotten, strict=True)),
        "kept": dict(zip(("replays", "responses"), kept, strict=True)),
    }
    assert engine.cleared.empty()


def test_all_can_be_named_at_once(daemon: httpx.Client, engine: FakeEngine) -> None:
    answer = clear(daemon, what="kv,replays,responses", tiers="memory")
    assert answer["blocks_freed"] == 20
    assert answer["kept"] == {"replays": 0, "responses": 0}
    assert daemon.get("/admin/daemon").json()["remembered"] == answer["kept"]


def test_a_response_that_was_forgotten_is_not_found_nor_continued(daemon: httpx.Client) -> None:
    id = daemon.post("/v1/responses", json={"input": "Hi"}).json()["id"]
    assert daemon.get(f"/v1/responses/{id}").status_code == 200
    clear(daemon, what="responses")
    assert daemon.get(f"/v1/responses/{id}").status_code == 404
    again = {"input": "And?", "previous_response_id": id}
    assert daemon.post("/v1/responses", json=again).status_code == 400


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"what": ""}, "what"),
        ({"what": "disk"}, "what"),
        ({"what": "kv,kv,kv,kv"}, "what"),
        ({"what": "replays", "tiers": "disk"}, "tiers"),
        ({"what": "kv,replays", "namespace": "0"}, "namespace"),
    ],
)
def test_what_makes_no_sense_clears_nothing(
    daemon: httpx.Client, engine: FakeEngine, params: dict[str, str], param: str
) -> None:
    refused = daemon.post("/admin/cache/clear", params=params)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith(param)
    assert refused.json()["error"]["message"].startswith(param)
    assert engine.cleared.empty()
    assert json.loads(daemon.get("/admin/daemon").text)["remembered"]["responses"] == 2
