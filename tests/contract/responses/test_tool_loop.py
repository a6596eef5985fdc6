"""An agent's loop with a real engine: each turn adopts all that the one before has computed."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.values.settings import EngineConfig
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.scripted import StrictClient, strict_client
from tests.contract.test_tool_loop import LOOK, qwen3_shaped
from tests.hosting import loaded

pytestmark = pytest.mark.process

__all__ = ["qwen3_shaped"]

STEPS = 4
LOOK_TOOL = {"type": "function", "strict": False, **LOOK["function"]}
NOTE_TOOL = {"type": "custom", "name": "note", "description": "Note something down."}
SPIED = {"type": "namespace", "name": "spies", "description": "Spies.", "tools": [LOOK_TOOL]}


@dataclass(frozen=True)
class Model:
    """A daemon with a model that calls a tool in few words."""

    client: StrictClient
    name: str
    quotation_mark: list[int]

    def options(self, seed: int, tool: dict[str, Any]) -> dict[str, Any]:
        extra: dict[str, Any] = {"seed": seed}
        if tool["type"] == "custom":  # whose text would go on for long
            extra["logit_bias"] = {str(id): 15 for id in self.quotation_mark}
        if self.name == "reasoning":
            kwargs = {"opens": True, "enable_thinking": True}
            extra |= {"thinking_budget": 6, "chat_template_kwargs": kwargs}
        return {
            "model": self.name,
            "tools": [tool],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_output_tokens": 200,
            "temperature": 1,
            "extra_body": extra,
        }


@pytest.fixture(scope="module", params=["demo", "reasoning"])
def model(request: pytest.FixtureRequest, qwen3_shaped: Path) -> Iterator[Model]:
    source = {"demo": "", "reasoning": str(qwen3_shaped)}[request.param]
    engine = loaded(EngineConfig(source, kv_cache_bytes=32 << 20))
    settings = Settings(port=0, served_model_name=(request.param,))
    with running(engine, settings) as url, strict_client(url) as client:
        yield Model(client, request.param, engine.tokenizer.encode('"', add_special_tokens=False))


Turn = Callable[[Any, list[Any]], dict[str, Any]]


def by_id(response: Any, news: list[Any]) -> dict[str, Any]:
    """The server has what was said."""
    return {"input": news, "previous_response_id": response.id if response else None}


class Carried:
    """The client sends all that was said, and the server stores nothing."""

    def __init__(self) -> None:
        self._items: list[Any] = []

    def __call__(self, response: Any, news: list[Any]) -> dict[str, Any]:
        output = response.output if response else []
        self._items += [item.model_dump(exclude_none=True) for item in output]
        self._items += news
        return {
            "input": self._items,
            "store": False,
            "include": ["reasoning.encrypted_content"],
        }


@pytest.mark.parametrize(
    ("tool", "carried", "summary"),
    [
        pytest.param(LOOK_TOOL, False, False, id="by_id"),
        pytest.param(LOOK_TOOL, True, False, id="carried"),
        pytest.param(SPIED, True, True, id="namespace_and_summary"),
        pytest.param(NOTE_TOOL, True, False, id="custom_tool"),
    ],
)
def test_each_step_adopts_all_of_the_one_before_but_its_last_token(
    model: Model, tool: dict[str, Any], carried: bool, summary: bool
) -> None:
    turn: Turn = Carried() if carried else by_id
    response, expected = None, 0
    news: list[Any] = [{"role": "user", "content": f"Look: {tool['name']}, {carried}."}]
    asked = {"reasoning": {"summary": "auto"}} if summary else {}
    for step in range(STEPS):
        sent = turn(response, news) | model.options(step, tool) | asked
        response = model.client.responses.create(**sent)
        assert response.status == "completed", f"step {step}"
        usage = response.usage
        assert usage.input_tokens_details.cached_tokens >= expected, f"step {step}"
        expected = usage.input_tokens + usage.output_tokens - 1
        call = response.output[-1]
        news = [output_of(call, f"nothing, {step}")]


def output_of(call: Any, text: str) -> dict[str, Any]:
    if call.type == "function_call":
        assert set(json.loads(call.arguments)) == {"place", "depth"}
    return {"type": f"{call.type}_output", "call_id": call.call_id, "output": text}
