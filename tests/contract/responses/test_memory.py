"""What requests of `/v1/responses` hold in memory: it counts as their body, or is parsed anew."""

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from server.json_model import RequestModel
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine, Gate, Script, TryingEngine
from tests.contract.responses.conftest import WEATHER_TOOL
from tests.contract.scripted import THINK, RecordingTokenizer
from tests.contract.wire import posted
from tests.polling import WAIT_SECONDS

PATH = "/v1/responses"
DESCRIBED = {"text": {"format": {"type": "text", "description": "x" * 90_000}}}
SEALED = {
    "input": [
        {"type": "message", "role": "user", "content": "Hi"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x" * 90_000},
    ]
}
UNUSED_TOOLS = {
    "tools": [{"type": "function", "name": "f", "description": "x" * 90_000, "strict": False}],
    "tool_choice": "none",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields", [DESCRIBED, SEALED, UNUSED_TOOLS], ids=["text", "input", "tools"]
)
def test_what_a_response_repeats_or_stores_counts_as_a_body_until_its_end(
    fields: dict[str, Any], stream: bool
) -> None:
    """It is no part of the prompt, and less than half of what all bodies may have: a larger body is
    the largest as soon as the two are too large together, however much of it has come by then.
    """
    engine = FakeEngine(Script(gate=Gate()), tokenizer=RecordingTokenizer())
    limits: dict[str, Any] = {"max_body_bytes": 110_000, "max_total_body_bytes": 190_000}
    body = {"input": "Hi", **fields, "stream": stream}
    with (
        running(engine, Settings(port=0, tool_parser="hermes", **limits)) as url,
        posted(url, PATH, body),
    ):
        engine.at_gate.get(timeout=WAIT_SECONDS)
        larger = {"input": "x" * 100_000}
        refused = httpx.post(f"{url}{PATH}", json=larger, timeout=WAIT_SECONDS)
        assert refused.json()["error"]["code"] == "overloaded"


def parsed() -> dict[int, str]:
    """The parts of parsed bodies and of stored items that are in memory, by their ids."""
    gc.collect()
    return {
        id(each): type(each).__name__ for each in gc.get_objects() if isinstance(each, RequestModel)
    }


def test_nothing_parsed_is_held_while_a_grammar_is_tried() -> None:
    engine = TryingEngine(tokenizer=RecordingTokenizer(chat_template=THINK))
    words = [{"role": "user", "content": "a"}] * 40
    tool = {key: value for key, value in WEATHER_TOOL.items() if key != "strict"}
    with (
        running(engine, Settings(port=0, tool_parser="hermes")) as url,
        httpx.Client(base_url=url, timeout=WAIT_SECONDS) as http,
        ThreadPoolExecutor() as pool,
    ):
        first = http.post(PATH, json={"input": words}).json()["id"]
        others = parsed()  # of other tests, whose daemons may go on
        body = {"input": "Hi", "previous_response_id": first, "tools": [tool]}
        answer = pool.submit(http.post, PATH, json=body)
        engine.tried.get(timeout=WAIT_SECONDS)
        assert {id: name for id, name in parsed().items() if id not in others} == {}
        engine.gate.open()
        assert answer.result(WAIT_SECONDS).status_code == 200
