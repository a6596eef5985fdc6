"""Stored responses belong to a key."""

from pathlib import Path

from server.settings import Settings
from tests.contract.access.helpers import client_of, key_file
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine

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
