"""What is planned for a request's answers."""

import inspect
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.values.output import OutputEvent
from engine.values.request import Alternative, GrammarKind
from server.dialects.chat.routes import as_chat
from server.dialects.chat.schema import ChatRequest
from server.errors import ApiError
from server.generation.choice import Choice
from server.generation.plan import AnswerPlan, AnswerPlanner
from server.parsing.registry import REASONING_FORMATS
from server.settings.models import ConversationSettings
from tests.contract.fake_engine import ByteTokenizer

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "ping"}}
CHOICE_FILE = inspect.getfile(Choice)
CONTENT_AFTER = sorted(name for name, format in REASONING_FORMATS.items() if format.content)


def settings(tools: str, reasoning: str, **others: Any) -> ConversationSettings:
    return ConversationSettings(tool_parser=tools, reasoning_parser=reasoning, **others)


def planned(reasoning: str, tail: str, **fields: Any) -> AnswerPlan:
    tools = {"openai_gptoss": "openai", "kimi_k3": "kimi_k3"}.get(reasoning, "hermes")
    planner = AnswerPlanner(ByteTokenizer(), settings(tools, reasoning))
    messages = [{"role": "user", "content": "Hi"}]
    body = ChatRequest.model_validate({"messages": messages, **fields})
    return planner.plan(as_chat(body, reasons=True), list(tail.encode()))


ANSWER = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": {"type": "object"}},
}
MARKED = {"<tool_call>": 200, "[TOOL_CALLS]": 201}


def constraint_of(
    parser: str = "hermes", added: Mapping[str, int] = MARKED, guides: str = "all", **fields: Any
) -> Any:
    """The constraint of a request for an answer to a model that reasons."""
    setting = settings(parser, "deepseek_r1", tool_guides=guides)
    planner = AnswerPlanner(ByteTokenizer(added_tokens=added), setting)
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return planner.plan(as_chat(ChatRequest.model_validate(body), reasons=True), []).constraint


def structured(**fields: Any) -> Any:
    """The constraint of an answer that has a schema, with a tool."""
    return constraint_of(**{"tools": [TOOL], "response_format": ANSWER, **fields})


def test_a_model_that_may_not_call_all_it_knows_of_is_held_to_the_others() -> None:
    """From the marker on, where that is a token of its own: before it may say what it likes."""
    tools = [TOOL, {"type": "function", "function": {"name": "pong"}}]
    chosen = {"mode": "auto", "tools": [TOOL]}
    choice = {"type": "allowed_tools", "allowed_tools": chosen}
    constraint = constraint_of(tools=tools, tool_choice=choice)
    assert (constraint.behind, constraint.repeats) == ((200,), True)
    assert "ping" in constraint.grammar.text
    assert "pong" not in constraint.grammar.text
    assert None not in constraint.weaker
    every = constraint_of(tools=tools, tool_choice="auto")
    assert "pong" in every.grammar.text
    assert every.weaker[-1] is None, "nobody has asked for it to hold"


def test_calls_that_are_not_strict_may_be_left_alone() -> None:
    for tool, is_held in ((TOOL, False), (strict(TOOL), True)):
        held = constraint_of(guides="strict-only", tools=[tool])
        assert (held is not None) is is_held


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {**tool["function"], "strict": True}}


def test_a_function_is_held_to_the_names_of_its_parameters_where_its_schema_is_none() -> None:
    members = {"properties": {"key": {"type": "string"}}, "required": True}
    wrong = {"type": "function", "function": {"name": "ping", "parameters": members}}
    held = structured(parser="qwen3_coder", tools=[wrong], response_format={"type": "text"})
    assert "<parameter=key>" in held.grammar.text
    assert held.weaker == (None,)
    with pytest.raises(ApiError):
        structured(parser="qwen3_coder", tools=[strict(wrong)])


@pytest.mark.parametrize(("parser", "begin"), [("hermes", 200), ("mistral", 201)])
def test_an_answer_is_of_its_schema_or_calls(parser: str, begin: int) -> None:
    constraint = structured(parser=parser)
    assert constraint.grammar.kind is GrammarKind.JSON_SCHEMA
    assert text(constraint.thinking.begin) == "<think>"
    assert text(constraint.thinking.space) == "\n"  # two of them are no token here
    assert constraint.instead.begin == begin
    calls = constraint.instead.constraint
    assert calls.behind == (begin,)
    assert calls.thinking is None, "it is over"


def test_calls_in_place_of_a_schema_are_held_as_they_are_without_one() -> None:
    for fields in ({"tools": [strict(TOOL)]}, {"parallel_tool_calls": False}, {}):
        calls = structured(response_format={"type": "text"}, **fields)
        assert calls.behind == (200,)
        assert text(calls.thinking.end) == "</think>"
        assert structured(**fields).instead == Alternative(200, replace(calls, thinking=None))


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}, {"added": {}}], ids=str)
def test_who_may_not_call_or_cannot_be_told_from_text_is_held_to_the_schema(
    fields: dict[str, Any],
) -> None:
    constraint = structured(**fields)
    assert constraint.grammar.kind is GrammarKind.JSON_SCHEMA
    assert constraint.instead is None


def test_who_must_call_is_held_to_calls_alone() -> None:
    constraint = structured(tool_choice="required")
    assert constraint.grammar.kind is GrammarKind.LARK
    assert constraint.instead is None


def text(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode()


@pytest.mark.parametrize("name", CONTENT_AFTER)
def test_calls_come_right_behind_the_reasoning_and_content_behind_what_leads_to_it(
    name: str,
) -> None:
    """A model that calls never writes what comes before content: a grammar must not wait for it."""
    format = REASONING_FORMATS[name]
    required = planned(name, format.begin, tools=[TOOL], tool_choice="required").constraint
    structured = planned(name, format.begin, guided_regex="a").constraint
    assert required is not None
    assert structured is not None
    assert required.thinking is not None
    assert structured.thinking is not None
    assert text(required.thinking.end) == format.end + format.before_calls
    assert text(structured.thinking.end) == format.content, "with reasoning before it or without"
    assert required.thinking.space == structured.thinking.space == ()


@pytest.mark.parametrize("name", sorted(REASONING_FORMATS))
def test_a_budget_forces_the_end_of_reasoning_and_nothing_of_what_follows(name: str) -> None:
    format = REASONING_FORMATS[name]
    closed = planned(name, "assistant", thinking_budget=5).thinking_budget
    opened = planned(name, format.begin + "\n", thinking_budget=5).thinking_budget
    assert closed is not None
    assert opened is not None
    assert (text(closed.start), text(closed.end)) == (format.begin, format.end)
    assert (text(opened.start), text(opened.end)) == (format.begin, format.end)
    assert (closed.is_open, opened.is_open) == (False, True)


def test_reasoning_that_the_prompt_has_closed_is_not_waited_for() -> None:
    plan = planned("deepseek_r1", "<think>\n\n</think>\n\n", guided_regex="a", thinking_budget=5)
    assert plan.constraint is not None
    assert plan.constraint.thinking is None
    assert plan.thinking_budget is not None
    assert not plan.thinking_budget.is_open, "it counts from the next start marker on"


@pytest.mark.parametrize(("fields", "is_kept"), [({}, False), ({"tools": [TOOL]}, True)], ids=str)
def test_only_an_answer_that_may_have_calls_keeps_its_tokens(
    fields: dict[str, Any], is_kept: bool
) -> None:
    """Those of an answer with calls are replayed when it is sent back."""
    n_tokens = 10_000
    choice = Choice(planned("deepseek_r1", "", **fields))
    events = [OutputEvent("r", 0, token_ids=(1,))] * n_tokens  # whose text is hidden
    tracemalloc.start()
    try:
        choice.feed(events)
        kept = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, CHOICE_FILE)])
    finally:
        tracemalloc.stop()
    kept_bytes = sum(trace.size for trace in kept.traces)  # threads of other tests allocate, too
    assert (kept_bytes > 8 * n_tokens) == is_kept
