"""What an answer means is the same in every dialect, whole as in pieces."""

import json
from itertools import count
from typing import Any

import pytest

from tests.contract.dialects.adapters import WEATHER_AND_PING, Dialect, Ollama, Responses
from tests.contract.dialects.conftest import STREAMS
from tests.contract.scripted import CALL, HERMES_CALL, HERMES_PING, Daemon
from tests.contract.wire import posted, writes

EVERYTHING = f"<think>\nHm, <tool_call>?\n</think>\n\nLet me see.\n{HERMES_CALL}\n{HERMES_PING}"
LONG = "".join(chr(ord("a") + i % 26) for i in range(450))
news = count()


def arguments(calls: Any) -> list[tuple[str, Any]]:
    return [(name, json.loads(text)) for name, text in calls]


@STREAMS
def test_reasoning_text_and_calls_are_apart(hermes: Daemon, dialect: Dialect, stream: bool) -> None:
    hermes.say(EVERYTHING)
    answer = dialect.ask(hermes, stream=stream, functions=WEATHER_AND_PING)
    assert answer.completion_tokens == len(EVERYTHING.encode())
    if not dialect.has_tools:
        assert (answer.text, answer.finish) == (EVERYTHING, "stop")
        return
    assert (answer.reasoning, answer.text) == ("Hm, <tool_call>?", "Let me see.")
    assert arguments(answer.calls) == [CALL, ("ping", {})]
    assert answer.finish == dialect.finishes["calls"]


@STREAMS
def test_usage_counts_the_prompt_once_and_says_what_was_cached(
    hermes: Daemon, dialect: Dialect, stream: bool
) -> None:
    """The fake engine's tokens are bytes, and it adopts all but the last of what it has seen."""
    hermes.say("Fïne.")
    text = f"Nobody has said this before, {next(news)}."
    cold, warm = (dialect.ask(hermes, stream=stream, text=text) for _ in range(2))
    prompt = hermes.asked.prompt
    assert warm.prompt_tokens == cold.prompt_tokens == len(prompt)
    assert warm.completion_tokens == cold.completion_tokens == len("Fïne.".encode())
    if not isinstance(dialect, Ollama):
        assert (cold.cached_tokens or 0) < len(prompt) - 1 == warm.cached_tokens


@STREAMS
def test_an_answer_says_why_it_ends(hermes: Daemon, dialect: Dialect, stream: bool) -> None:
    hermes.say("A long answer.")
    assert dialect.ask(hermes, stream=stream).finish == dialect.finishes["stop"]
    cut_off = dialect.ask(hermes, stream=stream, max_tokens=6)
    assert (cut_off.text, cut_off.finish) == ("A long", dialect.finishes["length"])
    assert cut_off.completion_tokens == 6


@STREAMS
def test_a_call_that_is_cut_off_has_what_there_is(
    hermes: Daemon, calling: Dialect, stream: bool
) -> None:
    hermes.say(HERMES_CALL)
    n_tokens = len(HERMES_CALL.partition(', "days"')[0].encode())
    answer = calling.ask(hermes, stream=stream, functions=WEATHER_AND_PING, max_tokens=n_tokens)
    if isinstance(calling, Ollama):  # whose clients run each call that they get
        assert (answer.calls, answer.finish) == ((), "length")
        return
    ((name, text),) = answer.calls
    assert (name, answer.finish) == ("get_weather", calling.finishes["length"])
    assert text.startswith(json.dumps({"city": CALL[1]["city"]}, ensure_ascii="\\u" in text)[:-1])


@STREAMS
@pytest.mark.parametrize("end", ['"city"', ', "days"', "3}", "}\n</tool_call>"])
def test_a_call_that_the_model_does_not_end_is_not_to_be_run(
    hermes: Daemon, calling: Dialect, stream: bool, end: str
) -> None:
    """What ends before its arguments do says so, and Ollama, which cannot, leaves it out. One whose
    end marker alone is missing is whole.
    """
    is_whole = end.startswith("}")
    hermes.say(f"{HERMES_PING}\n{HERMES_CALL.partition(end)[0]}")
    answer = calling.ask(hermes, stream=stream, functions=WEATHER_AND_PING)
    is_left_out = isinstance(calling, Ollama) and not is_whole
    assert [name for name, _ in answer.calls] == ["ping", "get_weather"][: 1 if is_left_out else 2]
    cut_off = "incomplete" if isinstance(calling, Responses) else calling.finishes["stop"]
    assert answer.finish == (calling.finishes["calls"] if is_whole else cut_off)


def test_a_reader_that_lags_behind_is_told_the_same_in_fewer_events(
    hermes: Daemon, dialect: Dialect
) -> None:
    """The engine says everything before the daemon is given time to send it."""
    hermes.say(LONG, steps_at_once=len(LONG))
    with posted(hermes.url, dialect.path, dialect.stream_body(), is_deaf=True) as connection:
        said = [event for together in writes(connection) for event in together]
    answer = dialect.streamed(said)
    assert (answer.text, answer.completion_tokens) == (LONG, len(LONG))
    assert len(said) < len(LONG) / 2
