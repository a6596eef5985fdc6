"""Ollama's requests as they are read."""

import math

import pytest

from server.dialects.ollama.read import chat_messages
from server.dialects.ollama.schema import OllamaChatRequest, OllamaMessageParam


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (0, 0),
        (300, 300),
        (1.5, 1.5),
        ("0", 0),
        ("300", 300),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("1m0.5s", 60.5),
        ("250ms", 0.25),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
        (1e300, math.inf),
    ],
)
def test_a_model_is_kept_for_as_long_as_is_said(written: float | str, seconds: float) -> None:
    body = OllamaChatRequest.model_validate({"keep_alive": written})
    assert body.keep_alive == pytest.approx(seconds)


@pytest.mark.parametrize("written", ["", "m", "5x", "5m3", "five", [], {}, True, "9" * 99])
def test_what_is_no_time_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="keep_alive"):
        OllamaChatRequest.model_validate({"keep_alive": written})


def call(name: str, id: str = "") -> dict[str, object]:
    return {"id": id, "function": {"name": name, "arguments": {}}}


def message(role: str, **fields: object) -> OllamaMessageParam:
    return OllamaMessageParam.model_validate({"role": role, **fields})


def test_results_find_their_calls() -> None:
    """By id, else by the tool's name, else in order, and each call has one result."""
    messages = chat_messages(
        [
            message("assistant", tool_calls=[call("f"), call("g"), call("f"), call("h", "mine")]),
            message("tool", tool_call_id="mine"),
            message("tool", tool_name="f"),
            message("tool", tool_name="f"),
            message("tool"),
            message("tool", tool_name="nobody"),
        ]
    )
    ids = [call.id for call in messages[0].calls]
    assert len(set(ids)) == 4
    first, second, third, mine = ids
    assert mine == "mine"
    assert [answer.answered_call for answer in messages[1:]] == [
        mine,
        first,
        third,
        second,
        None,
    ]
