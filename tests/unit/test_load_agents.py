"""The replay of an agent's sessions: the same in every dialect, and what was there to adopt."""

import time

import numpy as np
import pytest

from load_tests.agents.command import DIALECTS
from load_tests.agents.dialects.chat import ChatCompletions
from load_tests.agents.dialects.dialect import Ask, Told, UserTurn
from load_tests.agents.player import Exchange, Player, Session, read
from load_tests.agents.recording import Answer, Call, Recording, Tool, Turn, record
from load_tests.agents.styles import Own, Recorded, Style
from load_tests.agents.tables import Run, summary_table, turn_table
from load_tests.agents.tokens import Computed, PromptTokens
from load_tests.checkpoint import checkpoint
from load_tests.client import TargetError
from tests.unit.test_load_client import Body, served, stream

TOLD = Told(Answer("so: ", (Call("call_1", "look", '{"a": 1}'),)), 100, 90, 7)
STREAMS: dict[str, list[Body]] = {
    "chat": [
        {"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"content": "so: "}, "finish_reason": None}]},
        *(
            {"choices": [{"index": 0, "delta": {"tool_calls": [part]}, "finish_reason": None}]}
            for part in (
                {"index": 0, "id": "call_1", "function": {"name": "look", "arguments": ""}},
                {"index": 0, "function": {"arguments": '{"a":'}},
                {"index": 0, "function": {"arguments": " 1}"}},
            )
        ),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        {
            "choices": [],
            "usage": {
                "prompt_tokens": 100,
                "completion_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 90},
            },
        },
    ],
    "responses": [
        {"type": "response.created", "response": {"id": "resp_1", "usage": None}},
        {"type": "response.output_text.delta", "delta": "so: "},
        {
            "type": "response.output_item.done",
            "item": {"type": "message", "content": [{"type": "output_text", "text": "so: "}]},
        },
        {
            "type": "response.output_item.done",
            "item": {
                "type": "function_call",
                "id": "fc_1",
                "call_id": "call_1",
                "name": "look",
                "arguments": '{"a": 1}',
            },
        },
        {
            "type": "response.completed",
            "response": {
                "id": "resp_1",
                "usage": {
                    "input_tokens": 100,
                    "input_tokens_details": {"cached_tokens": 90},
                    "output_tokens": 7,
                },
            },
        },
    ],
    "messages": [
        {
            "type": "message_start",
            "message": {
                "usage": {
                    "input_tokens": 4,
                    "cache_creation_input_tokens": 6,
                    "cache_read_input_tokens": 90,
                    "output_tokens": 1,
                }
            },
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": "so: "},
        },
        {"type": "content_block_stop", "index": 0},
        {
            "type": "content_block_start",
            "index": 1,
            "content_block": {"type": "tool_use", "id": "call_1", "name": "look", "input": {}},
        },
        *(
            {
                "type": "content_block_delta",
                "index": 1,
                "delta": {"type": "input_json_delta", "partial_json": piece},
            }
            for piece in ('{"a":', " 1}")
        ),
        {"type": "content_block_stop", "index": 1},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use"},
            "usage": {"output_tokens": 7, "cache_read_input_tokens": None},
        },
        {"type": "message_stop"},
    ],
}
ERRORS: dict[str, Body] = {
    "chat": {"error": {"message": "out of memory"}},
    "responses": {"type": "response.failed", "response": {"error": {"message": "out of memory"}}},
    "messages": {"type": "error", "error": {"message": "out of memory"}},
}


def sse(events: list[Body]) -> bytes:
    return stream(*events).partition("\r\n\r\n")[2].encode()


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialects_stream_says_the_same(name: str) -> None:
    assert read(DIALECTS[name], sse(STREAMS[name])) == TOLD


@pytest.mark.parametrize("name", DIALECTS)
def test_a_stream_that_breaks_off_or_fails_is_an_error(name: str) -> None:
    with pytest.raises(TargetError, match="in a stream that ends"):
        read(DIALECTS[name], sse(STREAMS[name][:-1]))
    with pytest.raises(TargetError, match="out of memory"):
        read(DIALECTS[name], sse([*STREAMS[name][:2], ERRORS[name]]))


def test_a_response_cut_by_its_limit_counts_too() -> None:
    *events, last = STREAMS["responses"]
    cut = {**last, "type": "response.incomplete"}
    assert read(DIALECTS["responses"], sse([*events, cut])) == TOLD


LOOK = Tool("look", "looks", {"type": "object"})
ASK = Ask(
    "m",
    "rules",
    (LOOK,),
    (
        UserTurn((), "first"),
        Answer("so", (Call("c1", "look", '{"a": 1}'),)),
        UserTurn((("c1", "found"),), "more"),
    ),
    "required",
    9,
)


def test_chat_completions_have_the_whole_history_as_messages() -> None:
    body = DIALECTS["chat"].body(ASK)
    function = {"name": "look", "arguments": '{"a": 1}'}
    call = {"id": "c1", "type": "function", "function": function}
    assert body["messages"] == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "so", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
        {"role": "user", "content": "more"},
    ]
    assert (body["tool_choice"], body["max_tokens"]) == ("required", 9)


def test_responses_have_it_as_items() -> None:
    body = DIALECTS["responses"].body(ASK)
    assert body["instructions"] == "rules"
    kinds = [item["type"] for item in body["input"]]
    assert kinds == ["message", "message", "function_call", "function_call_output", "message"]
    assert [item.get("call_id") for item in body["input"]] == [None, None, "c1", "c1", None]
    assert (body["tool_choice"], body["max_output_tokens"]) == ("required", 9)
    assert body["tools"][0]["name"] == "look"


def test_messages_have_it_as_blocks_of_two_roles() -> None:
    body = DIALECTS["messages"].body(ASK)
    assert body["system"] == [{"type": "text", "text": "rules"}]
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    _, said, results = (message["content"] for message in body["messages"])
    assert said[1] == {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": 1}}
    assert results[0] == {"type": "tool_result", "tool_use_id": "c1", "content": "found"}
    assert results[1] == {"type": "text", "text": "more"}
    assert body["tool_choice"] == {"type": "any", "disable_parallel_tool_use": True}
    assert body["tools"][0]["input_schema"] == LOOK.parameters


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> PromptTokens:
    return PromptTokens(checkpoint("agent", cache=tmp_path_factory.mktemp("agent")))


def opening(recording: Recording) -> Ask:
    """Its first request."""
    history = (UserTurn((), recording.turns[0].text),)
    return Ask("m", recording.system, recording.tools, history, "auto", 1)


def test_sessions_are_equal_work_and_share_system_prompt_and_tools(tokens: PromptTokens) -> None:
    one, other = record(0, 0), record(0, 1)
    assert one == record(0, 0) != record(1, 0)
    assert (one.system, one.tools) == (other.system, other.tools)
    prompts = [tokens.of(opening(recording)) for recording in (one, other)]
    assert len(prompts[0]) == len(prompts[1])
    computed = Computed()
    computed.add(0, prompts[0], len(prompts[0]))
    assert 19_500 < computed.common(prompts[1]) < 20_500


def test_each_result_of_a_recording_has_its_call() -> None:
    turns = record(0, 0).turns
    assert len(turns) == 30
    assert turns[0].text
    calls = [len(turn.answer.calls) for turn in turns]
    assert [len(turn.results) for turn in turns] == [0, *calls[:-1]]
    assert {1, 2} == set(calls)


@pytest.mark.parametrize(
    ("prompt", "common"),
    [
        ([1, 2, 3, 9], 3),  # parts from the first prompt before its end
        ([1, 2, 3, 4, 8, 8], 6),  # goes on behind its answer
        ([5, 6, 7], 2),  # of the second session, whose answer is not kept
        ([9], 0),
    ],
)
def test_in_common_is_what_an_earlier_prompt_and_its_answer_begin_with(
    prompt: list[int], common: int
) -> None:
    computed = Computed()
    computed.add(0, np.array([1, 2, 3, 4]), 6)
    computed.add(1, np.array([5, 6]), 2)
    assert computed.common(np.array(prompt)) == common


SMALL = Recording(
    "rules",
    (LOOK,),
    (
        Turn((), "first", Answer("so", (Call("r1", "look", "{}"), Call("r2", "look", "{}")))),
        Turn(("found 1", "found 2"), "", Answer("done")),
    ),
)


def honest(tokens: PromptTokens, style: Style, body: Body) -> str:
    """Answers with one call, and counts the prompt as its template makes it."""
    history: list[UserTurn | Answer] = [UserTurn((), "first")]
    if len(body["messages"]) > 2:
        results = [m for m in body["messages"] if m["role"] == "tool"]
        kept = style.kept(SMALL.turns[0].answer, TOLD)
        found = tuple((m["tool_call_id"], m["content"]) for m in results)
        history += [kept, UserTurn(found, "")]
    prompt = tokens.of(Ask("tiny", "rules", (LOOK,), history, style.choice, 1))
    *events, usage = STREAMS["chat"]
    counted = {**usage["usage"], "prompt_tokens": len(prompt)}
    return stream(*events, {**usage, "usage": counted}, "[DONE]")


@pytest.mark.parametrize(
    ("style", "results"),
    [
        (Recorded(), [("r1", "found 1"), ("r2", "found 2")]),
        (Own(), [("call_1", "found 1")]),
    ],
)
async def test_results_go_back_under_the_ids_of_the_answer_that_is_kept(
    style: Style, results: list[tuple[str, str]], tokens: PromptTokens
) -> None:
    async with served(lambda body: honest(tokens, style, body)) as (fake, target):
        player = Player(target, tokens, time.process_time)
        first, second = await player.play([Session(ChatCompletions(), 1, 5, SMALL)], style)
    sent = [m for m in fake.bodies[1]["messages"] if m["role"] == "tool"]
    assert [(m["tool_call_id"], m["content"]) for m in sent] == results
    assert (first.seat, first.turn, first.common_tokens) == (1, 0, 0)
    assert second.common_tokens == first.prompt_tokens + style.kept_tokens(TOLD)


def only(name: str) -> Session:
    return Session(DIALECTS[name], 0, 0, SMALL)


async def test_another_prompt_than_the_templates_is_an_error(tokens: PromptTokens) -> None:
    async with served(lambda body: stream(*STREAMS["chat"], "[DONE]")) as (_, target):
        with pytest.raises(TargetError, match="100 tokens of prompt, where the template makes"):
            await Player(target, tokens, time.process_time).play([only("chat")], Recorded())


async def test_a_dialect_that_is_not_there_is_an_error(tokens: PromptTokens) -> None:
    async with served(lambda body: "HTTP/1.1 404 Not Found\r\n\r\nno such URL") as (_, target):
        with pytest.raises(TargetError, match="HTTP 404: no such URL"):
            await Player(target, tokens, time.process_time).play([only("messages")], Own())


async def test_sessions_take_turns_and_each_goes_first_in_turn(tokens: PromptTokens) -> None:
    style = Recorded()
    async with served(lambda body: honest(tokens, style, body)) as (_, target):
        sessions = [Session(ChatCompletions(), seat, seat, SMALL) for seat in range(2)]
        exchanges = await Player(target, tokens, time.process_time).play(sessions, style)
    assert [(e.turn, e.seat) for e in exchanges] == [(0, 0), (0, 1), (1, 1), (1, 0)]


def test_the_tables_show_each_turn_and_how_dialects_compare() -> None:
    style = Recorded()

    def exchange(dialect: str, turn: int, cached_tokens: int, seconds: float) -> Exchange:
        return Exchange(dialect, 0, turn, 200, cached_tokens, 8, 100, seconds, 2 * seconds)

    runs = [
        Run(style, (exchange("one", 0, 100, 2.0), exchange("other", 0, 97, 3.0))),
        Run(style, (exchange("other", 0, 99, 2.0), exchange("one", 0, 100, 4.0))),
    ]
    assert turn_table(style, runs).rows == (("1", "200", "100", "100.00%", "97.00%"),)
    one, other = summary_table(runs).rows
    assert one == (
        style.name,
        "one",
        "400",
        "200",
        "100.00%",
        "6.00",
        "1.000 (1.000-1.000)",
        "12.00",
        "1.000",
    )
    assert other == (
        style.name,
        "other",
        "400",
        "196",
        "97.00%",
        "5.00",
        "1.000 (0.600-1.400)",
        "10.00",
        "0.833",
    )
