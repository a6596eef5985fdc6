"""What clients send cannot forge lines of the log, or command the terminal that shows them."""

import logging

from hypothesis import given
from hypothesis import strategies as st

from engine.values.log_lines import LogFormatter

HOSTILE = st.text(st.sampled_from("a\n\r\t\x1b\x07\x00\x7f\x85\x9b\u2028\u2029é"), min_size=1)


def formatted(message: str, error: Exception | None = None) -> str:
    information = None if error is None else (type(error), error, None)
    record = logging.LogRecord("rootstock", logging.WARNING, "", 0, "%s", (message,), information)
    return LogFormatter().format(record)


@given(HOSTILE)
def test_a_message_is_one_line_without_controls(said: str) -> None:
    line = formatted(said)
    assert line.splitlines() == [line]
    assert line.isprintable()


@given(HOSTILE)
def test_a_traceback_keeps_its_lines_alone(said: str) -> None:
    text = formatted("failed", ValueError(said))
    assert text.replace("\n", "").replace("\t", "").isprintable()


def test_plain_text_stays_as_it_is() -> None:
    assert formatted("the café of request 1: 'ü'").endswith(": the café of request 1: 'ü'")
