"""`/api/chat`: what Ollama's client sends, and what it is told."""

from typing import Any

import ollama
import pytest

from engine.values.request import GrammarKind
from tests.contract.ollama.scripted import OllamaDaemon
from tests.contract.scripted import (
    CALL,
    CLIENT_SECONDS,
    HERMES_CALL,
    HERMES_PING,
    TOOLS,
    USER,
)

DURATIONS = ("load_duration", "prompt_eval_duration", "eval_duration")


def test_calls_of_a_stream_are_whole_and_numbered(hermes: OllamaDaemon) -> None:
    hermes.say(f"{HERMES_CALL}\n{HERMES_PING}")
    messages = [line["message"] for line in hermes.lines(tools=TOOLS)]
    made = [call for message in messages for call in message.get("tool_calls", ())]
    assert [call["function"] for call in made] == [
        {"index": 0, "name": "get_weather", "arguments": CALL[1]},
        {"index": 1, "name": "ping", "arguments": {}},
    ]
    assert len({call["id"] for call in made}) == 2


def test_an_answer_says_what_it_took(hermes: OllamaDaemon) -> None:
    hermes.say("Hello")
    for answer in (hermes.chat(), [*hermes.chat(stream=True)][-1]):
        assert answer.prompt_eval_count == len("<user>How is the weather?\n<assistant>")
        assert answer.eval_count == len("Hello")
        parts = [getattr(answer, name) for name in DURATIONS]
        assert all(part >= 0 for part in parts)
        assert sum(parts) == answer.total_duration > 0


def test_the_engine_is_asked_for_what_the_options_say(hermes: OllamaDaemon) -> None:
    hermes.chat(
        options={
            "num_predict": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0.1,
            "repeat_penalty": 1.2,
            "presence_penalty": 0.3,
            "frequency_penalty": 0.4,
            "seed": 42,
            "stop": ["x", "y"],
            "num_ctx": 512,
            "mirostat": 0,
            "num_gpu": 1,
        }
    )
    asked = hermes.asked
    sampling = asked.sampling
    assert (asked.max_tokens, asked.stop) == (7, ("x", "y"))
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 20)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.seed) == (0.1, 1.2, 42)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.3, 0.4)


def test_a_context_that_the_model_has_not_is_refused(hermes: OllamaDaemon) -> None:
    most = hermes.engine.card.max_sequence_tokens
    hermes.chat(options={"num_ctx": most})
    with pytest.raises(
        ollama.ResponseError, match=r"^options\.num_ctx: 10,000,000 tokens are more than"
    ):
        hermes.chat(options={"num_ctx": 10_000_000})


@pytest.mark.parametrize("options", [{}, {"num_predict": -1, "seed": -1}, {"num_predict": -2}])
def test_an_option_may_leave_it_open(hermes: OllamaDaemon, options: dict[str, int]) -> None:
    hermes.chat(options=options)
    asked = hermes.asked
    assert asked.max_tokens == hermes.engine.card.max_context_tokens - len(asked.prompt)
    assert asked.sampling.seed is None


@pytest.mark.parametrize(
    ("think", "told"),
    [
        (None, {}),
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}),
        ("max", {"enable_thinking": True, "reasoning_effort": "high"}),
    ],
)
def test_the_template_is_told_whether_to_think(
    hermes: OllamaDaemon, think: bool | str | None, told: dict[str, Any]
) -> None:
    hermes.chat(think=think)
    assert hermes.given[1] == told


@pytest.mark.parametrize(
    ("format", "schema"),
    [("json", '{"type": "object"}'), ({"type": "array"}, '{"type": "array"}')],
)
def test_an_answer_of_a_format(hermes: OllamaDaemon, format: Any, schema: str) -> None:
    hermes.chat(format=format)
    constraint = hermes.asked.constraint
    assert constraint is not None
    assert (constraint.param, constraint.grammar.kind) == ("format", GrammarKind.JSON_SCHEMA)
    assert constraint.grammar.text == schema


def test_a_tool_loop_without_ids(hermes: OllamaDaemon) -> None:
    """Ollama's client for Python loses them, and names the tool in place of them."""
    hermes.say(f"{HERMES_CALL}\n{HERMES_PING}")
    first = hermes.chat(tools=TOOLS).message
    results = [
        {"role": "tool", "content": "pong", "tool_name": "ping"},
        {"role": "tool", "content": "rain", "tool_name": "get_weather"},
    ]
    hermes.say("It rains.")
    assert hermes.chat(USER, first, *results, tools=TOOLS).message.content == "It rains."
    _, assistant, pong, rain = hermes.given[0]
    made = {call["function"]["name"]: call["id"] for call in assistant["tool_calls"]}
    assert assistant["tool_calls"][0]["function"]["arguments"] == CALL[1]
    assert (pong["name"], pong["tool_call_id"]) == ("ping", made["ping"])
    assert (rain["name"], rain["tool_call_id"]) == ("get_weather", made["get_weather"])


def test_an_answer_that_comes_back_with_its_ids_is_known(hermes: OllamaDaemon) -> None:
    hermes.say(f"<think>\nHm.\n</think>\n\n{HERMES_CALL}")
    assistant = hermes.post(tools=TOOLS).json()["message"]
    (call,) = assistant["tool_calls"]
    result = {"role": "tool", "content": "rain", "tool_call_id": call["id"]}
    kept = hermes.http.get("/admin/daemon").json()["remembered"]["replays"]
    hermes.post(messages=[USER, assistant, result], tools=TOOLS)
    assert kept > 0
    assert hermes.given[0][1]["tool_calls"][0]["id"] == call["id"]
    assert hermes.given[0][1]["reasoning_content"] == "Hm."


def test_an_answer_that_was_begun_is_continued(hermes: OllamaDaemon) -> None:
    hermes.chat(USER, {"role": "assistant", "content": "It is"})
    assert hermes.given[1]["continue_final_message"] is True


def test_log_probabilities_are_those_of_each_token(hermes: OllamaDaemon) -> None:
    hermes.say("Hey")
    whole = hermes.chat(logprobs=True, top_logprobs=2).logprobs
    parts = hermes.chat(logprobs=True, top_logprobs=2, stream=True)
    streamed = [entry for part in parts for entry in part.logprobs or ()]
    assert [entry.token for entry in whole] == ["H", "e", "y"]
    assert streamed == list(whole)
    assert len(whole[0].top_logprobs) == 2


@pytest.mark.parametrize("name", ["bytes", "bytes:latest", ""])
def test_a_name_may_have_the_tag_that_clients_add(hermes: OllamaDaemon, name: str) -> None:
    answer = hermes.post(model=name)
    assert (answer.status_code, answer.json()["model"]) == (200, "bytes")


@pytest.mark.parametrize("keep_alive", [None, "5m"])
def test_a_request_without_a_prompt_loads_the_model(
    hermes: OllamaDaemon, keep_alive: object
) -> None:
    chat = hermes.ollama.chat("bytes", [], keep_alive=keep_alive)
    assert (chat.done, chat.done_reason, chat.message.content) == (True, "load", "")
    generated = hermes.ollama.generate("bytes", "", keep_alive=keep_alive)
    assert (generated.done, generated.done_reason, generated.response) == (True, "load", "")
    assert hermes.engine.submitted.empty()


def test_roles_are_read_in_any_case_and_a_developer_is_the_system(hermes: OllamaDaemon) -> None:
    roles = ("Developer", "User", "ASSISTANT", "user")
    answer = hermes.post(messages=[{"role": role, "content": "Hi"} for role in roles])
    assert answer.status_code == 200
    given, _ = hermes.given
    assert [message["role"] for message in given] == ["system", "user", "assistant", "user"]


def test_a_request_without_a_prompt_and_a_keep_alive_of_zero_unloads_the_model() -> None:
    with OllamaDaemon.serving() as made:
        chat = made.ollama.chat("bytes", [], keep_alive=0)
        assert (chat.done, chat.done_reason, chat.message.content) == (True, "unload", "")
        generated = made.ollama.generate("bytes", "", keep_alive=0)
        assert (generated.done, generated.done_reason, generated.response) == (True, "unload", "")
        assert made.engine.drained.get(timeout=CLIENT_SECONDS) is not None
        assert made.engine.submitted.empty()
