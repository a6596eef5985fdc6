"""The embedded model says the same in every calling."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests.contract.dialects.adapters import Dialect
from tests.contract.scripted import AnthropicClient, anthropic_client
from tools.demo_model.tasks.knowledge import FACTS

pytestmark = pytest.mark.process

QUESTION = "What is Rootstock?"
ANSWER = FACTS["what"]["answer"]
USER = {"role": "user", "content": QUESTION}
SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 20}},
    "required": ["title"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def http(demo_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo_url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_question_is_answered(http: httpx.Client, calling: Dialect, stream: bool) -> None:
    asked: dict[str, Any] = {"text": QUESTION, "max_tokens": 200, "temperature": 0}
    answer = calling.read(calling.post(http, stream=stream, **asked))
    assert (answer.text, answer.finish) == (ANSWER, calling.finishes["stop"])


def test_an_answer_conforms_to_its_schema(http: httpx.Client, calling: Dialect) -> None:
    answer = calling.read(calling.post(http, text=QUESTION, max_tokens=200, schema=SCHEMA))
    jsonschema.validate(json.loads(answer.text), SCHEMA)


@pytest.fixture(scope="module")
def demo(demo_url: str) -> Iterator[AnthropicClient]:
    with anthropic_client(demo_url) as client:
        yield client


def test_a_prompt_is_cached_beforehand(demo: AnthropicClient) -> None:
    text = {"type": "text", "text": "Nobody has said this before. " * 8}
    marked = {**text, "cache_control": {"type": "ephemeral"}}
    asked = {"model": "", "messages": [{"role": "user", "content": [marked]}]}
    cold = demo.messages.create(max_tokens=0, **asked)
    assert (cold.content, cold.stop_reason, cold.usage.output_tokens) == ([], "max_tokens", 0)
    assert cold.usage.cache_creation_input_tokens > 50
    warm = demo.messages.create(max_tokens=1, **asked)
    assert warm.usage.cache_creation_input_tokens == 1
    again = demo.messages.create(max_tokens=0, **asked)
    assert again.usage.cache_read_input_tokens == warm.usage.cache_read_input_tokens


def test_an_answer_that_was_begun_is_continued(demo: AnthropicClient) -> None:
    begun = " ".join(ANSWER.split()[:5])
    messages = [USER, {"role": "assistant", "content": begun}]
    message = demo.messages.create(
        model="", max_tokens=200, messages=messages, extra_body={"temperature": 0}
    )
    assert begun + message.content[0].text == ANSWER
