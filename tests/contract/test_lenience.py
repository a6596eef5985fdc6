"""What other servers take, and clients therefore send."""

from dataclasses import replace
from typing import Any

import httpx
import pytest

from server.settings import Settings
from tests.contract.conftest import ChatBody
from tests.contract.daemon import running
from tests.contract.fake_engine import CARD, END_OF_TEXT, FakeEngine

pytestmark = pytest.mark.usefixtures("engine")  # each test starts from the default script


def answered(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_minus_one_token_is_no_limit_in_a_chat(
    http: httpx.Client, chat: ChatBody, engine: FakeEngine, field: str
) -> None:
    answered(http, "/v1/chat/completions", chat(**{field: -1}))
    request = engine.submitted.get_nowait()
    assert request.max_tokens == CARD.max_context_tokens - len(request.prompt)


def test_minus_one_token_is_no_limit_in_a_completion(
    http: httpx.Client, engine: FakeEngine
) -> None:
    answered(http, "/v1/completions", {"prompt": "Hi", "max_tokens": -1})
    assert engine.submitted.get_nowait().max_tokens == CARD.max_context_tokens - len("Hi")


def test_no_probability_mass_leaves_the_best_token(
    http: httpx.Client, chat: ChatBody, engine: FakeEngine
) -> None:
    answered(http, "/v1/chat/completions", chat(top_p=0))
    assert engine.submitted.get_nowait().sampling.temperature == 0


def test_no_top_logprobs_need_no_logprobs(http: httpx.Client, chat: ChatBody) -> None:
    body = answered(http, "/v1/chat/completions", chat(top_logprobs=0))
    assert body["choices"][0]["logprobs"] is None


def test_sixty_four_stop_strings(http: httpx.Client, chat: ChatBody, engine: FakeEngine) -> None:
    stops = [f"stop {number}" for number in range(64)]
    answered(http, "/v1/chat/completions", chat(stop=stops))
    assert engine.submitted.get_nowait().stop == tuple(stops)


@pytest.mark.parametrize("fields", [{}, {"prompt": None}, {"prompt": ""}])
def test_without_a_prompt_a_text_begins(
    http: httpx.Client, engine: FakeEngine, fields: dict[str, object]
) -> None:
    """The fake's tokenizer marks no beginning; its model has one token that ends a text."""
    body = answered(http, "/v1/completions", {"echo": True, "max_tokens": 1, **fields})
    assert tuple(engine.submitted.get_nowait().prompt) == (END_OF_TEXT,)
    assert body["choices"][0]["text"].startswith("<|end|>")


def test_without_a_prompt_and_a_token_to_begin_with() -> None:
    engine = FakeEngine(card=replace(CARD, eos_token_ids=frozenset({1, 2})))
    with running(engine, Settings(port=0)) as base_url:
        answer = httpx.post(f"{base_url}/v1/completions", json={})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_a_number_without_a_fraction_is_an_integer(
    http: httpx.Client, chat: ChatBody, engine: FakeEngine
) -> None:
    """As JSON Schema has it, and as languages with one kind of number write it."""
    answered(http, "/v1/chat/completions", chat(max_tokens=4.0, stop_token_ids=[7.0]))
    asked = engine.submitted.get_nowait()
    assert (asked.max_tokens, asked.stop_token_ids) == (4, frozenset({7}))
    answered(http, "/v1/completions", {"prompt": [1.0, 2], "max_tokens": 1.0})
    assert tuple(engine.submitted.get_nowait().prompt) == (1, 2)
    assert http.post("/v1/completions", json={"prompt": [1.5]}).status_code == 400
