"""What a summary and the turn after it compute, by the demonstration model."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from engine.values.settings import EngineConfig
from server.generation.compaction import SUMMARIZE
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.metrics import value
from tests.contract.scripted import anthropic_client, strict_client
from tests.hosting import loaded
from tests.polling import until

pytestmark = pytest.mark.process

INSTRUCTIONS = "You keep notes of what is said, and answer from them. " * 12
FACTS = [f"In box {number} there are {number * 7} blue marbles." for number in range(40)]
QUESTION = "How many are in box 3?"
TURN_TOKENS = 16
TOOL = {
    "type": "function",
    "name": "look",
    "description": "Looks into a box, and says what is in it.",
    "parameters": {"type": "object", "properties": {"box": {"type": "integer"}}},
}

Json = dict[str, Any]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        engine = loaded(EngineConfig(model="", kv_cache_bytes=64 << 20))
        with running(engine, Settings(port=0)) as url:
            yield url


def warmed_tokens(url: str) -> float:
    return value(httpx.get(f"{url}/metrics").text, "rootstock_warmed_tokens_total")


def new_tokens(url: str, text: str) -> int:
    """The most tokens that a message with this text adds to a prompt, with the turns around it."""
    body = {"prompt": text, "add_special_tokens": False}
    return int(httpx.post(f"{url}/tokenize", json=body).json()["count"]) + TURN_TOKENS


def compacted(url: str, compact: Callable[[], Any]) -> Any:
    """What `compact` returns, when the head that it leaves has been computed."""
    before = warmed_tokens(url)
    made = compact()
    until(lambda: warmed_tokens(url), lambda now: now > before)
    until(lambda: httpx.get(f"{url}/load").json()["server_load"], lambda live: not live)
    return made


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def computed(usage: Any) -> int:
    return int(usage.input_tokens - usage.input_tokens_details.cached_tokens)


def test_responses(url: str) -> None:
    httpx.post(f"{url}/admin/cache/clear").raise_for_status()
    fields: Json = {
        "model": "rootstock-demo",
        "instructions": INSTRUCTIONS,
        "tools": [TOOL],
        "temperature": 0,
        "max_output_tokens": 24,
    }
    with strict_client(url) as client:
        create = client.responses.create
        first = create(input="\n".join(FACTS), **fields)
        last = create(input="Which box has most?", previous_response_id=first.id, **fields)
        made = compacted(
            url,
            lambda: client.responses.compact(model="rootstock-demo", previous_response_id=last.id),
        )
        assert made.usage.input_tokens > 500
        assert computed(made.usage) <= new_tokens(url, SUMMARIZE)
        head = made.output[0].model_dump(exclude_none=True)
        after = create(input=[head, user(QUESTION)], **fields)
        assert computed(after.usage) <= new_tokens(url, QUESTION) < 40


def test_messages(url: str) -> None:
    httpx.post(f"{url}/admin/cache/clear").raise_for_status()
    fields: Json = {
        "model": "rootstock-demo",
        "system": INSTRUCTIONS,
        "extra_body": {"temperature": 0},
        "max_tokens": 24,
    }
    said = [user("\n".join(FACTS))]
    with anthropic_client(url) as client:
        create = client.beta.messages.create
        answer = create(messages=said, **fields)
        said.append({"role": "assistant", "content": answer.to_dict()["content"]})
        made = compacted(
            url,
            lambda: create(
                messages=said, **{**fields, "max_tokens": 200}, compaction={"type": "summarize"}
            ),
        )
        (turn,) = made.usage.iterations
        assert turn.cache_read_input_tokens > 500
        assert turn.input_tokens <= new_tokens(url, SUMMARIZE)
        head = {"role": "assistant", "content": made.to_dict()["content"]}
        usage = create(messages=[head, user(QUESTION)], **fields).usage
        assert usage.input_tokens <= new_tokens(url, QUESTION) < 40
