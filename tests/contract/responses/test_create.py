"""`POST /v1/responses` in one piece: what a request may say, and what it is answered."""

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from engine.values.model import NO_REPLAYS, Replay
from engine.values.request import GrammarKind
from tests.contract.responses.conftest import Created
from tests.contract.scripted import Daemon, RecordingTokenizer

PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def messages(hermes: Daemon) -> list[tuple[str, Any]]:
    """What the template was given, by role."""
    given, _ = hermes.given
    return [(message["role"], message["content"]) for message in given]


def error(hermes: Daemon, body: dict[str, Any]) -> tuple[str | None, str | None, str]:
    """Param, code and message of the 400."""
    answer = httpx.post(f"{hermes.url}/v1/responses", json=body)
    assert answer.status_code == 400, answer.text
    told = answer.json()["error"]
    assert set(told) == {"message", "type", "param", "code"}
    return told["param"], told["code"], told["message"]


def test_text_for_text(hermes: Daemon, create: Created) -> None:
    response = create(input="How are you?", instructions="Be brief.")
    assert response.output_text == "Fine."
    assert (response.object, response.status, response.model) == ("response", "completed", "bytes")
    assert response.error is response.incomplete_details is None
    (message,) = response.output
    assert (message.role, message.status) == ("assistant", "completed")
    assert messages(hermes) == [("system", "Be brief."), ("user", "How are you?")]


def test_the_request_is_told_back(create: Created) -> None:
    response = create(
        instructions="Be brief.",
        metadata={"purpose": "test"},
        max_output_tokens=50,
        temperature=0.5,
        top_p=0.25,
        parallel_tool_calls=False,
        prompt_cache_key="k",
        safety_identifier="s",
        truncation="auto",
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
    )
    assert (response.instructions, response.metadata) == ("Be brief.", {"purpose": "test"})
    assert (response.max_output_tokens, response.temperature, response.top_p) == (50, 0.5, 0.25)
    assert response.parallel_tool_calls is False
    assert (response.prompt_cache_key, response.safety_identifier) == ("k", "s")
    assert response.truncation == "disabled", "nothing is ever left out of the input"
    assert (response.reasoning.effort, response.reasoning.summary) == ("low", "auto")
    assert (response.text.format.type, response.text.verbosity) == ("text", "low")


def test_all_that_is_said_before_the_user_is_one_system_message(
    hermes: Daemon, create: Created
) -> None:
    """As Codex sends it, and with a developer who speaks later, in his place."""
    create(
        instructions="One.",
        input=[
            {"type": "message", "role": "developer",
             "content": [{"type": "input_text", "text": "Two."}]},
            {"role": "system", "content": [{"type": "input_text", "text": "Three."},
                                           {"type": "input_text", "text": "Four."}]},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "developer", "content": "Five."},
            {"role": "user", "content": "Bye"},
        ],
    )  # fmt: skip
    assert messages(hermes) == [
        ("system", "One.\n\nTwo.\n\nThree.\nFour."),
        ("user", "Hi"),
        ("assistant", "Hello."),
        ("system", "Five."),
        ("user", "Bye"),
    ]


class RefusingTokenizer(RecordingTokenizer):
    """Its template has words of its own for what it does not take."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        replays: Mapping[int, Replay] = NO_REPLAYS,
        /,
        **template_arguments: object,
    ) -> list[int]:
        raise ValueError("max_tokens of messages[0] is unknown")


def test_a_templates_own_words_stay_as_they_are() -> None:
    """Only the field at fault has another name than in a chat."""
    with Daemon.serving(RefusingTokenizer()) as refusing:
        param, _, message = error(refusing, {"input": "Hi"})
    assert param == "input"
    assert message == "input: cannot be turned into a prompt: max_tokens of messages[0] is unknown"


class ReluctantTokenizer(RecordingTokenizer):
    """Its template takes a system message at the head alone."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        replays: Mapping[int, Replay] = NO_REPLAYS,
        /,
        **template_arguments: object,
    ) -> list[int]:
        if any(message["role"] == "system" for message in messages[1:]):
            raise ValueError("the system message comes first")
        return super().apply_chat_template(messages, replays, **template_arguments)


def test_a_developer_who_speaks_later_is_a_user_where_the_template_wants_it() -> None:
    roles = ("developer", "user", "assistant", "developer")
    said = [{"role": role, "content": role} for role in roles]
    with Daemon.serving(ReluctantTokenizer()) as reluctant:
        reluctant.openai.responses.create(model="bytes", input=said)
        rendered = [role for role, _ in messages(reluctant)]
        assert rendered == ["system", "user", "assistant", "user"]


def test_parts_of_a_message(hermes: Daemon, create: Created) -> None:
    said = {"type": "output_text", "text": "I ", "annotations": []}
    refused = {"type": "refusal", "refusal": "won't."}
    create(
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "a"},
                                         {"type": "input_text", "text": "b"}]},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
             "content": [said, refused]},
            {"role": "user", "content": "c"},
        ]
    )  # fmt: skip
    assert messages(hermes) == [("user", "a\nb"), ("assistant", "I won't."), ("user", "c")]


def test_an_answer_that_is_cut_off_is_incomplete(hermes: Daemon, create: Created) -> None:
    hermes.say("A long answer.")
    response = create(max_output_tokens=6)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    assert response.output_text == "A long"


def test_sampling_reaches_the_engine(hermes: Daemon, create: Created) -> None:
    create(temperature=0.5, extra_body={"top_k": 3, "seed": 7, "stop": "x", "cache_salt": "mine"})
    request = hermes.engine.submitted.get_nowait()
    assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 3)
    assert (request.sampling.seed, request.stop, request.cache_salt) == (7, ("x",), "mine")


class Point(BaseModel):
    x: int


def test_parse_gives_typed_objects(hermes: Daemon) -> None:
    hermes.say('{"x": 3}')
    response = hermes.openai.responses.parse(model="bytes", input="Where?", text_format=Point)
    assert response.output_parsed == Point(x=3)
    constraint = hermes.engine.submitted.get_nowait().constraint
    assert constraint is not None
    assert constraint.grammar.kind is GrammarKind.JSON_SCHEMA
    assert constraint.param == "text.format"
    assert '"x"' in constraint.grammar.text
    assert response.text.format.type == "json_schema"


def test_reasoning_is_an_item_before_the_message(hermes: Daemon, create: Created) -> None:
    hermes.say("<think>\nWell.\n</think>\n\nYes.")
    response = create()
    reasoning, message = response.output
    assert (reasoning.type, reasoning.summary) == ("reasoning", [])
    assert [part.text for part in reasoning.content] == ["Well."]
    assert message.content[0].text == response.output_text == "Yes."
    assert response.usage.output_tokens_details.reasoning_tokens > 0


def test_who_asks_for_a_summary_has_the_reasoning_as_one(hermes: Daemon, create: Created) -> None:
    hermes.say("<think>\nWell.\n</think>\n\nYes.")
    reasoning, _ = create(reasoning={"summary": "auto"}).output
    assert ([part.text for part in reasoning.summary], reasoning.content) == (["Well."], None)


@pytest.mark.parametrize("fields", [{}, {"reasoning": {"summary": "auto"}}])
def test_sealed_reasoning_comes_back(
    hermes: Daemon, create: Created, fields: dict[str, Any]
) -> None:
    """A client that keeps what it cannot read brings the reasoning back."""
    hermes.say("<think>\nWëll.\n</think>\n\nYes.")
    first = create(store=False, include=["reasoning.encrypted_content"], **fields)
    reasoning, message = [item.model_dump(exclude_none=True) for item in first.output]
    del reasoning["summary"]
    reasoning |= {"summary": [], "content": []}
    create(
        input=[
            {"role": "user", "content": "Hi"},
            reasoning,
            message,
            {"role": "user", "content": "So?"},
        ]
    )
    given, _ = hermes.given
    assert given[1]["reasoning_content"] == "Wëll."
    assert given[1]["content"] == "Yes."


def test_reasoning_that_was_sealed_elsewhere_is_passed_over(
    hermes: Daemon, create: Created
) -> None:
    sealed = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAB="}
    create(
        input=[{"role": "user", "content": "Hi"}, sealed, {"role": "assistant", "content": "Yes."}]
    )
    assert "reasoning_content" not in hermes.given[0][1]


def test_logprobs_of_the_text(hermes: Daemon, create: Created) -> None:
    hermes.say("<think>\nWell.\n</think>\n\nYes.")
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    _, message = create(**asked).output
    entries = message.content[0].logprobs
    assert "".join(entry.token for entry in entries).strip() == "Yes."
    assert {len(entry.top_logprobs) for entry in entries} == {2}


def test_models_for_codex(hermes: Daemon) -> None:
    """It reads no list without a key of its own; others are not shown it."""
    listed = httpx.get(f"{hermes.url}/v1/models").json()
    assert "models" not in listed
    for_codex = httpx.get(f"{hermes.url}/v1/models", params={"client_version": "0.169.0"}).json()
    assert for_codex == listed | {"models": []}


def test_fields_of_clients_that_mean_nothing_here(create: Created) -> None:
    extra = {"client_metadata": {"a": "b"}, "context_management": [{"type": "compaction"}]}
    response = create(service_tier="auto", user="me", max_tool_calls=3, extra_body=extra)
    assert response.status == "completed"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": []}, "input", None),
        ({"input": 3}, "input", None),
        ({"input": [3]}, "input[0]", None),
        ({"input": [{"type": ["message"]}]}, "input[0].type", None),
        ({"input": [{"type": "compaction_trigger"}]}, "input", None),
        ({"input": [{"role": "user", "content": [PICTURE]}]}, "input[0].content[0]", "unsupported"),
        ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "input[0].id", None),
        ({"input": "x" * 600}, "input", "context_length_exceeded"),
        ({"previous_response_id": "resp_0"}, "previous_response_id", "previous_response_not_found"),
        ({"conversation": "conv_1"}, "conversation", "unsupported"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported"),
        ({"background": True, "store": False}, "background", None),
        ({"background": True, "stream": True}, "background", "unsupported"),
        ({"max_output_tokens": 0}, "max_output_tokens", None),
        ({"metadata": {str(key): "" for key in range(17)}}, "metadata", None),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", None),
        ({"tools": [{"type": "function"}]}, "tools[0].name", None),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", None),
        ({"tool_choice": "required"}, "tool_choice", None),
        ({"tool_choice": {"type": "shell"}}, "tool_choice", None),
        ({"tool_choice": {"type": "of_tomorrow"}}, "tool_choice", "unsupported"),
    ],
)
def test_refusals_name_the_fields_of_a_response(
    hermes: Daemon, fields: dict[str, Any], param: str | None, code: str | None
) -> None:
    told = error(hermes, {"input": "Hi"} | fields)
    assert told[:2] == (param, code)
    assert "messages" not in told[2]


def test_lists_are_counted_before_they_are_looked_at(hermes: Daemon) -> None:
    param, _, message = error(hermes, {"input": [{"role": "user", "content": "x"}] * 10_001})
    assert param == "input"
    assert "10000" in message


def test_the_object_has_the_penalties_and_the_bound_on_built_in_calls(create: Created) -> None:
    """Open Responses requires all three, also where the request says nothing."""
    plain = create().model_dump()
    assert (plain["presence_penalty"], plain["frequency_penalty"]) == (0, 0)
    assert plain["max_tool_calls"] is None
    given = create(
        extra_body={"presence_penalty": 0.5, "frequency_penalty": -1.5}, max_tool_calls=3
    ).model_dump()
    assert (given["presence_penalty"], given["frequency_penalty"]) == (0.5, -1.5)
    assert given["max_tool_calls"] == 3


def test_a_bound_on_calls_is_positive(create: Created) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tool_calls"):
        create(max_tool_calls=0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"effort": "zzz"}}, "reasoning.effort"),
        ({"include": ["reasoning.encrypted_content", "zzz"]}, "include[1]"),
    ],
)
def test_what_openai_does_not_know_is_refused(
    http: httpx.Client, fields: dict[str, object], param: str
) -> None:
    refused = http.post("/v1/responses", json={"input": "Hi", **fields})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
