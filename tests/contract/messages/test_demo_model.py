"""Messages of the embedded model: what is begun is continued, what has a schema conforms."""

import json
from collections.abc import Iterator

import pytest

from tests.contract.scripted import AnthropicClient, anthropic_client
from tools.demo_model.tasks.knowledge import FACTS

pytestmark = pytest.mark.process

USER = {"role": "user", "content": "What is Rootstock?"}
ANSWER = FACTS["what"]["answer"]


@pytest.fixture(scope="module")
def demo(demo_url: str) -> Iterator[AnthropicClient]:
    with anthropic_client(demo_url) as client:
        yield client


def test_a_question_is_answered(demo: AnthropicClient) -> None:
    asked = {"model": "", "max_tokens": 200, "messages": [USER], "extra_body": {"temperature": 0}}
    message = demo.messages.create(**asked)
    assert message.content[0].text == ANSWER
    assert message.stop_reason == "end_turn"
    with demo.messages.stream(**asked) as stream:
        assert stream.get_final_text() == ANSWER
        usage = stream.get_final_message().usage
    assert (usage.input_tokens, usage.output_tokens) == (1, message.usage.output_tokens)


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


def test_an_answer_of_a_schema(demo: AnthropicClient) -> None:
    schema = {
        "type": "object",
        "properties": {"title": {"type": "string", "maxLength": 20}},
        "required": ["title"],
        "additionalProperties": False,
    }
    message = demo.messages.create(
        model="",
        max_tokens=200,
        messages=[USER],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert set(json.loads(message.content[0].text)) == {"title"}
