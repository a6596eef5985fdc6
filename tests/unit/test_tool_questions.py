"""Grades of tool calls, and the questions that they are for."""

import json
from typing import Any

import pytest

from load_tests.bench.tool_calls import grade, load_questions, table, tools_of

QUESTIONS = load_questions()
SEND = next(one for one in QUESTIONS.questions if one.offers[0] == "send_email")


def message(*calls: tuple[str, Any]) -> dict[str, Any]:
    """An answer with calls; arguments that are text are given as they are."""
    functions = [
        {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)}
        for name, given in calls
    ]
    return {"content": None, "tool_calls": [{"function": function} for function in functions]}


def test_every_question_can_be_answered_by_the_functions_that_it_offers() -> None:
    assert len({one.ask for one in QUESTIONS.questions}) == 50
    for index, question in enumerate(QUESTIONS.questions):
        offered = {
            tool["function"]["name"]: tool["function"] for tool in tools_of(QUESTIONS, index)
        }
        assert offered.keys() == set(question.offers)
        assert len(offered) in {2, 3}
        right = offered[question.offers[0]]["parameters"]
        assert question.values.keys() <= right["properties"].keys()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (message(("send_email", SEND.values)), (True, True)),
        (
            message(("send_email", {k: f" {v}".upper() for k, v in SEND.values.items()})),
            (True, True),
        ),
        (message(("send_email", {**SEND.values, "to": "nobody"})), (True, False)),
        (message(("send_email", '{"to": "')), (True, False)),
        (message(("send_email", "[]")), (True, False)),
        (message(("set_alarm", SEND.values)), (False, False)),
        (message(("set_alarm", {}), ("send_email", SEND.values)), (False, False)),
        ({"content": "send_email"}, (False, False)),
    ],
)
def test_the_first_call_is_graded(answer: dict[str, Any], expected: tuple[bool, bool]) -> None:
    given = grade("auto", SEND, answer)
    assert (given.is_right_function, given.has_values) == expected
    counts = [str(int(value)) for value in (bool(answer.get("tool_calls")), *expected)]
    assert table([given]).rows == (("auto", "1", *counts),)
