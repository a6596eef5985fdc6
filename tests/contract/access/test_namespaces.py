"""What the requests of several keys share."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.values.model import NO_REPLAYS, Replay
from server.settings import Settings
from tests.contract.access.helpers import client_of, key_file
from tests.contract.daemon import running
from tests.contract.fake_engine import ByteTokenizer, FakeEngine, Script

BODY = {"prompt": "a long prompt", "max_tokens": 1}


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[httpx.Client, ...]]:
    """Two admins of a daemon whose keys share what the parameter says."""
    keys = key_file(tmp_path, alice={"role": "admin"}, bob={"role": "admin"})
    settings = Settings(port=0, api_keys_file=keys, cache_namespace=request.param)
    with (
        running(FakeEngine(), settings) as url,
        client_of(url, "alice") as alice,
        client_of(url, "bob") as bob,
    ):
        yield alice, bob


def cached(client: httpx.Client, **fields: str) -> int:
    usage = client.post("/v1/completions", json=BODY | fields).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def probed(client: httpx.Client, **fields: str) -> int:
    body = {"prompt": BODY["prompt"], **fields}
    return int(client.post("/admin/cache/probe", json=body).json()["cached_tokens"])


ALL_BUT_ONE = len(str(BODY["prompt"])) - 1


@pytest.mark.parametrize("pair", ["shared"], indirect=True)
def test_by_default_all_share_what_is_cached(pair: tuple[httpx.Client, httpx.Client]) -> None:
    alice, bob = pair
    assert cached(alice) == 0
    assert cached(bob) == probed(bob) == probed(alice) == ALL_BUT_ONE


@pytest.mark.parametrize("pair", ["key"], indirect=True)
def test_keys_with_namespaces_share_nothing_and_see_nothing(
    pair: tuple[httpx.Client, httpx.Client],
) -> None:
    alice, bob = pair
    assert cached(alice) == 0
    assert cached(alice) == probed(alice) == ALL_BUT_ONE
    assert cached(bob) == 0
    assert probed(bob, cache_salt="alice") == probed(bob, cache_salt="alice\0") == 0


@pytest.mark.parametrize("pair", ["key"], indirect=True)
def test_a_namespace_has_salts_of_its_own(pair: tuple[httpx.Client, httpx.Client]) -> None:
    alice, bob = pair
    assert cached(alice, cache_salt="team") == 0
    assert cached(alice) == 0
    assert cached(alice, cache_salt="team") == probed(alice, cache_salt="team") == ALL_BUT_ONE
    assert cached(bob, cache_salt="team") == probed(bob, cache_salt="other") == 0


PING = {"type": "function", "function": {"name": "ping"}}
CALLING = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'


@dataclass(frozen=True)
class Listening(ByteTokenizer):
    """Notes how many answers it is told to render as they were generated, in what clients said."""

    replayed: list[int] = field(default_factory=list)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        replays: Mapping[int, Replay] = NO_REPLAYS,
        /,
        **template_arguments: object,
    ) -> list[int]:
        if messages[0]["content"] == "ping!":  # not what the server tries out
            self.replayed.append(len(replays))
        return super().apply_chat_template(messages, replays)


def test_answers_are_replayed_to_the_key_that_got_them(tmp_path: Path) -> None:
    tokenizer = Listening()
    engine = FakeEngine(Script([CALLING]), tokenizer=tokenizer)
    keys = key_file(tmp_path, alice={}, bob={})
    settings = Settings(port=0, api_keys_file=keys, cache_namespace="key", tool_parser="hermes")
    with (
        running(engine, settings) as url,
        client_of(url, "alice") as alice,
        client_of(url, "bob") as bob,
    ):
        messages: list[dict[str, Any]] = [{"role": "user", "content": "ping!"}]
        for client in (alice, bob, alice):
            body = {"messages": messages, "tools": [PING], "cache_salt": "team"}
            answer = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
            if len(messages) == 1:
                (call,) = answer["tool_calls"]
                result = {"role": "tool", "tool_call_id": call["id"], "content": "pong"}
                messages += [answer, result]
        for client in (bob, alice):  # whose tokens would show what was generated
            body = {"messages": messages, "cache_salt": "team"}
            assert client.post("/tokenize", json=body).status_code == 200
    assert tokenizer.replayed == [0, 0, 1, 0, 1]


@pytest.mark.parametrize("pair", ["key"], indirect=True)
def test_a_rendered_request_has_the_salt_that_the_client_chose(
    pair: tuple[httpx.Client, httpx.Client],
) -> None:
    alice, _ = pair
    body = BODY | {"cache_salt": "team"}
    (rendered,) = alice.post("/v1/completions/render", json=body).json()
    assert rendered["cache_salt"] == "team"
