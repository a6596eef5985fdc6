"""Prompts that are warmed are found by the chats that begin with them."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from engine.values.settings import EngineConfig
from server.settings import Settings
from server.settings.prompts import read_prompts
from tests.contract.access.helpers import bearer, key_file, secret_of
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine
from tests.contract.metrics import value
from tests.contract.scripted import CLIENT_SECONDS
from tests.hosting import loaded
from tests.polling import until

BLOCK = 32
SYSTEM = {"role": "system", "content": "You review code. " + "Name each fault that you find. " * 30}
USER = {"role": "user", "content": "What is a radix tree?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city, as it is now. " * 10,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
DEMO = EngineConfig("", kv_cache_bytes=16 << 20, max_running=4, decode="eager")


@pytest.fixture(scope="module")
def demo() -> Iterator[httpx.Client]:
    with (
        running(loaded(DEMO), Settings(port=0)) as url,
        httpx.Client(base_url=url, timeout=CLIENT_SECONDS) as client,
    ):
        yield client


def warmed(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = client.post("/v1/cache/warm", json=body).raise_for_status().json()
    return answer


def cached_tokens(client: httpx.Client, *messages: object, **body: Any) -> int:
    """Of the prompt of a chat."""
    body = {"messages": list(messages), "max_tokens": 1, **body}
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["plain", "tools"])
def test_a_chat_with_the_same_system_prompt_and_tools_finds_it(
    demo: httpx.Client, tools: list[object]
) -> None:
    demo.post("/admin/cache/clear").raise_for_status()
    first = warmed(demo, messages=[SYSTEM], tools=tools)
    assert first["prompt_tokens"] == first["computed_tokens"] > 100
    assert (first["cached_tokens"], first["pinned"]) == (0, False)
    assert cached_tokens(demo, SYSTEM, USER, tools=tools) >= first["prompt_tokens"] - BLOCK
    again = warmed(demo, messages=[SYSTEM], tools=tools)
    assert again["computed_tokens"] + again["cached_tokens"] == first["prompt_tokens"]
    assert again["computed_tokens"] <= BLOCK


def test_a_conversation_that_waits_for_an_answer_is_warmed_whole(demo: httpx.Client) -> None:
    demo.post("/admin/cache/clear").raise_for_status()
    whole = warmed(demo, messages=[SYSTEM, USER])
    assert cached_tokens(demo, SYSTEM, USER) == whole["prompt_tokens"] - 1


def test_after_an_answer_the_next_turn_finds_all_that_was_said(demo: httpx.Client) -> None:
    demo.post("/admin/cache/clear").raise_for_status()
    said = [SYSTEM, USER, {"role": "assistant", "content": "A tree of prefixes."}]
    turns = warmed(demo, messages=said)
    found = cached_tokens(demo, *said, {"role": "user", "content": "Whose?"})
    assert found >= turns["prompt_tokens"] - BLOCK


def test_a_text_is_warmed_for_completions(demo: httpx.Client) -> None:
    text = "A radix tree is a tree in which each node that is the only child is merged. " * 5
    prompt_tokens = warmed(demo, prompt=text)["prompt_tokens"]
    body = {"prompt": f"{text} It", "max_tokens": 1}
    usage = demo.post("/v1/completions", json=body).raise_for_status().json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= prompt_tokens - BLOCK


def test_a_salt_separates_what_is_warmed(demo: httpx.Client) -> None:
    demo.post("/admin/cache/clear").raise_for_status()
    warmed(demo, messages=[SYSTEM], cache_salt="mine")
    assert cached_tokens(demo, SYSTEM, USER) == 0
    assert cached_tokens(demo, SYSTEM, USER, cache_salt="mine") > 100


def test_a_pinned_prompt_is_counted_until_a_clear(demo: httpx.Client) -> None:
    demo.post("/admin/cache/clear").raise_for_status()
    before = demo.get("/admin/cache/stats").json()["warmed_tokens"]
    pinned = warmed(demo, messages=[SYSTEM], pin=True)
    assert pinned["pinned"]
    stats = demo.get("/admin/cache/stats").json()
    assert stats["blocks_pinned"] == pinned["prompt_tokens"] // BLOCK
    assert stats["warmed_tokens"] == before + pinned["prompt_tokens"]
    metrics = demo.get("/metrics").text
    assert value(metrics, "rootstock_kv_pinned_blocks") == stats["blocks_pinned"]
    assert value(metrics, "rootstock_warmed_tokens_total") == stats["warmed_tokens"]
    demo.post("/admin/cache/clear").raise_for_status()
    assert demo.get("/admin/cache/stats").json()["blocks_pinned"] == 0
    assert cached_tokens(demo, SYSTEM, USER) == 0


def test_more_than_may_be_pinned_is_refused_with_the_bound(demo: httpx.Client) -> None:
    demo.post("/admin/cache/clear").raise_for_status()
    long = "word " * 600
    refused = [
        demo.post("/v1/cache/warm", json={"prompt": f"{number} {long}", "pin": True})
        for number in range(4)
    ][-1]
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "pin"
    assert "are pinned of at most" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": "word " * 5000}, "prompt"),
        ({"messages": [{"role": "bard", "content": "x"}]}, "messages[0].role"),
        ({"messages": "x"}, "messages"),
        ({"messages": [USER], "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": [USER], "pin": "yes"}, "pin"),
    ],
)
def test_what_cannot_be_warmed_is_refused_by_the_name_of_its_field(
    demo: httpx.Client, body: dict[str, object], param: str
) -> None:
    refused = demo.post("/v1/cache/warm", json=body)
    assert refused.status_code == 400
    assert str(refused.json()["error"]["param"]).startswith(param)


@pytest.mark.parametrize("body", [{}, {"messages": [USER], "prompt": "both"}])
def test_one_of_messages_and_prompt_is_needed(demo: httpx.Client, body: dict[str, object]) -> None:
    refused = demo.post("/v1/cache/warm", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "give either messages or prompt"


def test_only_an_admin_pins(tmp_path: Path) -> None:
    keys = key_file(tmp_path, alice={}, root={"role": "admin"})
    with (
        running(FakeEngine(), Settings(port=0, api_keys_file=keys)) as url,
        httpx.Client(base_url=url) as client,
    ):
        body = {"messages": [USER], "pin": True}
        alice, root = (bearer(secret_of(name)) for name in ("alice", "root"))
        assert client.post("/v1/cache/warm", json=body).status_code == 401
        refused = client.post("/v1/cache/warm", json=body, headers=alice)
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "pin")
        allowed = client.post("/v1/cache/warm", json={"messages": [USER]}, headers=alice)
        assert (allowed.status_code, allowed.json()["pinned"]) == (200, False)
        assert client.post("/v1/cache/warm", json=body, headers=root).json()["pinned"] is True


def stats_of(client: httpx.Client) -> tuple[int, int]:
    """Tokens that were warmed, and blocks that are pinned."""
    stats = client.get("/admin/cache/stats").raise_for_status().json()
    return stats["warmed_tokens"], stats["blocks_pinned"]


def test_each_start_warms_the_prompts_of_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The prompt in the midst cannot be warmed: it is logged, and the others are."""
    caplog.set_level(logging.INFO, "rootstock")
    prompts = tmp_path / "prompts.jsonl"
    bad = {"messages": [{"role": "bard", "content": "x"}]}
    lines = [{"messages": [SYSTEM], "tools": [TOOL], "pin": True}, bad, {"prompt": "Once upon"}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    for _ in range(2):
        caplog.clear()
        with (
            running(loaded(DEMO), Settings(port=0, warm_prompts=prompts)) as url,
            httpx.Client(base_url=url, timeout=CLIENT_SECONDS) as client,
        ):
            until(lambda: any("tokens computed" in line for line in caplog.messages))
            warmed_tokens, pinned_blocks = stats_of(client)
            assert cached_tokens(client, SYSTEM, USER, tools=[TOOL]) > warmed_tokens - 2 * BLOCK
            assert pinned_blocks > 0
        [problem] = [line for line in caplog.messages if "warm_prompts, prompt" in line]
        assert "prompt 2: messages[0].role: " in problem
        assert "1 of 3 prompts are pinned" in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.jsonl", '{"prompt": "x"}\n\n"y"\n', [{"prompt": "x"}, {"prompt": "y"}]),
        ("a.json", '[{"messages": [{"role": "user", "content": "x"}], "pin": true}]', None),
        ("a.yaml", "- prompt: x\n- y\n", [{"prompt": "x"}, {"prompt": "y"}]),
    ],
)
def test_prompts_are_read_from_lists_and_lines(
    tmp_path: Path, name: str, text: str, found: list[object] | None
) -> None:
    path = tmp_path / name
    path.write_text(text)
    prompts = read_prompts(path)
    assert found is None or prompts == found
    assert len(prompts) == (1 if found is None else 2)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.yaml", None, "cannot be read: No such file"),
        ("a.yaml", "prompt: x", "must be a list"),
        ("a.yaml", "- [", "cannot be read as JSON or YAML"),
        ("a.jsonl", "{}\n{", "cannot be read as JSON lines"),
        ("a.jsonl", '"x"\n{}', "prompt 2: must have either messages or prompt"),
        ("a.jsonl", '{"prompt": "x", "messages": []}', "prompt 1: must have either"),
        ("a.jsonl", '{"prompt": "x", "model": "y"}', "prompt 1: there is no field model"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused_before_anything_is_loaded(
    tmp_path: Path, name: str, text: str | None, problem: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValidationError, match=re.escape(problem)):
        Settings(warm_prompts=path)


def test_a_model_is_unloaded_though_its_prompts_are_not_all_warm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """To warm them all would take half a minute and more."""
    caplog.set_level(logging.INFO, "rootstock")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'"{number} {"word " * 400}"\n' for number in range(200)))
    settings = Settings(port=0, warm_prompts=prompts)
    with (
        running(loaded(DEMO), settings) as url,
        httpx.Client(base_url=url, timeout=CLIENT_SECONDS) as client,
    ):
        until(lambda: stats_of(client)[0] > 0)
        [model] = client.get("/admin/models").json()["models"]
        unloaded = client.post("/admin/models/unload", params={"model": model["id"]})
        assert unloaded.raise_for_status().json()["state"] == "unloaded"
    assert "tokens computed" not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
