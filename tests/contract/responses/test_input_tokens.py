"""What `/v1/responses` has besides responses: counting."""

from typing import Any

import openai
import pytest

from tests.contract.responses.conftest import PATCH_TOOL, WEATHER_TOOL, Created
from tests.contract.scripted import Daemon

REASONING = {"effort": "low"}


def count(hermes: Daemon, **fields: Any) -> int:
    counted = hermes.openai.responses.input_tokens.count(model="bytes", **fields)
    assert counted.object == "response.input_tokens"
    return int(counted.input_tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "How is the weather?"},
        {"input": [{"role": "user", "content": "Hi"}], "instructions": "Be brief."},
        {"input": "Hi", "tools": [WEATHER_TOOL, PATCH_TOOL], "reasoning": REASONING},
    ],
)
def test_the_tokens_of_the_same_response_are_counted(
    hermes: Daemon, create: Created, fields: dict[str, Any]
) -> None:
    assert count(hermes, **fields) == create(**fields).usage.input_tokens
    counted, created = hermes.engine.tokenizer.given[-2:]  # type: ignore[attr-defined]
    assert counted == created


def test_what_came_before_counts(hermes: Daemon, create: Created) -> None:
    first = create(input="How is the weather?")
    fields: dict[str, Any] = {"input": "Go on.", "previous_response_id": first.id}
    assert count(hermes, **fields) == create(**fields).usage.input_tokens
    assert hermes.engine.submitted.qsize() == 2, "nothing is generated to count"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "compaction_trigger"}]}, "input"),
        ({"input": "Hi", "previous_response_id": "resp_0"}, "previous_response_id"),
        ({"input": "Hi", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"input": "x" * 600}, "input"),
    ],
)
def test_what_a_response_refuses_is_refused(
    hermes: Daemon, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        count(hermes, **fields)
    assert refused.value.param == param


@pytest.mark.parametrize("name", ["input_tokens", "compact"])
def test_they_are_no_responses(hermes: Daemon, name: str) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        hermes.openai.responses.retrieve(name)
    assert (refused.value.status_code, refused.value.response.headers["allow"]) == (405, "POST")


def test_a_response_has_a_null_usage_until_it_is_made_and_no_user_unless_one_is_given(
    hermes: Daemon,
) -> None:
    """As OpenAI's examples have it, and as the Open Responses specification requires."""
    queued = hermes.openai.responses.with_raw_response.create(
        model="bytes", input="Hi", background=True
    )
    body = queued.http_response.json()
    assert body["usage"] is None
    assert "user" not in body
    hermes.openai.responses.cancel(body["id"])
    named = hermes.openai.responses.create(model="bytes", input="Hi", user="me")
    assert named.user == "me"
