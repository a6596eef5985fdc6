"""Stored and background responses belong to a key, and count towards its limits."""

from pathlib import Path

import httpx

from server.settings import Settings
from tests.contract.access.helpers import client_of, key_file
from tests.contract.conftest import CLIENT_SECONDS
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine, Gate, Script

ASKED: dict[str, object] = {"input": "Hi"}


def test_nobody_finds_the_responses_of_another_key(tmp_path: Path) -> None:
    settings = Settings(port=0, api_keys_file=key_file(tmp_path, alice={}, bob={}))
    with (
        running(FakeEngine(), settings) as url,
        client_of(url, "alice") as alice,
        client_of(url, "bob") as bob,
    ):
        id = alice.post("/v1/responses", json=ASKED).json()["id"]
        path = f"/v1/responses/{id}"
        assert bob.get(path).status_code == 404
        assert bob.get(f"{path}/input_items").status_code == 404
        assert bob.delete(path).status_code == 404
        followed = bob.post("/v1/responses", json=ASKED | {"previous_response_id": id})
        assert followed.json()["error"]["code"] == "previous_response_not_found"
        assert alice.get(path).status_code == 200


def test_a_background_response_holds_its_place_until_it_is_made(tmp_path: Path) -> None:
    gate = Gate()
    engine = FakeEngine(Script(answers=("abc",), gate=gate))
    limits = {"concurrency": 1, "tokens_per_minute": 1}
    settings = Settings(port=0, api_keys_file=key_file(tmp_path, alice={**limits}))
    with running(engine, settings) as url, client_of(url, "alice") as alice:
        begun = alice.post("/v1/responses", json=ASKED | {"background": True})
        engine.at_gate.get(timeout=CLIENT_SECONDS)
        assert "1 requests at a time" in _refusal(alice)
        gate.open()
        path = f"/v1/responses/{begun.json()['id']}"
        while alice.get(path).json()["status"] != "completed":
            pass
        assert "1 tokens a minute" in _refusal(alice)


def _refusal(client: httpx.Client) -> str:
    answer = client.post("/v1/responses", json=ASKED)
    assert answer.status_code == 429
    return str(answer.json()["error"]["message"])
